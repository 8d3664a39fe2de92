"""Ops that give a tensor another shape: reshape, permute, broadcast. They compute nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from distir_relax.ir import TensorType
from distir_relax.ops.registry import Attrs, Cost, Types, aten, define, onnx_spelling, operands, relax_spelling
from distir_relax.ops.rule import BLOCKED, Factor, Rule, parse_rule

# For entries that only move elements.
FREE: dict[str, Any] = {"flops": lambda types, attrs, results: 0.0}
VIEW: dict[str, Any] = {**FREE, "cost": Cost(view=True)}


def names_of(count: int) -> list[str]:
    """Factor names for `count` dims."""
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
    **VIEW,
)


# permute_dims


def _infer_permute(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if sorted(attrs["axes"]) != list(range(len(types[0].shape))):
        raise ValueError(f"axes {attrs['axes']} do not permute {len(types[0].shape)} dims")
    return (TensorType(tuple(types[0].shape[a] for a in attrs["axes"]), types[0].dtype),)


def _permute_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = names_of(len(types[0].shape))
    text = f"{' '.join(names)} -> {' '.join(names[a] for a in attrs['axes'])}"
    return parse_rule(text, [types[0].shape], [results[0].shape])


define(
    "permute_dims",
    infer=_infer_permute,
    rule=_permute_rule,
    torch="{0}.permute({axes})",
    relax="R.permute_dims({0}, {axes})",
    linear=(operands(0),),
    **VIEW,
)


# broadcast_to


def _infer_broadcast(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = tuple(attrs["shape"])
    for have, want in zip(reversed(types[0].shape), reversed(shape), strict=False):
        if have not in (1, want):
            raise ValueError(f"{types[0].shape} does not broadcast to {shape}")
    return (TensorType(shape, types[0].dtype),)


def _broadcast_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = names_of(len(results[0].shape))
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
    **VIEW,
)


# ATen spellings


def axis_of(axis: int, rank: int) -> int:
    """A dim counted from the front, of a tensor of `rank` dims."""
    return axis + rank if axis < 0 else axis


def reshape_to(g: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` reshaped; itself when it has that shape already."""
    return x if x.type.shape == tuple(shape) else g.emit("reshape", x, shape=tuple(shape))


@aten("view.default", "reshape.default", "_unsafe_view.default")
def _view(g: Any, x: Any, shape: list[int]) -> Any:
    known = math.prod(n for n in shape if n != -1)
    return reshape_to(g, x, tuple(x.type.elements // known if n == -1 else n for n in shape))


@aten("unsqueeze.default")
def unsqueeze(g: Any, x: Any, dim: int) -> Any:
    """`x` with a dim of size 1 before `dim`."""
    dim = axis_of(dim, len(x.type.shape) + 1)
    return reshape_to(g, x, (*x.type.shape[:dim], 1, *x.type.shape[dim:]))


@aten("squeeze.default", "squeeze.dim", "squeeze.dims")
def squeeze(g: Any, x: Any, dim: Any = None) -> Any:
    """`x` without those of the dims `dim` (all, when None) that have size 1."""
    shape = x.type.shape
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    drop = {axis_of(d, len(shape)) for d in dims}
    return reshape_to(g, x, tuple(n for i, n in enumerate(shape) if not (i in drop and n == 1)))


@aten("flatten.using_ints")
def _flatten(g: Any, x: Any, start: int = 0, end: int = -1) -> Any:
    shape = x.type.shape
    start, end = axis_of(start, len(shape)), axis_of(end, len(shape))
    return reshape_to(g, x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@aten("unflatten.int")
def _unflatten(g: Any, x: Any, dim: int, sizes: list[int]) -> Any:
    shape = x.type.shape
    dim = axis_of(dim, len(shape))
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
    axes = tuple(axis_of(d, len(x.type.shape)) for d in dims)
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


# Relax spellings


@relax_spelling("relax.reshape")
def _relax_reshape(g: Any, args: Any, attrs: Any) -> Any:
    return reshape_to(g, args[0], args[1])


@relax_spelling("relax.expand_dims")
def _relax_expand_dims(g: Any, args: Any, attrs: Any) -> Any:
    rank = len(args[0].type.shape) + len(attrs["axis"])
    new = {axis_of(a, rank) for a in attrs["axis"]}
    rest = iter(args[0].type.shape)
    return reshape_to(g, args[0], tuple(1 if i in new else next(rest) for i in range(rank)))


@relax_spelling("relax.squeeze")
def _relax_squeeze(g: Any, args: Any, attrs: Any) -> Any:
    return squeeze(g, args[0], attrs["axis"])


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


# ONNX spellings


@onnx_spelling("Shape")
def _onnx_shape(g: Any, x: Any, attrs: Any) -> Any:
    return np.array(x[0].type.shape[slice(attrs.get("start"), attrs.get("end"))], dtype=np.int64)


@onnx_spelling("Size")
def _onnx_size(g: Any, x: Any, attrs: Any) -> Any:
    return np.array(x[0].type.elements, dtype=np.int64)


@onnx_spelling("Reshape")
def _onnx_reshape(g: Any, x: Any, attrs: Any) -> Any:
    own, asked = x[0].type.shape, x.numbers(1, attrs.get("shape"))
    if not attrs.get("allowzero", 0):
        asked = [own[i] if n == 0 else n for i, n in enumerate(asked)]
    return _view(g, x[0], asked)


@onnx_spelling("Flatten")
def _onnx_flatten(g: Any, x: Any, attrs: Any) -> Any:
    shape = x[0].type.shape
    axis = axis_of(attrs.get("axis", 1), len(shape))
    return reshape_to(g, x[0], (math.prod(shape[:axis]), math.prod(shape[axis:])))


@onnx_spelling("Unsqueeze")
def _onnx_unsqueeze(g: Any, x: Any, attrs: Any) -> Any:
    axes = x.numbers(1, attrs.get("axes"))
    rank = len(x[0].type.shape) + len(axes)
    new = {axis_of(a, rank) for a in axes}
    rest = iter(x[0].type.shape)
    return reshape_to(g, x[0], tuple(1 if i in new else next(rest) for i in range(rank)))


@onnx_spelling("Squeeze")
def _onnx_squeeze(g: Any, x: Any, attrs: Any) -> Any:
    return squeeze(g, x[0], x.numbers(1, attrs.get("axes")))


@onnx_spelling("Transpose")
def _onnx_transpose(g: Any, x: Any, attrs: Any) -> Any:
    return _permute(g, x[0], attrs["perm"] if "perm" in attrs else list(reversed(range(len(x[0].type.shape)))))


@onnx_spelling("Expand")
def _onnx_expand(g: Any, x: Any, attrs: Any) -> Any:
    """The wanted shape and the tensor's own broadcast to each other."""
    own, asked = list(x[0].type.shape), x.numbers(1)
    rank = max(len(own), len(asked))
    own, asked = [1] * (rank - len(own)) + own, [1] * (rank - len(asked)) + asked
    return _expand(g, x[0], [want if have == 1 else have for have, want in zip(own, asked, strict=True)])
