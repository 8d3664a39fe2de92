"""Values that the first call of an incremental program computes, and later ones keep."""

from __future__ import annotations

from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import FREE, Code, Semantics, Split, Trait, define, gradient_of, same_types

define(
    "keep",
    Semantics(infer=same_types, torch="{1}"),
    Split(pointwise_rule),
    cost=FREE,
    code=Code(relax="{1}"),
    gradient=gradient_of(None, "g"),
    traits={Trait.KEEPS},
)
