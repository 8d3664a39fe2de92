"""Slices: reads and writes of ranges of dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Op, TensorType, Value
from distir_relax.layout import is_always, is_symbolic, maximum, minimum
from distir_relax.ops.movement import view_strides
from distir_relax.ops.movement.reshape import squeeze
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Backward,
    Builder,
    Code,
    Element,
    IncrementalForm,
    IncrementalStep,
    OnnxOperands,
    Positions,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    axis_of,
    define,
    dim_names,
    gradient_of,
    index_of,
    look_back,
    onnx,
    operands,
    parse_rule,
    promote,
    reindexed,
    relax,
    reshape_to,
)


def _infer_slice(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = list(types[0].shape)
    for axis, begin, end, step in zip(attrs["axes"], attrs["begin"], attrs["end"], attrs["strides"], strict=True):
        if not 0 <= begin <= end <= shape[axis]:
            raise ValueError(f"slice {begin}:{end} leaves dim {axis} of size {shape[axis]}")
        shape[axis] = -(-(end - begin) // step)
    return (TensorType(tuple(shape), types[0].dtype),)


def _slice_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = dim_names(len(types[0].shape))
    left = " ".join(f"[{n}]" if d in attrs["axes"] else n for d, n in enumerate(names))
    right = " ".join(f"[{n}s]" if d in attrs["axes"] else n for d, n in enumerate(names))
    return parse_rule(f"{left} -> {right}", [types[0].shape], [results[0].shape])


def _torch_slice(attrs: Attrs) -> str:
    parts = [":"] * (max(attrs["axes"]) + 1)
    for axis, begin, end, step in zip(attrs["axes"], attrs["begin"], attrs["end"], attrs["strides"], strict=True):
        parts[axis] = f"{begin}:{end}" if step == 1 else f"{begin}:{end}:{step}"
    return f"{{0}}[{', '.join(parts)}]"


def _slice_gradient(b: Backward) -> Value:
    """Scatter the gradient to the positions that were read, with zeros elsewhere."""
    shape = b.x().tensor.shape
    low, high = [0] * len(shape), [0] * len(shape)
    grad = b.grad
    for axis, begin, step in zip(b.attrs["axes"], b.attrs["begin"], b.attrs["strides"], strict=True):
        size = grad.tensor.shape[axis]
        if step > 1 and size:
            grad = _insert_zeros(b, grad, axis, step)
        # The positions after the last one that was read may be more, or fewer, than the zeros inserted after it.
        remaining = shape[axis] - begin - grad.tensor.shape[axis]
        if remaining < 0:
            grad = slice_dim(b.g, grad, axis, 0, remaining)
        low[axis], high[axis] = begin, max(remaining, 0)
    if any(low) or any(high):
        grad = b.emit("pad", grad, low=tuple(low), high=tuple(high), value=0.0)
    return grad


def _insert_zeros(b: Backward, x: Value, axis: int, step: int) -> Value:
    """Insert ``step - 1`` zeros after each element of `x` along `axis`."""
    shape = x.tensor.shape
    x = reshape_to(b.g, x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    none = [0] * (len(shape) + 1)
    zeros = (*none[: axis + 1], step - 1, *none[axis + 2 :])
    x = b.emit("pad", x, low=tuple(none), high=zeros, value=0.0)
    return reshape_to(b.g, x, (*shape[:axis], shape[axis] * step, *shape[axis + 1 :]))  # type: ignore[no-any-return]


def _sliced_dims(op: Op) -> list[int]:
    parts: Any = zip(op.attrs["axes"], op.attrs["begin"], op.attrs["strides"], strict=True)  # type: ignore[arg-type]
    return [axis for axis, begin, step in parts if step == 1 and not is_symbolic(begin)]


def _continue_slice(step: IncrementalStep) -> Value:
    """Read the positions at the distance of the slice's begin, and slice the other dims."""
    parts = list(zip(*(step.attrs[key] for key in ("axes", "begin", "end", "strides")), strict=True))
    ((_, begin, _, _),) = [part for part in parts if part[0] == step.dim]
    x = look_back(step, 0, -begin)
    if others := [part for part in parts if part[0] != step.dim]:
        axes, begins, ends, strides = zip(*others, strict=True)
        x = step.emit("strided_slice", x, axes=axes, begin=begins, end=ends, strides=strides)
    return x


