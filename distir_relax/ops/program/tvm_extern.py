"""TVM functions: a `PrimFunc` is split as its blocks allow; any other function is computed replicated."""

from __future__ import annotations

import warnings
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import Attrs, Builder, Code, Rule, Semantics, Split, Trait, Types, define, parse_rule, relax


class ComputedWhole(UserWarning):
    """A called function has no sharding rule: every device computes it on whole tensors."""


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return tuple(TensorType(tuple(s), d) for s, d in zip(attrs["shapes"], attrs["dtypes"], strict=True))


def _unsplit_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """No dim of any operand or result may be split."""
    sides = []
    for letter, tensors in (("x", types), ("y", results)):
        dims = [[f"[{letter}{i}_{d}]" for d in range(len(t.shape))] for i, t in enumerate(tensors)]
        sides.append(", ".join(" ".join(names) for names in dims))
    return parse_rule(" -> ".join(sides), [t.shape for t in types], [t.shape for t in results])


def _tir_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """Return the rule in attribute `rule`, which the frontend derives from the function's blocks; else split none."""
    text = attrs.get("rule")
    if text is None:
        return _unsplit_rule(types, attrs, results)
    return parse_rule(text, [t.shape for t in types], [t.shape for t in results], reduce=attrs["reduction"])


define(
    "call_tir",
    Semantics(infer=_infer, torch="tvm_extern.call_tir({source}, {shapes}, {dtypes}, {*})"),
    Split(
        _tir_rule,
        localize=lambda attrs, types, results: {**attrs, "shapes": tuple(t.shape for t in results)},
    ),
    code=Code(relax="tvm_extern.call_tir({source}, {shapes}, {dtypes}, {*})"),
    traits={Trait.FOREIGN},
)
define(
    "call_dps_packed",
    Semantics(infer=_infer, torch="tvm_extern.call_packed({function}, {shapes}, {dtypes}, {*})"),
    Split(_unsplit_rule),
    code=Code(relax="tvm_extern.call_packed({function}, {shapes}, {dtypes}, {*})"),
    traits={Trait.FOREIGN},
)


# Relax spellings


@relax("relax.call_tir")
def _relax_call_tir(g: Builder, args: Any, attrs: Attrs) -> Any:
    (name, source, rule), operands = args
    if rule is None or len(rule[0].split("->")[1].split(",")) != len(attrs["results"]):
        _warn(g, name)
        return _called(g, "call_tir", operands, attrs, function=name, source=source)
    text, reduction = rule
    return _called(g, "call_tir", operands, attrs, function=name, source=source, rule=text, reduction=reduction)


@relax("relax.call_dps_packed")
def _relax_call_dps_packed(g: Builder, args: Any, attrs: Attrs) -> Any:
    name, operands = args
    _warn(g, name)
    return _called(g, "call_dps_packed", operands, attrs, function=name)


def _warn(g: Builder, function: str) -> None:
    warnings.warn(
        f"every device computes all of {function}, of which nobody knows how it could be split ({g.location})",
        ComputedWhole,
        stacklevel=2,
    )


def _called(g: Builder, name: str, operands: Any, attrs: Attrs, **more: str) -> Any:
    kinds = attrs["results"]
    values = operands if isinstance(operands, list) else [operands]
    if not all(isinstance(value, Value) for value in values):
        raise NotImplementedError("a call with sizes as arguments")
    shapes, dtypes = tuple(k.shape for k in kinds), tuple(k.dtype for k in kinds)
    results = g.emit(name, *values, **more, shapes=shapes, dtypes=dtypes)
    return list(results) if len(kinds) > 1 else results
