"""What ops with windows over the spatial dims of ``N C spatial`` data have in common: rule, sizes, entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.registry import Attrs, OpDef, Types, define
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.sliding import Window

Windows = Callable[[Types, Attrs], Sequence[Window]]


def window_sizes(windows: Sequence[Window]) -> tuple[int, ...]:
    """The sizes of the result's spatial dims; ValueError when a window does not fit its operand."""
    return tuple(window.result_size for window in windows)


def spatial_names(windows: Sequence[Window]) -> str:
    """The spatial dims in a rule's text: a factor for those that are no window at all, nothing for the others."""
    return " ".join(f"s{w.index}" if w.is_plain else "()" for w in windows)


def with_windows(rule: Rule, windows: Sequence[Window]) -> Rule:
    """The rule, with the windows that its text leaves out."""
    return replace(rule, windows=tuple(w for w in windows if not w.is_plain))


def define_spatial(
    name: str, dims: int | None, windows: Windows, *, dtype: str = "", floats: bool = True, **fields: Any
) -> OpDef:
    """Enter an op of one operand, ``N C spatial`` with `dims` spatial dims (any number for None), whose result's follow from `windows`.

    The result is of `dtype`, by default the operand's; `floats` are asked for by default. `fields` are the others of
    the entry (`OpDef`), `windowed` among them.
    """

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (x,) = types
        if (dims is not None and len(x.shape) != dims + 2) or (floats and "float" not in x.dtype):
            raise ValueError(f"{'floats' if floats else 'a tensor'} of {dims + 2 if dims else 'any number of'} dims")
        return (TensorType((*x.shape[:2], *window_sizes(windows(types, attrs))), dtype or x.dtype),)

    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        found = windows(types, attrs)
        text = f"n c {spatial_names(found)}"
        return with_windows(parse_rule(f"{text} -> {text}", [types[0].shape], [results[0].shape]), found)

    return define(name, infer=infer, rule=rule, zero_if_empty=True, **fields)
