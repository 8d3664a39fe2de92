"""Rows of an embedding that are looked up, with their norms bounded: torch's ``embedding(..., max_norm=)``.

torch changes the weight itself, before the look-up. ``renormalized_rows(w, ids)`` is the weight after that; its
gradient is that of `w`, and an optimizer updates it instead of `w` (`Trait.REPLACES`).
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    define,
    gradient_of,
    parse_rule,
)


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    weight, ids = types
    if len(weight.shape) != 2 or "int" not in ids.dtype:
        raise ValueError("expected a weight of rows, and integer indices of them")
    return (weight,)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """All indices count, and whole rows."""
    ids = " ".join(f"[i{dim}]" for dim in range(len(types[1].shape)))
    return parse_rule(f"[n] [d], {ids} -> [n] [d]", [t.shape for t in types], [results[0].shape])


define(
    "renormalized_rows",
    Semantics(infer=_infer, torch="norms.renormalized_rows({0}, {1}, {most}, {order})"),
    Split(_rule),
    cost=Cost(flops=lambda types, attrs, results: 4.0 * types[0].elements),
    code=Code(relax="norms.renormalized_rows({0}, {1}, {most}, {order})"),
    gradient=gradient_of(lambda b: b.grad, None),
    traits={Trait.REPLACES},
)


@aten("distir.renormalized_rows.default")
def _renormalized_rows(g: Builder, weight: Value, ids: Value, most: float, order: float) -> Any:
    return g.emit("renormalized_rows", weight, ids, most=float(most), order=float(order))
