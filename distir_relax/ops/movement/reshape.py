"""Reshapes, including the insertion and removal of dims of size 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.layout import are_equal, floor_divide
from distir_relax.ops.movement import view_strides
from distir_relax.ops.table import (
    BLOCKED,
    FREE,
    Attrs,
    Builder,
    Code,
    Element,
    Factor,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    axis_of,
    define,
    gradient_of,
    index_of,
    onnx,
    operands,
    reindexed,
    relax,
    relax_as_aten,
    reshape_to,
    reshaped,
    size_array,
)


def result_shape(attrs: Attrs, types: Types, results: Types) -> dict[str, Any]:
    """Return the attributes of a shard whose `shape` is that of its result."""
    return {**attrs, "shape": results[0].shape}


def _infer_reshape(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if not are_equal(math.prod(attrs["shape"]), types[0].elements):
        raise ValueError(
            f"{types[0].shape} has {types[0].elements} elements, {attrs['shape']} {math.prod(attrs['shape'])}"
        )
    return (TensorType(tuple(attrs["shape"]), types[0].dtype),)


def reshape_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """Relate dims with the same elements on both sides by common factors: ``b s (h d) -> b s h d``.

    The two shapes are matched from the left in the smallest groups of equal product; within a group the factors are
    the intervals between all dim boundaries. If a boundary of one side is inside a factor of the other
    (``6 4 -> 8 3``) the group cannot be split. A tensor without elements cannot be split.
    """
    before, after = types[0].shape, results[0].shape
    factors: list[Factor] = []
    sides: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([()] * len(before), [()] * len(after))
    if not types[0].elements:
        return Rule((), (tuple(sides[0]),), (tuple(sides[1]),))
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


def _reshaped_element(
    elements: Sequence[Element], shapes: Sequence[Sequence[int]], attrs: Attrs, shape: Sequence[int]
) -> Element | None:
    """Return the element where dims of one element alone come or go."""
    dims = [dim for dim, n in enumerate(shape) if n != 1]
    if [n for n in shapes[0] if n != 1] != [shape[dim] for dim in dims]:
        return None
    rest = iter(dims)
    return reindexed(elements[0], [index_of(next(rest)) if n != 1 else 0 for n in shapes[0]])


define(
    "reshape",
    Semantics(
        infer=_infer_reshape,
        torch="{0}.reshape({shape})",
        linear=(operands(0),),
        moved=lambda parts, attrs: [reshaped(parts[0], attrs["shape"])],
        element=_reshaped_element,
    ),
    Split(reshape_rule, localize=result_shape),
    cost=FREE,
    code=Code(relax="R.reshape({0}, {shape})", strides=view_strides.reshaped),
    gradient=gradient_of(lambda b: reshape_to(b.g, b.grad, b.x().tensor.shape)),
    traits={Trait.VIEW, Trait.MOVES},
)


# ATen spellings


@aten("view.default", "reshape.default", "_unsafe_view.default")
def _view(g: Builder, x: Value, shape: list[int]) -> Any:
    # Equal sizes cancel: a quotient of sums, such as that of (past + sequence)*8 by past + sequence, need not be exact.
    remaining, divisors = list(x.tensor.shape), []
    for n in shape:
        if n in remaining:
            remaining.remove(n)
        elif n != -1:
            divisors.append(n)
    if -1 not in shape:
        return reshape_to(g, x, tuple(shape))
    rest = floor_divide(math.prod(remaining), math.prod(divisors))
    return reshape_to(g, x, tuple(rest if n == -1 else n for n in shape))


@aten("unsqueeze.default")
def unsqueeze(g: Builder, x: Value, dim: int) -> Any:
    """Insert a dim of size 1 before `dim`."""
    dim = axis_of(dim, len(x.tensor.shape) + 1)
    return reshape_to(g, x, (*x.tensor.shape[:dim], 1, *x.tensor.shape[dim:]))


@aten("squeeze.default", "squeeze.dim", "squeeze.dims")
def squeeze(g: Builder, x: Value, dim: Any = None) -> Any:
    """Remove those of the dims `dim` (all, if None) that have size 1."""
    shape = x.tensor.shape
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    drop = {axis_of(d, len(shape)) for d in dims}
    return reshape_to(g, x, tuple(n for i, n in enumerate(shape) if not (i in drop and are_equal(n, 1))))


@aten("flatten.using_ints")
def _flatten(g: Builder, x: Value, start: int = 0, end: int = -1) -> Any:
    shape = x.tensor.shape
    start, end = axis_of(start, len(shape)), axis_of(end, len(shape))
    return reshape_to(g, x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@aten("unflatten.int")
def _unflatten(g: Builder, x: Value, dim: int, sizes: list[int]) -> Any:
    shape = x.tensor.shape
    dim = axis_of(dim, len(shape))
    rest = shape[dim] // math.prod(n for n in sizes if n != -1)
    return reshape_to(g, x, (*shape[:dim], *(rest if n == -1 else n for n in sizes), *shape[dim + 1 :]))


@aten("view_as.default", "reshape_as.default")
def _view_as(g: Builder, x: Value, other: Value) -> Any:
    return reshape_to(g, x, other.tensor.shape)


# Relax spellings

relax_as_aten("relax.reshape", "reshape.default")
relax_as_aten("relax.squeeze", "squeeze.dims", "axis")


@relax("relax.expand_dims")
def _relax_expand_dims(g: Builder, args: Any, attrs: Attrs) -> Any:
    return _insert_dims(g, args[0], attrs["axis"])


def _insert_dims(g: Builder, x: Value, axes: Sequence[int]) -> Any:
    """Insert dims of size 1 at `axes` of the result."""
    rank = len(x.tensor.shape) + len(axes)
    new = {axis_of(a, rank) for a in axes}
    rest = iter(x.tensor.shape)
    return reshape_to(g, x, tuple(1 if i in new else next(rest) for i in range(rank)))


@relax("relax.flatten")
def _relax_flatten(g: Builder, args: Any, attrs: Attrs) -> Any:
    return reshape_to(g, args[0], (args[0].tensor.elements,))


# ONNX spellings


@onnx("Shape")
def _onnx_shape(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return size_array(x[0].tensor.shape[slice(attrs.get("start"), attrs.get("end"))], "int64")


@onnx("Size")
def _onnx_size(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return size_array(x[0].tensor.elements, "int64")


@onnx("Reshape")
def _onnx_reshape(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    shape, target = x[0].tensor.shape, x.numbers(1, attrs.get("shape"))
    if not attrs.get("allowzero", 0):
        target = [shape[i] if n == 0 else n for i, n in enumerate(target)]
    return _view(g, x[0], target)


@onnx("Flatten")
def _onnx_flatten(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    shape = x[0].tensor.shape
    axis = axis_of(attrs.get("axis", 1), len(shape))
    return reshape_to(g, x[0], (math.prod(shape[:axis]), math.prod(shape[axis:])))


@onnx("Unsqueeze")
def _onnx_unsqueeze(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _insert_dims(g, x[0], x.numbers(1, attrs.get("axes")))


@onnx("Squeeze")
def _onnx_squeeze(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return squeeze(g, x[0], x.numbers(1, attrs.get("axes")))
