"""Sum of tensors in a fixed order, for results that do not depend on the number of ranks."""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import Attrs, Code, Cost, Semantics, Split, Trait, Types, define


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Infer the type of all operands, which is one."""
    if len(set(types)) != 1:
        raise ValueError(f"expected terms of one type, found {', '.join(map(str, types)) or 'none'}")
    return (types[0],)


# ((a + b) + c) + ...: without a linear operand, a term that is a sum over ranks is added up before.
define(
    "ordered_sum",
    Semantics(infer=_infer, torch="sums.in_order({*})"),
    Split(pointwise_rule),
    cost=Cost(flops=lambda types, attrs, results: float(results[0].elements) * (len(types) - 1)),
    code=Code(relax="sums.in_order({*})"),
    traits={Trait.POINTWISE, Trait.ADDS_IN_ORDER},
)
