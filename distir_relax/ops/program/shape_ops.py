"""Ops on shapes of a model's own program, which are folded at import: what a host spends on them, for simulation."""

from __future__ import annotations

from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import (
    Code,
    Cost,
    Semantics,
    Split,
    Trait,
    define,
    gradient_of,
    no_flops,
    operands,
    same_type,
)

define(
    "shape_ops",
    Semantics(
        infer=same_type,
        torch="{0}",
        linear=(operands(0),),
        attributes={"count": "the number of ops on shapes that the model's own program runs here"},
    ),
    Split(pointwise_rule),
    cost=Cost(flops=no_flops, shape_ops=lambda types, attrs, results: int(attrs["count"])),
    code=Code(relax="{0}"),
    gradient=gradient_of("g"),
    traits={Trait.VIEW, Trait.POINTWISE},
)
