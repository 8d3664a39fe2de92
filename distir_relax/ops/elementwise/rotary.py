"""Rotary positions: the halves of a vector rotated by angles (Su et al., RoFormer, 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.elementwise.pointwise import infer_common
from distir_relax.ops.table import (
    Attrs,
    Code,
    Cost,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    flops_per_result,
    operands,
    parse_rule,
)


def _infer_rotary(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (result,) = infer_common(types, attrs)
    last = [t.shape[-1:] for t in types]
    if result != types[0] or len(set(last)) > 1 or not last[0] or last[0][0] % 2:
        raise ValueError(f"expected angles that broadcast to vectors of even size, found {[t.shape for t in types]}")
    return (result,)


def _rotary_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    return parse_rule("... [d], ... [d], ... [d] -> ... [d]", [t.shape for t in types], [results[0].shape])


def _rotary_attrs(shapes: Sequence[tuple[Any, ...]], captured: Attrs) -> Attrs | None:
    """Return no attributes, if the slices are the halves of the last dim."""
    axis, size, half = captured["axis"], captured["size"], captured["half"]
    return {} if axis == len(shapes[0]) - 1 and shapes[0][axis] == size == 2 * half else None


_FIRST = "strided_slice(0, axes=(axis,), begin=(0,), end=(half,), strides=(1,))"
_SECOND = "strided_slice(0, axes=(axis,), begin=(half,), end=(size,), strides=(1,))"
define(
    "rotary",
    Semantics(
        infer=_infer_rotary, torch="positions.rotary({0}, {1}, {2})", linear=(operands(0), operands(1, 2)),
    ),
    Split(_rotary_rule),
    cost=Cost(flops=flops_per_result(3.0)),
    code=Code(
        relax="positions.rotary({0}, {1}, {2})",
        patterns=(f"add(multiply(0, 1), multiply(concat(negative({_SECOND}), {_FIRST}, axis=axis), 2))",),
        fused_attrs=_rotary_attrs,
    ),
    traits={Trait.KEEPS_ORDER, Trait.NATIVE},
)  # fmt: skip
