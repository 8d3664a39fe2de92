"""Bounds checks of indices: `check_indices` returns them unchanged, or aborts the run if one is out of range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.ir import Op, Size, TensorType, Value
from distir_relax.kernels.indices import out_of_range
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Builder,
    Code,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    is_number,
    is_within,
    operands,
)


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if "int" not in types[0].dtype:
        raise ValueError("expected integer indices")
    return (types[0],)


_NAME = "check_indices"
define(
    _NAME,
    Semantics(
        infer=_infer,
        torch="indices.checked({0}, {low}, {high}, {user}, {location})",
        element=lambda elements, shapes, attrs, shape: (
            elements[0]
            if is_number(elements[0]) and is_within(elements[0], attrs["low"], attrs["high"], shape)
            else None
        ),
        attributes={
            "low": "the least valid index",
            "high": "the first that is too large",
            "user": "the op that takes the indices",
        },
    ),
    Split("... -> ...", indices=operands(0)),
    cost=FREE,
    code=Code(relax="indices.checked({0}, {low}, {high}, {user}, {location})"),
    traits={Trait.VIEW},
)


def checked_range(op: Op) -> tuple[Size, Size] | None:
    """Return the least index that an op lets pass, and the first that is too large; None if it checks none."""
    return (op.attrs["low"], op.attrs["high"]) if op.name == _NAME else None  # type: ignore[return-value]


def check_range(g: Builder, ids: Value, size: int, user: str, from_end: bool = False) -> Any:
    """Return `ids`, checked as indices of `user` into a dim of `size`; negative ones are valid if `from_end`.

    Raises `ImportModelError` if they are constant and one is out of range.
    """
    data = g.constants.get(ids.name)
    if data is None:
        hint, g.hint = g.hint, f"{ids.name}.checked"
        ids = g.emit(_NAME, ids, low=-size if from_end else 0, high=size, user=user)
        g.hint = hint
        return ids
    check_constant(g, data.flatten().tolist(), size, user, from_end)
    return ids


def check_constant(g: Builder, numbers: Sequence[int], size: int, user: str, from_end: bool = False) -> None:
    """Raise `ImportModelError` if one of these indices is out of range; see `check_range`."""
    low = -size if from_end else 0
    for index in numbers:
        if not low <= index < size:
            wrong = out_of_range(index, low, size, user, g.location)
            raise ImportModelError(wrong.message, wrong.where)
