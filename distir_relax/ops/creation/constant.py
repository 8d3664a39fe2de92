"""Scalar constants."""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.ops.table import FREE, Attrs, Code, Rule, Semantics, Split, Trait, Types, define


def _infer_constant(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if not isinstance(attrs["value"], (bool, int, float)):
        raise ValueError("expected a number as the value of a constant")
    return (TensorType((), attrs["dtype"]),)


define(
    "constant",
    Semantics(infer=_infer_constant, torch="torch.tensor({value}, dtype=torch.{dtype!s})"),
    Split(lambda types, attrs, results: Rule((), (), ((),))),
    cost=FREE,
    code=Code(relax="R.const({value}, {dtype})"),
    traits={Trait.POINTWISE, Trait.SCALAR},
)