def _sliced_element(elements: Sequence[Element], shapes: Any, attrs: Attrs, shape: Sequence[int]) -> Element:
    indices = [index_of(dim) for dim in range(len(shape))]
    for axis, begin, step in zip(attrs["axes"], attrs["begin"], attrs["strides"], strict=True):
        indices[axis] = begin + step * (index_of(axis) if shape[axis] != 1 else 0)
    return reindexed(elements[0], indices)


def _sliced(parts: Sequence[Positions], attrs: Attrs) -> list[Positions]:
    result = list(parts[0])
    for axis, begin, end, step in zip(attrs["axes"], attrs["begin"], attrs["end"], attrs["strides"], strict=True):
        result[axis] = result[axis][begin:end:step]
    return [result]


define(
    "strided_slice",
    Semantics(infer=_infer_slice, torch=_torch_slice, linear=(operands(0),), moved=_sliced, element=_sliced_element),
    Split(_slice_rule),
    cost=FREE,
    code=Code(relax="R.strided_slice({0}, {axes}, {begin}, {end}, {strides})", strides=view_strides.sliced),
    gradient=gradient_of(_slice_gradient),
    incremental=IncrementalForm(dims=_sliced_dims, compute=_continue_slice, carries=True, is_windowed=True),
    traits={Trait.TRIVIAL, Trait.VIEW, Trait.MOVES},
)


# ATen spellings


