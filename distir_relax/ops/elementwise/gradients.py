"""Backward steps that work element by element.

Each entry takes what the forward step kept and the gradient of its result.
"""

from __future__ import annotations

from distir_relax.ir import Value
from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import Backward, Code, Semantics, Split, Trait, define, gradient_of, operands, same_types

define(
    "relu_grad",
    Semantics(infer=same_types, torch="torch.ops.aten.threshold_backward({1}, {0}, 0)", linear=(operands(1),)),
    Split(pointwise_rule),
    code=Code(relax="R.where(R.greater({0}, R.zeros_like({0})), {1}, R.zeros_like({1}))"),
    gradient=gradient_of(None, "relu_grad(0, g)"),
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
