"""Reversed and rolled dims. The dim must be whole on a device."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Builder,
    Code,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    axis_in,
    checked_axis,
    define,
    gradient_of,
    operands,
    relax,
    reshape_to,
    unsplit_axis_rule,
)


def _infer_flip(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    checked_axis(types, attrs)
    return (types[0],)


define(
    "flip",
    Semantics(infer=_infer_flip, torch="torch.flip({0}, ({axis},))", linear=(operands(0),)),
    Split(unsplit_axis_rule),
    cost=FREE,
    code=Code(relax="R.flip({0}, {axis})"),
    gradient=gradient_of(lambda b: b.emit("flip", b.grad, axis=b.attrs["axis"])),
    traits={Trait.MOVES},
)


# ATen spellings


@aten("flip.default")
def _flip(g: Builder, x: Value, dims: list[int]) -> Any:
    for dim in dims if x.tensor.shape else ():
        x = g.emit("flip", x, axis=axis_in(x, dim))
    return x


@aten("roll.default")
def _roll(g: Builder, x: Value, shifts: list[int], dims: list[int] = []) -> Any:  # noqa: B006 - never changed
    if not dims:
        flat = _roll(g, reshape_to(g, x, (x.tensor.elements,)), shifts, [0])
        return reshape_to(g, flat, x.tensor.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % len(x.tensor.shape)
        size = x.tensor.shape[axis]
        if size and shift % size:
            head, tail = g.emit("split", x, sizes=(size - shift % size, shift % size), axis=axis)
            x = g.emit("concat", tail, head, axis=axis)
    return x


# Relax spellings


@relax("relax.flip")
def _relax_flip(g: Builder, args: Any, attrs: Attrs) -> Any:
    return g.aten("flip.default", args[0], [attrs["axis"]])