@aten("slice.Tensor")
def slice_dim(
    g: Builder, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Return every `step`-th element of `x` in [start, end) along `dim`, with Python's conventions."""
    axis = axis_of(dim, len(x.tensor.shape))
    first, last = slice_bounds(start, end, x.tensor.shape[axis], g.guards_slices)
    if (first, last, step) == (0, x.tensor.shape[axis], 1):
        return x
    return g.emit("strided_slice", x, axes=(axis,), begin=(first,), end=(last,), strides=(step,))


def slice_bounds(start: int | None, end: int | None, size: int, guarded: bool = False) -> tuple[int, int]:
    """Return the bounds [first, last) of a slice with a positive step, by Python's conventions; last is not smaller.

    A bound of a symbolic size is a minimum or maximum; if `guarded`, it is the one that holds for typical sizes.
    """
    most, least = (_larger, min) if guarded else (maximum, minimum)

    def within(bound: int) -> int:
        return most(0, bound + size if bound < 0 else least(bound, size))

    first = 0 if start is None else within(start)
    is_open = end is not None and is_symbolic(size) and is_always(end, "<", _NO_END) is False
    last = size if end is None or is_open else within(end)
    return first, most(first, last)


def _larger(first: int, second: int) -> int:
    """Return the larger number. Sizes that may be equal, such as 0 and the place of the last element, need no guard."""
    return second if first <= second else first


_NO_END = 10**9
"""Least end that means the whole of a symbolic dim: exported programs have a billion, or the largest integer."""


@aten("select.int")
def _select(g: Builder, x: Value, dim: int, index: int) -> Any:
    axis = axis_of(dim, len(x.tensor.shape))
    first = axis_of(index, x.tensor.shape[axis])
    return squeeze(g, slice_dim(g, x, axis, first, first + 1), axis)


@aten("narrow.default")
def _narrow(g: Builder, x: Value, dim: int, start: int, length: int) -> Any:
    return slice_dim(g, x, dim, start, start + length)


@aten("slice_scatter.default")
def _slice_scatter(
    g: Builder, x: Value, source: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Replace the part of `x` that a slice reads: elements before it, the source, elements after it."""
    axis = axis_of(dim, len(x.tensor.shape))
    size = x.tensor.shape[axis]
    first, last = slice_bounds(start, end, size, g.guards_slices)
    if step != 1:
        raise NotImplementedError(f"writing to every {step}th element")
    parts = [g.aten("slice.Tensor", x, axis, 0, first), source, g.aten("slice.Tensor", x, axis, last)]
    nonempty = [part for part in parts if part.tensor.shape[axis] != 0]
    return g.emit("concat", *promote(g, *nonempty), axis=axis) if len(nonempty) > 1 else nonempty[0]


@aten("diff.default")
def _diff(
    g: Builder, x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None
) -> Any:
    axis = axis_of(dim, len(x.tensor.shape))
    parts = [part for part in (prepend, x, append) if part is not None]
    y = g.emit("concat", *promote(g, *parts), axis=axis) if len(parts) > 1 else x
    for _ in range(n):
        later, earlier = slice_dim(g, y, axis, 1), slice_dim(g, y, axis, 0, -1)
        y = g.aten("ne.Tensor" if y.tensor.dtype == "bool" else "sub.Tensor", later, earlier)
    return y


@aten("select_scatter.default")
def _select_scatter(g: Builder, x: Value, source: Value, dim: int, index: int) -> Any:
    axis = axis_of(dim, len(x.tensor.shape))
    first = axis_of(index, x.tensor.shape[axis])
    return _slice_scatter(g, x, g.aten("unsqueeze.default", source, axis), axis, first, first + 1)


@aten("unfold.default")
def _unfold(g: Builder, x: Value, dim: int, size: int, step: int) -> Any:
    """Return overlapping windows of a dim, in a new last dim: a lookup with constant indices."""
    import torch

    axis, rank = axis_of(dim, len(x.tensor.shape)), len(x.tensor.shape)
    starts = torch.arange(0, x.tensor.shape[axis] - size + 1, step)
    places = (starts[:, None] + torch.arange(size)).reshape(-1)
    y = g.emit("take", x, g.array(places, "positions"), axis=axis)
    y = reshape_to(g, y, (*x.tensor.shape[:axis], len(starts), size, *x.tensor.shape[axis + 1 :]))
    order = (*range(axis + 1), *range(axis + 2, rank + 1), axis + 1)
    return g.aten("permute.default", y, list(order))


# Relax spellings


@relax("relax.strided_slice")
def _relax_strided_slice(g: Builder, args: Any, attrs: Attrs) -> Any:
    x, axes, begins, ends, *steps = args
    for axis, begin, end, step in zip(axes, begins, ends, steps[0] if steps else [1] * len(axes), strict=True):
        if step < 1:
            raise NotImplementedError(f"a slice with step {step}")
        x = slice_dim(g, x, axis, begin, end, step)
    return x


# ONNX spellings


@onnx("Slice")
def _onnx_slice(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    y, begins, ends = x[0], x.numbers(1, attrs.get("starts")), x.numbers(2, attrs.get("ends"))
    axes = x.numbers(3, attrs.get("axes", list(range(len(begins)))))
    for axis, begin, end, step in zip(axes, begins, ends, x.numbers(4, [1] * len(axes)), strict=True):
        axis = axis_of(axis, len(y.tensor.shape))
        if step > 0:
            y = slice_dim(g, y, axis, begin, end, step)
            continue
        # A negative step: slice forwards, then reverse.
        size = y.tensor.shape[axis]
        if is_symbolic((size, begin, end)):
            if step != -1 or is_always(begin, "<", -1) is not False or is_always(end, "<", 1 - _NO_END) is not True:
                raise NotImplementedError(f"the slice {begin}:{end}:{step} of a symbolic size")
            y = g.emit("flip", y, axis=axis)
            continue
        first, last = max(-size - 1, min(begin, size - 1)), max(-size - 1, min(end, size))
        picked = range(size)[slice(first, None if last == -size - 1 else last, step)]
        y = slice_dim(g, y, axis, picked[-1] if picked else 0, picked[0] + 1 if picked else 0, -step)
        y = g.emit("flip", y, axis=axis)
    return y
