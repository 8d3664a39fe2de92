"""Repetition of each element of a dim, of some more often than of others.

Attributes: the `axis`, and `repeats`, how often each element is repeated in a row. If all are repeated equally often,
models have a broadcast between two reshapes instead. A device with a part of the dim has attribute `part`, the interval
of the result that it computes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain, pairwise, repeat

from distir_relax.ir import TensorType
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Code,
    RepeatWindow,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    checked_axis,
    define,
    dim_names,
    operands,
    parse_rule,
)


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis = checked_axis(types, attrs)
    shape, repeats = list(types[0].shape), _repeats(attrs)
    if len(repeats) != shape[axis] or any(count < 1 for count in attrs["repeats"]):
        raise ValueError(f"expected repeats of at least 1 for {shape[axis]} elements, found {repeats}")
    shape[axis] = sum(repeats)
    return (replace(types[0], shape=tuple(shape)),)


def _window(attrs: Attrs) -> RepeatWindow:
    axis, repeats = attrs["axis"], attrs["repeats"]
    return RepeatWindow(0, 0, axis, axis, len(repeats), repeats)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = dim_names(len(types[0].shape))
    names[attrs["axis"]] = "()"
    text = " ".join(names)
    rule = parse_rule(f"{text} -> {text}", [types[0].shape], [results[0].shape])
    return replace(rule, windows=(_window(attrs),))


def _repeats(attrs: Attrs) -> tuple[int, ...]:
    """Return how often each element is repeated on a device: in attribute `part`, an interval of the result."""
    repeats: tuple[int, ...] = attrs["repeats"]
    if "part" not in attrs:
        return repeats
    start, stop = attrs["part"]
    bounds = list(accumulate(repeats, initial=0))
    first, last = _window(attrs).reads(start, stop)
    return tuple(min(stop, b) - max(start, a) for a, b in pairwise(bounds[first : last + 1]))


def _elements(attrs: Attrs) -> list[int]:
    """Return the element of the operand that each element of the result is."""
    return list(chain.from_iterable(repeat(i, count) for i, count in enumerate(_repeats(attrs))))


def _torch(attrs: Attrs) -> str:
    elements = f"torch.tensor({_elements(attrs)}, dtype=torch.int64, device={{0}}.device)"
    return f"{{0}}.index_select({attrs['axis']}, {elements})"


def _relax(attrs: Attrs) -> str:
    return f'R.take({{0}}, R.const({_elements(attrs)}, "int64"), {attrs["axis"]}, "clip")'


define(
    "repeat_elements",
    Semantics(infer=_infer, torch=_torch, linear=(operands(0),)),
    Split(_rule, windowed=lambda attrs, parts: {**attrs, "part": parts[0]}),
    cost=FREE,
    code=Code(relax=_relax, repeats=lambda attrs: (attrs["axis"], _repeats(attrs))),
    traits={Trait.MOVES},
)
