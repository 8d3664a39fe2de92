"""New values of weights and state, which may be written where the old ones are."""

from __future__ import annotations

from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import Attrs, Code, Cost, Semantics, Split, Trait, Types, define, operands, same_types


def _twice(types: Types, attrs: Attrs, results: Types) -> float:
    return 2.0 * results[0].elements


for _name, _torch, _in_place, _relax in (
    (
        "sgd",
        "torch.sub({0}, {1}, alpha={rate})",
        "{0}.sub_({1}, alpha={rate})",
        "R.subtract({0}, R.multiply({1}, R.const({rate}, {1}.ty.dtype)))",
    ),
    (
        "momentum",
        "{0} * {decay} + {1}",
        "{0}.mul_({decay}).add_({1})",
        "R.add(R.multiply({0}, R.const({decay}, {0}.ty.dtype)), {1})",
    ),
):
    define(
        _name,
        Semantics(infer=same_types, torch=_torch, linear=(operands(0, 1),)),
        Split(pointwise_rule),
        cost=Cost(flops=_twice, weight_gradient=1),
        code=Code(relax=_relax, in_place=_in_place),
        traits={Trait.POINTWISE},
    )


define(
    "assign",
    Semantics(infer=same_types, torch="{1}"),
    Split(pointwise_rule),
    code=Code(relax="{1}", in_place="{0}.copy_({1})"),
    traits={Trait.POINTWISE},
)
