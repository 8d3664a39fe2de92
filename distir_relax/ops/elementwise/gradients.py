"""Backward steps that work element by element.

Each entry takes what the forward step kept and the gradient of its result.
"""

from __future__ import annotations

from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import Code, Semantics, Split, Trait, define, operands, same_types

define(
    "relu_grad",
    Semantics(infer=same_types, torch="torch.ops.aten.threshold_backward({1}, {0}, 0)", linear=(operands(1),)),
    Split(pointwise_rule),
    code=Code(relax="R.where(R.greater({0}, R.zeros_like({0})), {1}, R.zeros_like({1}))"),
    traits={Trait.POINTWISE},
)


define(
    "squared_error_grad",
    Semantics(infer=same_types, torch="({0} - {1}) * {scale}", linear=(operands(0, 1),)),
    Split(pointwise_rule),
    code=Code(relax="R.multiply(R.subtract({0}, {1}), R.const({scale}, {0}.ty.dtype))"),
    traits={Trait.POINTWISE},
)
