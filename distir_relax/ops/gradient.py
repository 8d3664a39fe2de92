"""Backward steps of ops, and optimizers: what a training program is made of besides the ops of its model.

Each entry of a backward step takes what the forward step kept and the gradient of its result.
"""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.ops.pointwise import pointwise_rule
from distir_relax.ops.registry import Attrs, Cost, Types, define, operands


def _like_first(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if any(t != types[0] for t in types):
        raise ValueError("all operands have one type")
    return (types[0],)


define(
    "relu_grad",
    infer=_like_first,
    rule=pointwise_rule,
    torch="torch.ops.aten.threshold_backward({1}, {0}, 0)",
    relax="R.where(R.greater({0}, R.zeros_like({0})), {1}, R.zeros_like({1}))",
    linear=(operands(1),),
    pointwise=True,
)


define(
    "squared_error_grad",
    infer=_like_first,
    rule=pointwise_rule,
    torch="({0} - {1}) * {scale}",
    relax="R.multiply(R.subtract({0}, {1}), R.const({scale}, {0}.ty.dtype))",
    linear=(operands(0, 1),),
    pointwise=True,
)


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
        infer=_like_first,
        rule=pointwise_rule,
        torch=_torch,
        relax=_relax,
        linear=(operands(0, 1),),
        pointwise=True,
        flops=_twice,
        cost=Cost(in_place=_in_place, gradient=1),
    )
