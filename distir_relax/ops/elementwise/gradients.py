"""Backward steps of elementwise ops.

Each entry takes the saved tensors of the forward step and the gradient of its result.
"""

from __future__ import annotations

from distir_relax.ir import Value
from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import (
    Backward,
    Code,
    Cost,
    Semantics,
    Split,
    Trait,
    define,
    flops_per_result,
    gradient_of,
    operands,
    same_types,
)

define(
    "relu_grad",
    Semantics(infer=same_types, torch="torch.ops.aten.threshold_backward({1}, {0}, 0)", linear=(operands(1),)),
    Split(pointwise_rule),
    code=Code(relax="R.where(R.greater({0}, R.zeros_like({0})), {1}, R.zeros_like({1}))"),
    gradient=gradient_of(None, "relu_grad(0, g)"),
    traits={Trait.POINTWISE},
)

_DENSITY = (
    "R.multiply(R.const(0.3989422804014327, {0}.ty.dtype), "
    "R.exp(R.multiply(R.const(-0.5, {0}.ty.dtype), R.square({0}))))"
)
define(
    "gelu_grad",
    Semantics(infer=same_types, torch="torch.ops.aten.gelu_backward({1}, {0})", linear=(operands(1),)),
    Split(pointwise_rule),
    cost=Cost(flops=flops_per_result(16.0)),
    # The normal distribution function, and x times its density.
    code=Code(
        relax="R.multiply({1}, R.add(R.multiply(R.const(0.5, {0}.ty.dtype), R.add(R.const(1.0, {0}.ty.dtype), "
        "R.erf(R.multiply({0}, R.const(0.7071067811865476, {0}.ty.dtype))))), "
        f"R.multiply({{0}}, {_DENSITY})))"
    ),
    gradient=gradient_of(
        "multiply(multiply(g, 1), multiply(multiply(0.3989422804014327, exp(multiply(-0.5, square(0)))), "
        "subtract(2.0, square(0))))",
        "gelu_grad(0, g)",
    ),
    traits={Trait.POINTWISE},
)


def _scaled(b: Backward) -> Value:
    return b.emit("multiply", b.grad, b.number(b.attrs["scale"]))  # type: ignore[no-any-return]


define(
    "squared_error_grad",
    Semantics(infer=same_types, torch="({0} - {1}) * {scale}", linear=(operands(0, 1),)),
    Split(pointwise_rule),
    code=Code(relax="R.multiply(R.subtract({0}, {1}), R.const({scale}, {0}.ty.dtype))"),
    gradient=gradient_of(_scaled, lambda b: b.emit("negative", _scaled(b))),
    traits={Trait.POINTWISE},
)
