"""Redistribution: layout annotations of the user, and the ops that change a tensor's layout."""

from __future__ import annotations

from distir_relax.ir import Value
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Backward,
    Code,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    gradient_of,
    operands,
    parse_rule,
    same_type,
)


def _identity_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    return parse_rule("... -> ...", [types[0].shape], [results[0].shape])


def _same_mark(b: Backward) -> Value:
    """Annotate the gradient too if the annotation is for `both` directions; otherwise leave its layout free."""
    grad: Value = b.emit("annotate_sharding", b.grad, **b.attrs) if b.attrs.get("both") else b.grad
    return grad


for _name, _trait in (("annotate_sharding", Trait.ANNOTATION), ("redistribute", Trait.REDISTRIBUTION)):
    define(
        _name,
        Semantics(
            infer=same_type,
            torch="{0}",
            linear=(operands(0),),
            attributes={"placements": "the layout, a placement for each mesh axis"},
        ),
        Split(_identity_rule),
        cost=FREE,
        gradient=gradient_of(_same_mark if _trait is Trait.ANNOTATION else "g"),
        traits={_trait},
    )

define(
    "to_place",
    Semantics(infer=same_type, torch="{0}", linear=(operands(0),)),
    Split(_identity_rule),
    cost=FREE,
    code=Code(relax="{0}"),
    traits={Trait.PLACE, Trait.VIEW},
)

define(
    # Restricts a value to some of the devices that hold it.
    "restrict",
    Semantics(infer=same_type, torch="{0}"),
    cost=FREE,
    code=Code(relax="{0}"),
    traits={Trait.VIEW, Trait.TRIVIAL},
)
