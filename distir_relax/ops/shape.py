"""Ops that move elements and compute nothing: reshape, permute, broadcast, concat, split, slice, pad."""

from __future__ import annotations

import itertools
import math
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.registry import ALL, Attrs, Types, aten, define, operands, relax_spelling
from distir_relax.ops.rule import BLOCKED, Factor, Rule, parse_rule

_FREE = {"flops": lambda types, attrs, results: 0.0}


def _names(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


def _result_shape(attrs: Attrs, types: Types, results: Types) -> dict[str, Any]:
    return {**attrs, "shape": results[0].shape}


# reshape


def _infer_reshape(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if math.prod(attrs["shape"]) != types[0].elements:
        raise ValueError(
            f"{types[0].shape} has {types[0].elements} elements, {attrs['shape']} {math.prod(attrs['shape'])}"
        )
    return (TensorType(tuple(attrs["shape"]), types[0].dtype),)


def reshape_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """Dims that hold the same elements on both sides share factors: ``b s (h d) -> b s h d``.

    The two shapes are matched from the left in the smallest groups of equal product; within a group the factors are
    the stretches between all dim boundaries. Where a boundary of one side falls inside no whole factor of the other
    (``6 4 -> 8 3``) the group cannot be split.
    """
    before, after = types[0].shape, results[0].shape
    factors: list[Factor] = []
    sides: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([()] * len(before), [()] * len(after))
    for left, right in _groups(before, after):
        total = math.prod(before[i] for i in left)
        marks = sorted(set(_suffixes(before, left)) | set(_suffixes(after, right)))
        if any(b % a for a, b in itertools.pairwise(marks)):
            for side, shape, dims in ((0, before, left), (1, after, right)):
                for i in dims:
                    if shape[i] != 1:
                        sides[side][i] = (len(factors),)
                        factors.append(Factor(f"f{len(factors)}", shape[i], BLOCKED))
            continue
        outer_first = list(reversed(marks))
        base = len(factors)
        factors += [Factor(f"f{base + j}", a // b) for j, (a, b) in enumerate(itertools.pairwise(outer_first))]
        for side, shape, dims in ((0, before, left), (1, after, right)):
            rest = total
            for i in dims:
                if shape[i] == 1:
                    continue
                inner = rest // shape[i]
                first, last = outer_first.index(rest), outer_first.index(inner)
                sides[side][i] = tuple(range(base + first, base + last))
                rest = inner
    return Rule(tuple(factors), (tuple(sides[0]),), (tuple(sides[1]),))


def _suffixes(shape: tuple[int, ...], dims: list[int]) -> list[int]:
    products = [1]
    for i in reversed(dims):
        products.append(products[-1] * shape[i])
    return products


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while (not left and i < len(before)) or (not right and j < len(after)) or a != b:
            if i < len(before) and (not left or a < b or j >= len(after)):
                a *= before[i]
                left.append(i)
                i += 1
            elif j < len(after):
                b *= after[j]
                right.append(j)
                j += 1
            else:
                break
        groups.append((left, right))
    return groups


define(
    "reshape",
    infer=_infer_reshape,
    rule=reshape_rule,
    torch="{0}.reshape({shape})",
    relax="R.reshape({0}, {shape})",
    linear=(operands(0),),
    localize=_result_shape,
    **_FREE,
)


# permute_dims


def _infer_permute(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if sorted(attrs["axes"]) != list(range(len(types[0].shape))):
        raise ValueError(f"axes {attrs['axes']} do not permute {len(types[0].shape)} dims")
    return (TensorType(tuple(types[0].shape[a] for a in attrs["axes"]), types[0].dtype),)


def _permute_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = _names(len(types[0].shape))
    text = f"{' '.join(names)} -> {' '.join(names[a] for a in attrs['axes'])}"
    return parse_rule(text, [types[0].shape], [results[0].shape])


define(
    "permute_dims",
    infer=_infer_permute,
    rule=_permute_rule,
    torch="{0}.permute({axes})",
    relax="R.permute_dims({0}, {axes})",
    linear=(operands(0),),
    **_FREE,
)


# broadcast_to


def _infer_broadcast(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = tuple(attrs["shape"])
    for have, want in zip(reversed(types[0].shape), reversed(shape), strict=False):
        if have not in (1, want):
            raise ValueError(f"{types[0].shape} does not broadcast to {shape}")
    return (TensorType(shape, types[0].dtype),)


def _broadcast_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = _names(len(results[0].shape))
    own = names[len(names) - len(types[0].shape) :]
    return parse_rule(f"{' '.join(own)} -> {' '.join(names)}", [types[0].shape], [results[0].shape])


define(
    "broadcast_to",
    infer=_infer_broadcast,
    rule=_broadcast_rule,
    torch="{0}.expand({shape})",
    relax="R.broadcast_to({0}, {shape})",
    linear=(operands(0),),
    localize=_result_shape,
    **_FREE,
)


# concat


def _infer_concat(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, shape = attrs["axis"], list(types[0].shape)
    for t in types[1:]:
        if [n for i, n in enumerate(t.shape) if i != axis] != [n for i, n in enumerate(shape) if i != axis]:
            raise ValueError(f"shapes {[t.shape for t in types]} do not join along dim {axis}")
    shape[axis] = sum(t.shape[axis] for t in types)
    return (TensorType(tuple(shape), types[0].dtype),)


def _concat_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = _names(len(results[0].shape))
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
    **_FREE,
)


# split


def _infer_split(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, sizes = attrs["axis"], attrs["sizes"]
    shape = types[0].shape
    if sum(sizes) != shape[axis]:
        raise ValueError(f"sizes {sizes} do not add up to {shape[axis]}")
    return tuple(TensorType((*shape[:axis], n, *shape[axis + 1 :]), types[0].dtype) for n in sizes)


def _split_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names, axis, sizes = _names(len(types[0].shape)), attrs["axis"], attrs["sizes"]
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
    **_FREE,
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
    names = _names(len(types[0].shape))
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
    **_FREE,
)


# pad: constant padding at the end and the beginning of each dim


def _infer_pad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    low, high = attrs["low"], attrs["high"]
    return (TensorType(tuple(a + n + b for a, n, b in zip(low, types[0].shape, high, strict=True)), types[0].dtype),)


def _pad_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = _names(len(types[0].shape))
    touched = [bool(a or b) for a, b in zip(attrs["low"], attrs["high"], strict=True)]
    left = " ".join(f"[{n}]" if t else n for t, n in zip(touched, names, strict=True))
    right = " ".join(f"[{n}p]" if t else n for t, n in zip(touched, names, strict=True))
    return parse_rule(f"{left} -> {right}", [types[0].shape], [results[0].shape])


def _torch_pad(attrs: Attrs) -> str:
    widths = [n for pair in reversed(list(zip(attrs["low"], attrs["high"], strict=True))) for n in pair]
    while widths[-2:] == [0, 0]:
        widths = widths[:-2]
    return f"F.pad({{0}}, {tuple(widths)!r}, value={{value}})"


def _relax_pad(attrs: Attrs) -> str:
    widths = [n for pair in zip(attrs["low"], attrs["high"], strict=True) for n in pair]
    return f'R.nn.pad({{0}}, {widths!r}, "constant", {{value}})'


define("pad", infer=_infer_pad, rule=_pad_rule, torch=_torch_pad, relax=_relax_pad, **_FREE)


# ATen spellings


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def reshape_to(g: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` reshaped; itself when it has that shape already."""
    return x if x.type.shape == tuple(shape) else g.emit("reshape", x, shape=tuple(shape))


@aten("view.default", "reshape.default", "_unsafe_view.default")
def _view(g: Any, x: Any, shape: list[int]) -> Any:
    known = math.prod(n for n in shape if n != -1)
    return reshape_to(g, x, tuple(x.type.elements // known if n == -1 else n for n in shape))


@aten("unsqueeze.default")
def _unsqueeze(g: Any, x: Any, dim: int) -> Any:
    dim = _axis(dim, len(x.type.shape) + 1)
    return reshape_to(g, x, (*x.type.shape[:dim], 1, *x.type.shape[dim:]))


@aten("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(g: Any, x: Any, dim: Any = None) -> Any:
    shape = x.type.shape
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    drop = {_axis(d, len(shape)) for d in dims}
    return reshape_to(g, x, tuple(n for i, n in enumerate(shape) if not (i in drop and n == 1)))


@aten("flatten.using_ints")
def _flatten(g: Any, x: Any, start: int = 0, end: int = -1) -> Any:
    shape = x.type.shape
    start, end = _axis(start, len(shape)), _axis(end, len(shape))
    return reshape_to(g, x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@aten("unflatten.int")
def _unflatten(g: Any, x: Any, dim: int, sizes: list[int]) -> Any:
    shape = x.type.shape
    dim = _axis(dim, len(shape))
    return _view(
        g,
        x,
        [
            *shape[:dim],
            *[n if n != -1 else shape[dim] // math.prod(m for m in sizes if m != -1) for n in sizes],
            *shape[dim + 1 :],
        ],
    )


@aten("permute.default")
def _permute(g: Any, x: Any, dims: list[int]) -> Any:
    axes = tuple(_axis(d, len(x.type.shape)) for d in dims)
    return x if axes == tuple(range(len(axes))) else g.emit("permute_dims", x, axes=axes)


@aten("transpose.int")
def _transpose(g: Any, x: Any, a: int, b: int) -> Any:
    axes = list(range(len(x.type.shape)))
    axes[a], axes[b] = axes[b], axes[a]
    return _permute(g, x, axes)


@aten("t.default", "numpy_T.default")
def _t(g: Any, x: Any) -> Any:
    return _permute(g, x, list(reversed(range(len(x.type.shape)))))


@aten("expand.default")
def _expand(g: Any, x: Any, sizes: list[int], implicit: bool = False) -> Any:
    own = (1,) * (len(sizes) - len(x.type.shape)) + x.type.shape
    shape = tuple(have if want == -1 else want for have, want in zip(own, sizes, strict=True))
    return x if shape == x.type.shape else g.emit("broadcast_to", x, shape=shape)


@aten("cat.default", "concat.default")
def _cat(g: Any, tensors: list[Any], dim: int = 0) -> Any:
    from distir_relax.ops.pointwise import promote

    kept = [t for t in tensors if t.type.shape != (0,)]
    if len(kept) == 1:
        return kept[0]
    return g.emit("concat", *promote(g, *kept), axis=_axis(dim, len(kept[0].type.shape)))


@aten("stack.default")
def _stack(g: Any, tensors: list[Any], dim: int = 0) -> Any:
    axis = _axis(dim, len(tensors[0].type.shape) + 1)
    return _cat(g, [_unsqueeze(g, t, axis) for t in tensors], axis)


@aten("split.Tensor")
def _split(g: Any, x: Any, size: int, dim: int = 0) -> Any:
    axis = _axis(dim, len(x.type.shape))
    total = x.type.shape[axis]
    return split_with_sizes(g, x, [min(size, total - i) for i in range(0, total, size)], axis)


@aten("split_with_sizes.default")
def split_with_sizes(g: Any, x: Any, sizes: list[int], dim: int = 0) -> Any:
    """A tuple of values, also when there is one part only."""
    if len(sizes) == 1:
        return (x,)
    return g.emit("split", x, sizes=tuple(sizes), axis=_axis(dim, len(x.type.shape)))


@aten("chunk.default")
def _chunk(g: Any, x: Any, chunks: int, dim: int = 0) -> Any:
    return _split(g, x, -(-x.type.shape[dim] // chunks), dim)


@aten("unbind.int")
def _unbind(g: Any, x: Any, dim: int = 0) -> Any:
    axis = _axis(dim, len(x.type.shape))
    parts = split_with_sizes(g, x, [1] * x.type.shape[axis], axis)
    return tuple(_squeeze(g, part, axis) for part in parts)


@aten("slice.Tensor")
def _slice(g: Any, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    axis = _axis(dim, len(x.type.shape))
    first, last, _ = slice(start, end, step).indices(x.type.shape[axis])
    if (first, last, step) == (0, x.type.shape[axis], 1):
        return x
    return g.emit("strided_slice", x, axes=(axis,), begin=(first,), end=(max(first, last),), strides=(step,))


@aten("select.int")
def _select(g: Any, x: Any, dim: int, index: int) -> Any:
    axis = _axis(dim, len(x.type.shape))
    first = _axis(index, x.type.shape[axis])
    return _squeeze(g, _slice(g, x, axis, first, first + 1), axis)


@aten("narrow.default")
def _narrow(g: Any, x: Any, dim: int, start: int, length: int) -> Any:
    return _slice(g, x, dim, start, start + length)


@aten("constant_pad_nd.default", "pad.default")
def _pad(g: Any, x: Any, widths: list[int], *rest: Any) -> Any:
    value = rest[-1] if rest and rest[-1] is not None and not isinstance(rest[-1], str) else 0
    rank = len(x.type.shape)
    low, high = [0] * rank, [0] * rank
    for i in range(len(widths) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = widths[2 * i], widths[2 * i + 1]
    return g.emit("pad", x, low=tuple(low), high=tuple(high), value=value)


# Relax spellings


@relax_spelling("relax.reshape")
def _relax_reshape(g: Any, args: Any, attrs: Any) -> Any:
    return reshape_to(g, args[0], args[1])


@relax_spelling("relax.expand_dims")
def _relax_expand_dims(g: Any, args: Any, attrs: Any) -> Any:
    rank = len(args[0].type.shape) + len(attrs["axis"])
    new = {_axis(a, rank) for a in attrs["axis"]}
    rest = iter(args[0].type.shape)
    return reshape_to(g, args[0], tuple(1 if i in new else next(rest) for i in range(rank)))


@relax_spelling("relax.squeeze")
def _relax_squeeze(g: Any, args: Any, attrs: Any) -> Any:
    return _squeeze(g, args[0], attrs["axis"])


@relax_spelling("relax.flatten")
def _relax_flatten(g: Any, args: Any, attrs: Any) -> Any:
    return reshape_to(g, args[0], (args[0].type.elements,))


@relax_spelling("relax.permute_dims")
def _relax_permute(g: Any, args: Any, attrs: Any) -> Any:
    rank = len(args[0].type.shape)
    return _permute(g, args[0], attrs["axes"] if attrs["axes"] is not None else list(reversed(range(rank))))


@relax_spelling("relax.broadcast_to")
def _relax_broadcast(g: Any, args: Any, attrs: Any) -> Any:
    return args[0] if args[0].type.shape == args[1] else g.emit("broadcast_to", args[0], shape=args[1])


@relax_spelling("relax.full")
def _relax_full(g: Any, args: Any, attrs: Any) -> Any:
    return g.emit("broadcast_to", args[1], shape=args[0])


@relax_spelling("relax.zeros", "relax.ones")
def _relax_filled(g: Any, args: Any, attrs: Any) -> Any:
    value = g.constant(int(attrs["op"] == "relax.ones"), attrs["dtype"])
    return g.emit("broadcast_to", value, shape=args[0])


@relax_spelling("relax.concat")
def _relax_concat(g: Any, args: Any, attrs: Any) -> Any:
    return _cat(g, args[0], attrs["axis"] or 0)


@relax_spelling("relax.split")
def _relax_split_call(g: Any, args: Any, attrs: Any) -> Any:
    axis = _axis(attrs["axis"], len(args[0].type.shape))
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
    if attrs["pad_mode"] != "constant":
        raise NotImplementedError(f"padding of mode {attrs['pad_mode']!r}")
    widths = attrs["pad_width"]
    return g.emit("pad", args[0], low=tuple(widths[::2]), high=tuple(widths[1::2]), value=attrs["pad_value"])
