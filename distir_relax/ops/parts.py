"""Ops that put dims together and take them apart: concat, split, slice, pad."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distir_relax.ir import Attribute, TensorType
from distir_relax.ops.pad_modes import pad_by
from distir_relax.ops.pointwise import promote
from distir_relax.ops.registry import ALL, Attrs, Types, aten, define, onnx_spelling, operands, relax_spelling
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.shape import FREE, VIEW, axis_of, names_of, squeeze, unsqueeze
from distir_relax.ops.sliding import StridedWindow

# concat


def _infer_concat(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, shape = attrs["axis"], list(types[0].shape)
    for t in types[1:]:
        if [n for i, n in enumerate(t.shape) if i != axis] != [n for i, n in enumerate(shape) if i != axis]:
            raise ValueError(f"shapes {[t.shape for t in types]} do not join along dim {axis}")
    shape[axis] = sum(t.shape[axis] for t in types)
    return (TensorType(tuple(shape), types[0].dtype),)


def _concat_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = names_of(len(results[0].shape))
    tensors = []
    for i in [*range(len(types)), "r"]:
        tensors.append(" ".join(f"[{n}_{i}]" if d == attrs["axis"] else n for d, n in enumerate(names)))
    text = f"{', '.join(tensors[:-1])} -> {tensors[-1]}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape])


define(
    "concat",
    infer=_infer_concat,
    rule=_concat_rule,
    torch="torch.cat([{*}], {axis})",
    relax="R.concat([{*}], {axis})",
    linear=ALL,
    trivial=True,
    **FREE,
)


# split


def _infer_split(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, sizes = attrs["axis"], attrs["sizes"]
    shape = types[0].shape
    if sum(sizes) != shape[axis]:
        raise ValueError(f"sizes {sizes} do not add up to {shape[axis]}")
    return tuple(TensorType((*shape[:axis], n, *shape[axis + 1 :]), types[0].dtype) for n in sizes)


def _split_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names, axis, sizes = names_of(len(types[0].shape)), attrs["axis"], attrs["sizes"]
    tail = " ".join(names[:axis]), " ".join(names[axis + 1 :])
    shapes = [t.shape for t in types], [t.shape for t in results]
    if len(set(sizes)) == 1:
        text = f"{tail[0]} ([parts] part) {tail[1]} -> " + ", ".join([f"{tail[0]} part {tail[1]}"] * len(sizes))
        return parse_rule(text, *shapes, sizes={"parts": len(sizes), "part": sizes[0]})
    parts = ", ".join(f"{tail[0]} [part{i}] {tail[1]}" for i in range(len(sizes)))
    return parse_rule(f"{tail[0]} [whole] {tail[1]} -> {parts}", *shapes)


def _local_split(attrs: Attrs, types: Types, results: Types) -> dict[str, Any]:
    return {**attrs, "sizes": tuple(t.shape[attrs["axis"]] for t in results)}


def _relax_split(attrs: Attrs) -> str:
    ends = [sum(attrs["sizes"][: i + 1]) for i in range(len(attrs["sizes"]))]
    if 0 not in attrs["sizes"]:
        return f"R.split({{0}}, {ends[:-1]!r}, {{axis}})"
    # R.split makes no part without elements.
    cuts = zip([0, *ends], ends, strict=False)
    return "(" + ", ".join(f"R.strided_slice({{0}}, ({{axis}},), ({a},), ({b},))" for a, b in cuts) + ",)"


define(
    "split",
    infer=_infer_split,
    rule=_split_rule,
    torch="{0}.split({sizes}, {axis})",
    relax=_relax_split,
    linear=(operands(0),),
    localize=_local_split,
    **VIEW,
)


# strided_slice


def _infer_slice(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = list(types[0].shape)
    for axis, begin, end, step in zip(attrs["axes"], attrs["begin"], attrs["end"], attrs["strides"], strict=True):
        if not 0 <= begin <= end <= shape[axis]:
            raise ValueError(f"slice {begin}:{end} leaves dim {axis} of size {shape[axis]}")
        shape[axis] = -(-(end - begin) // step)
    return (TensorType(tuple(shape), types[0].dtype),)


def _slice_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = names_of(len(types[0].shape))
    left = " ".join(f"[{n}]" if d in attrs["axes"] else n for d, n in enumerate(names))
    right = " ".join(f"[{n}s]" if d in attrs["axes"] else n for d, n in enumerate(names))
    return parse_rule(f"{left} -> {right}", [types[0].shape], [results[0].shape])


def _torch_slice(attrs: Attrs) -> str:
    parts = [":"] * (max(attrs["axes"]) + 1)
    for axis, begin, end, step in zip(attrs["axes"], attrs["begin"], attrs["end"], attrs["strides"], strict=True):
        parts[axis] = f"{begin}:{end}" if step == 1 else f"{begin}:{end}:{step}"
    return f"{{0}}[{', '.join(parts)}]"


define(
    "strided_slice",
    infer=_infer_slice,
    rule=_slice_rule,
    torch=_torch_slice,
    relax="R.strided_slice({0}, {axes}, {begin}, {end}, {strides})",
    linear=(operands(0),),
    trivial=True,
    **VIEW,
)


# pad: constant padding at the end and the beginning of each dim


def _infer_pad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    low, high = attrs["low"], attrs["high"]
    return (TensorType(tuple(a + n + b for a, n, b in zip(low, types[0].shape, high, strict=True)), types[0].dtype),)


def _pad_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """A padded dim is a window of one element: a device pads its part by what the padding is in it."""
    x, windows = types[0], []
    names = names_of(len(x.shape))
    for d, (low, high) in enumerate(zip(attrs["low"], attrs["high"], strict=True)):
        if low or high:
            names[d] = "()"
            windows.append(StridedWindow(d, 0, d, d, x.shape[d], 1, low=low, high=high))
    text = " ".join(names)
    return replace(parse_rule(f"{text} -> {text}", [x.shape], [results[0].shape]), windows=tuple(windows))


def _set_ends(attrs: Attrs, ends: Mapping[int, tuple[int, ...]]) -> dict[str, Attribute]:
    found: dict[str, Attribute] = dict(attrs)
    for i, key in enumerate(("low", "high")):
        found[key] = tuple(ends[d][i] if d in ends else n for d, n in enumerate(attrs[key]))
    return found


def _torch_pad(attrs: Attrs) -> str:
    widths = [n for pair in reversed(list(zip(attrs["low"], attrs["high"], strict=True))) for n in pair]
    while widths[-2:] == [0, 0]:
        widths = widths[:-2]
    return f"F.pad({{0}}, {tuple(widths)!r}, value={{value}})"


def _relax_pad(attrs: Attrs) -> str:
    widths = [n for pair in zip(attrs["low"], attrs["high"], strict=True) for n in pair]
    return f'R.nn.pad({{0}}, {widths!r}, "constant", {{value}})'


define(
    "pad",
    infer=_infer_pad,
    rule=_pad_rule,
    torch=_torch_pad,
    relax=_relax_pad,
    linear=lambda attrs: () if attrs["value"] else (operands(0),),
    windowed=_set_ends,
    **FREE,
)


# ATen spellings


@aten("cat.default", "concat.default")
def _cat(g: Any, tensors: list[Any], dim: int = 0) -> Any:
    kept = [t for t in tensors if t.type.shape != (0,)]
    if len(kept) == 1:
        return kept[0]
    return g.emit("concat", *promote(g, *kept), axis=axis_of(dim, len(kept[0].type.shape)))


@aten("stack.default")
def _stack(g: Any, tensors: list[Any], dim: int = 0) -> Any:
    axis = axis_of(dim, len(tensors[0].type.shape) + 1)
    return _cat(g, [unsqueeze(g, t, axis) for t in tensors], axis)


@aten("split.Tensor")
def _split(g: Any, x: Any, size: int, dim: int = 0) -> Any:
    axis = axis_of(dim, len(x.type.shape))
    total = x.type.shape[axis]
    return split_with_sizes(g, x, [min(size, total - i) for i in range(0, total, size)], axis)


@aten("split_with_sizes.default")
def split_with_sizes(g: Any, x: Any, sizes: list[int], dim: int = 0) -> Any:
    """A tuple of values, also when there is one part only."""
    if len(sizes) == 1:
        return (x,)
    return g.emit("split", x, sizes=tuple(sizes), axis=axis_of(dim, len(x.type.shape)))


@aten("chunk.default")
def _chunk(g: Any, x: Any, chunks: int, dim: int = 0) -> Any:
    return _split(g, x, -(-x.type.shape[dim] // chunks), dim)


@aten("unbind.int")
def _unbind(g: Any, x: Any, dim: int = 0) -> Any:
    axis = axis_of(dim, len(x.type.shape))
    parts = split_with_sizes(g, x, [1] * x.type.shape[axis], axis)
    return tuple(squeeze(g, part, axis) for part in parts)


@aten("slice.Tensor")
def _slice(g: Any, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    axis = axis_of(dim, len(x.type.shape))
    first, last, _ = slice(start, end, step).indices(x.type.shape[axis])
    if (first, last, step) == (0, x.type.shape[axis], 1):
        return x
    return g.emit("strided_slice", x, axes=(axis,), begin=(first,), end=(max(first, last),), strides=(step,))


@aten("select.int")
def _select(g: Any, x: Any, dim: int, index: int) -> Any:
    axis = axis_of(dim, len(x.type.shape))
    first = axis_of(index, x.type.shape[axis])
    return squeeze(g, _slice(g, x, axis, first, first + 1), axis)


@aten("narrow.default")
def _narrow(g: Any, x: Any, dim: int, start: int, length: int) -> Any:
    return _slice(g, x, dim, start, start + length)


@aten("constant_pad_nd.default")
def _pad(g: Any, x: Any, widths: list[int], value: float = 0) -> Any:
    return _pad_mode(g, x, widths, "constant", value)


@aten("pad.default")
def _pad_mode(g: Any, x: Any, widths: list[int], mode: str = "constant", value: float | None = None) -> Any:
    rank = len(x.type.shape)
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


@relax_spelling("relax.concat")
def _relax_concat(g: Any, args: Any, attrs: Any) -> Any:
    return _cat(g, args[0], attrs["axis"] or 0)


@relax_spelling("relax.split")
def _relax_split_call(g: Any, args: Any, attrs: Any) -> Any:
    axis = axis_of(attrs["axis"], len(args[0].type.shape))
    total, where = args[0].type.shape[axis], attrs["indices_or_sections"]
    if isinstance(where, int):
        size = -(-total // where)
        ends = [min(total, size * (i + 1)) for i in range(where)]
    else:
        ends = [*where, total]
    return split_with_sizes(g, args[0], [b - a for a, b in zip([0, *ends], ends, strict=False)], axis)


@relax_spelling("relax.strided_slice")
def _relax_strided_slice(g: Any, args: Any, attrs: Any) -> Any:
    x, axes, begins, ends, *steps = args
    for axis, begin, end, step in zip(axes, begins, ends, steps[0] if steps else [1] * len(axes), strict=True):
        if step < 1:
            raise NotImplementedError(f"a slice with step {step}")
        x = _slice(g, x, axis, begin, end, step)
    return x


@relax_spelling("relax.nn.pad")
def _relax_nn_pad(g: Any, args: Any, attrs: Any) -> Any:
    widths = attrs["pad_width"]
    if attrs["pad_mode"] not in ("constant", "reflect", "replicate", "circular"):
        raise NotImplementedError(f"padding of mode {attrs['pad_mode']!r}")
    if attrs["pad_mode"] != "constant":
        return pad_by(g, args[0], widths[::2], widths[1::2], attrs["pad_mode"])
    return g.emit("pad", args[0], low=tuple(widths[::2]), high=tuple(widths[1::2]), value=attrs["pad_value"])


# ONNX spellings


@onnx_spelling("Concat")
def _onnx_concat(g: Any, x: Any, attrs: Any) -> Any:
    return _cat(g, [x[i] for i in range(len(x))], attrs["axis"])


@onnx_spelling("Split")
def _onnx_split(g: Any, x: Any, attrs: Any) -> Any:
    axis = axis_of(attrs.get("axis", 0), len(x[0].type.shape))
    total, sizes = x[0].type.shape[axis], x.numbers(1, attrs.get("split"))
    if sizes is None:
        count = attrs.get("num_outputs", attrs["outputs"])
        size = -(-total // count)
        sizes = [max(0, min(size, total - i * size)) for i in range(count)]
    return split_with_sizes(g, x[0], sizes, axis)


@onnx_spelling("Slice")
def _onnx_slice(g: Any, x: Any, attrs: Any) -> Any:
    y, begins, ends = x[0], x.numbers(1, attrs.get("starts")), x.numbers(2, attrs.get("ends"))
    axes = x.numbers(3, attrs.get("axes", list(range(len(begins)))))
    for axis, begin, end, step in zip(axes, begins, ends, x.numbers(4, [1] * len(axes)), strict=True):
        axis = axis_of(axis, len(y.type.shape))
        if step > 0:
            y = _slice(g, y, axis, begin, end, step)
            continue
        # Backwards: the same elements forwards, then reversed.
        size = y.type.shape[axis]
        first, last = max(-size - 1, min(begin, size - 1)), max(-size - 1, min(end, size))
        picked = range(size)[slice(first, None if last == -size - 1 else last, step)]
        y = _slice(g, y, axis, picked[-1] if picked else 0, picked[0] + 1 if picked else 0, -step)
        y = g.emit("flip", y, axis=axis)
    return y


@onnx_spelling("Pad")
def _onnx_pad(g: Any, x: Any, attrs: Any) -> Any:
    mode = attrs.get("mode", "constant")
    rank = len(x[0].type.shape)
    widths = x.numbers(1, attrs.get("pads", attrs.get("paddings")))
    axes = [axis_of(a, rank) for a in x.numbers(3, list(range(rank)))]
    low, high = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        low[axis], high[axis] = widths[i], widths[len(axes) + i]
    y = x[0]
    if mode != "constant":
        return pad_by(g, y, low, high, mode)
    for axis in range(rank):
        # Negative padding takes elements away.
        y = _slice(g, y, axis, max(0, -low[axis]), y.type.shape[axis] - max(0, -high[axis]))
    low, high = [max(0, n) for n in low], [max(0, n) for n in high]
    if not any(low + high):
        return y
    return g.emit("pad", y, low=tuple(low), high=tuple(high), value=x.number(2, attrs.get("value", 0)))
