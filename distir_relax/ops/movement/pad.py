"""Padding at both ends of each dim: constant, replicated, reflected, circular.

All but constant padding are lookups with constant indices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distir_relax.ir import Attribute, Op, TensorType, Value
from distir_relax.layout import is_always, is_symbolic, maximum
from distir_relax.ops.movement.slice import slice_dim
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Backward,
    Builder,
    Code,
    IncrementalForm,
    IncrementalStep,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    StridedWindow,
    Types,
    aten,
    axis_of,
    define,
    dim_names,
    fill_before,
    gradient_of,
    look_back,
    onnx,
    operands,
    parse_rule,
    relax,
    widened,
)


def _infer_pad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    low, high = attrs["low"], attrs["high"]
    if any(isinstance(n, float) for n in (*low, *high)):
        raise ValueError("widths of padding are whole numbers")
    return (TensorType(tuple(a + n + b for a, n, b in zip(low, types[0].shape, high, strict=True)), types[0].dtype),)


def _pad_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """A padded dim is a window of one element: a device pads its part by its share of the padding."""
    x, windows = types[0], []
    names = dim_names(len(x.shape))
    for d, (low, high) in enumerate(zip(attrs["low"], attrs["high"], strict=True)):
        if low or high:
            names[d] = "()"
            windows.append(StridedWindow(d, 0, d, d, x.shape[d], 1, low=low, high=high))
    text = " ".join(names)
    return replace(parse_rule(f"{text} -> {text}", [x.shape], [results[0].shape]), windows=tuple(windows))


def _localize_widths(attrs: Attrs, ends: Mapping[int, tuple[int, ...]]) -> dict[str, Attribute]:
    result: dict[str, Attribute] = dict(attrs)
    for i, key in enumerate(("low", "high")):
        result[key] = tuple(ends[d][i] if d in ends else n for d, n in enumerate(attrs[key]))
    return result


def _torch_pad(attrs: Attrs) -> str:
    widths = [n for pair in reversed(list(zip(attrs["low"], attrs["high"], strict=True))) for n in pair]
    while widths[-2:] == [0, 0]:
        widths = widths[:-2]
    return f"F.pad({{0}}, {tuple(widths)!r}, value={{value}})"


def _relax_pad(attrs: Attrs) -> str:
    widths = [n for pair in zip(attrs["low"], attrs["high"], strict=True) for n in pair]
    return f'R.nn.pad({{0}}, {widths!r}, "constant", {{value}})'


def _pad_gradient(b: Backward) -> Value:
    """Crop the gradient to the operand; elements removed by negative padding get zeros."""
    shape, low, high = b.grad.tensor.shape, b.attrs["low"], b.attrs["high"]
    axes = tuple(range(len(shape)))
    result: Value = b.emit(
        "strided_slice", b.grad, axes=axes, begin=tuple(max(0, a) for a in low),
        end=tuple(n - max(0, z) for n, z in zip(shape, high, strict=True)), strides=(1,) * len(axes),
    )  # fmt: skip
    if min(*low, *high) < 0:
        result = b.emit(
            "pad", result, low=tuple(max(0, -a) for a in low), high=tuple(max(0, -z) for z in high), value=0.0
        )
    return result


def _padded_dims(op: Op) -> list[int]:
    widths: Any = zip(op.attrs["low"], op.attrs["high"], strict=True)  # type: ignore[arg-type]
    return [dim for dim, width in enumerate(widths) if any(width) and not is_symbolic(width)]


def _continue_pad(step: IncrementalStep) -> Value:
    """Read as many earlier positions as there are at the low end; the first ones are the padding."""
    low, extra, value = step.attrs["low"][step.dim], step.extras[0], step.attrs["value"]
    x = look_back(step, 0, low, fill=value)
    if low > 0 and (value or (extra is not None and extra < 0)):
        x = fill_before(step, x, low, value)
    others = {key: tuple(n * (d != step.dim) for d, n in enumerate(step.attrs[key])) for key in ("low", "high")}
    return step.emit("pad", x, **others, value=value) if any(map(any, others.values())) else x


define(
    "pad",
    Semantics(
        infer=_infer_pad,
        torch=_torch_pad,
        linear=lambda count, attrs: () if attrs["value"] else (operands(0),),
        moved=lambda parts, attrs: [widened(parts[0], attrs["low"], attrs["high"])],
    ),
    Split(_pad_rule, windowed=_localize_widths),
    cost=FREE,
    code=Code(relax=_relax_pad),
    gradient=gradient_of(_pad_gradient),
    incremental=IncrementalForm(dims=_padded_dims, compute=_continue_pad, carries=True, is_windowed=True),
)


# Maps positions outside a dim of n elements to the positions inside that are copied.
_SOURCE_POSITION: dict[str, Callable[[int, int], int]] = {
    "edge": lambda at, n: min(max(at, 0), n - 1),
    "reflect": lambda at, n: n - 1 - abs(at % (2 * n - 2) - (n - 1)) if n > 1 else 0,
    "wrap": lambda at, n: at % n,
}
_TORCH = {"replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def pad_by(g: Builder, x: Value, low: Sequence[int], high: Sequence[int], mode: str) -> Any:
    """Extend `x` by `low` and `high` elements (or crop it, if negative) at the ends of each dim.

    `mode` is ONNX's or torch's name. Raises NotImplementedError for another, for widths that are symbolic, and for a
    symbolic size that may be too small for them.
    """
    import torch

    name = _TORCH.get(mode, mode)
    source = _SOURCE_POSITION.get(name)
    if source is None:
        raise NotImplementedError(f"padding of mode {mode!r}")
    if is_symbolic((*low, *high)):
        raise NotImplementedError(f"padding of mode {mode!r} by a symbolic width")
    for axis, (first, last) in enumerate(zip(low, high, strict=True)):
        size = x.tensor.shape[axis]
        if is_symbolic(size) and (first or last):
            x = _pad_symbolic(g, x, axis, first, last, name)
        elif first or last:
            places = torch.tensor([source(at, size) for at in range(-first, size + last)])
            x = g.emit("take", x, g.array(places, "positions"), axis=axis)
    return x


def _pad_symbolic(g: Builder, x: Value, axis: int, first: int, last: int, mode: str) -> Any:
    """Extend a dim of symbolic size: slices of its ends, in reverse order for ``reflect``, before and after it."""
    x = slice_dim(g, x, axis, max(0, -first), x.tensor.shape[axis] - max(0, -last))
    first, last, size = max(0, first), max(0, last), x.tensor.shape[axis]
    least = 1 if mode == "edge" else max(first, last) + (mode == "reflect")
    if is_always(least, "<=", size) is not True:
        raise NotImplementedError(f"padding of mode {mode!r} needs at least {least} elements, and {size} may be less")

    def end(begin: int, width: int) -> list[Any]:
        if not width:
            return []
        part = slice_dim(g, x, axis, begin, begin + (1 if mode == "edge" else width))
        if mode == "reflect":
            return [g.emit("flip", part, axis=axis)]
        return [part] * (width if mode == "edge" else 1)

    before = {"edge": 0, "reflect": 1, "wrap": size - first}[mode]
    after = {"edge": size - 1, "reflect": size - 1 - last, "wrap": 0}[mode]
    parts = [*end(before, first), x, *end(after, last)]
    return g.emit("concat", *parts, axis=axis) if len(parts) > 1 else x


# ATen spellings


@aten("constant_pad_nd.default")
def _pad(g: Builder, x: Value, widths: list[int], value: float = 0) -> Any:
    return _pad_mode(g, x, widths, "constant", value)


@aten("pad.default")
def _pad_mode(g: Builder, x: Value, widths: list[int], mode: str = "constant", value: float | None = None) -> Any:
    rank = len(x.tensor.shape)
    low, high = [0] * rank, [0] * rank
    for i in range(len(widths) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = widths[2 * i], widths[2 * i + 1]
    if mode != "constant":
        return pad_by(g, x, low, high, mode)
    return g.emit("pad", x, low=tuple(low), high=tuple(high), value=value or 0)


for _n in (1, 2, 3):
    for _name, _mode in (("reflection", "reflect"), ("replication", "replicate")):
        aten(f"{_name}_pad{_n}d.default")(functools.partial(_pad_mode, mode=_mode))


# Relax spellings


@relax("relax.nn.pad")
def _relax_nn_pad(g: Builder, args: Any, attrs: Attrs) -> Any:
    widths = attrs["pad_width"]
    if attrs["pad_mode"] not in ("constant", "reflect", "replicate", "circular"):
        raise NotImplementedError(f"padding of mode {attrs['pad_mode']!r}")
    if attrs["pad_mode"] != "constant":
        return pad_by(g, args[0], widths[::2], widths[1::2], attrs["pad_mode"])
    return g.emit("pad", args[0], low=tuple(widths[::2]), high=tuple(widths[1::2]), value=attrs["pad_value"])


# ONNX spellings


@onnx("Pad")
def _onnx_pad(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    mode = attrs.get("mode", "constant")
    rank = len(x[0].tensor.shape)
    widths = x.numbers(1, attrs.get("pads", attrs.get("paddings")))
    axes = [axis_of(a, rank) for a in x.numbers(3, list(range(rank)))]
    low, high = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        low[axis], high[axis] = widths[i], widths[len(axes) + i]
    y = x[0]
    if mode != "constant":
        return pad_by(g, y, low, high, mode)
    for axis in range(rank):
        # Negative padding crops.
        y = slice_dim(g, y, axis, maximum(0, -low[axis]), y.tensor.shape[axis] - maximum(0, -high[axis]))
    low, high = [maximum(0, n) for n in low], [maximum(0, n) for n in high]
    if all(n == 0 for n in low + high):
        return y
    return g.emit("pad", y, low=tuple(low), high=tuple(high), value=x.number(2, attrs.get("value", 0)))
