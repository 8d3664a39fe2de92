"""Shared parts of ops with windows over the spatial dims of ``N C spatial`` data: rule, sizes, entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from distir_relax.ir import TensorType
from distir_relax.ops.table import (
    Attrs,
    Code,
    Cost,
    Expression,
    Gradient,
    Linear,
    Localize,
    OpDef,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    Window,
    Windowed,
    Work,
    define,
    parse_rule,
)

Windows = Callable[[Types, Attrs], Sequence[Window]]


def window_sizes(windows: Sequence[Window]) -> tuple[int, ...]:
    """Return the sizes of the result's spatial dims; raise ValueError if a window does not fit its operand."""
    return tuple(window.result_size for window in windows)


def spatial_names(windows: Sequence[Window]) -> str:
    """Return the spatial dims of a rule's text: a factor for plain windows, none for the others."""
    return " ".join(f"s{w.index}" if w.is_plain else "()" for w in windows)


def with_windows(rule: Rule, windows: Sequence[Window]) -> Rule:
    """Return the rule with the windows that its text omits."""
    return replace(rule, windows=tuple(w for w in windows if not w.is_plain))


def define_spatial(
    name: str,
    dims: int | None,
    windows: Windows,
    *,
    torch: Expression,
    relax: Expression,
    windowed: Windowed,
    flops: Work,
    linear: Linear = (),
    localize: Localize | None = None,
    dtype: str = "",
    floats: bool = True,
    gradient: Gradient | None = None,
    workspace: Work | None = None,
) -> OpDef:
    """Define an op of one operand, ``N C spatial``, whose result's spatial dims follow from `windows`.

    There are `dims` spatial dims, or any number if None. The result is of `dtype`, by default the operand's; by default
    the operand must be floating (`floats`). The other arguments are fields of the entry's facets (`OpDef`).
    """

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (x,) = types
        if (dims is not None and len(x.shape) != dims + 2) or (floats and "float" not in x.dtype):
            raise ValueError(
                f"expected {'floats' if floats else 'a tensor'} of {dims + 2 if dims else 'any number of'} dims"
            )
        return (TensorType((*x.shape[:2], *window_sizes(windows(types, attrs))), dtype or x.dtype),)

    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        op_windows = windows(types, attrs)
        text = f"n c {spatial_names(op_windows)}"
        return with_windows(parse_rule(f"{text} -> {text}", [types[0].shape], [results[0].shape]), op_windows)

    return define(
        name,
        Semantics(infer=infer, torch=torch, linear=linear),
        Split(rule, localize=localize, windowed=windowed),
        cost=Cost(flops=flops, workspace=workspace),
        code=Code(relax=relax),
        gradient=gradient,
        traits={Trait.ZERO_IF_EMPTY},
    )
