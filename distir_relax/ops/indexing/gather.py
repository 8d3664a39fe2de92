"""Gathers by one index per element (`gather_elements`) or by several index tensors (`index_tensor`)."""

from __future__ import annotations

import math
import sys
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.indexing.index_bounds import check_range
from distir_relax.ops.indexing.scatter import flatten_indices
from distir_relax.ops.indexing.segment_sum import sum_segments
from distir_relax.ops.indexing.take import nonnegative_operand, split_lookup, to_nonnegative
from distir_relax.ops.table import (
    LOOK_UP,
    Attrs,
    Backward,
    Builder,
    Code,
    Gradient,
    OnnxOperands,
    Order,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    axis_in,
    axis_of,
    broadcast_shape,
    broadcast_to,
    checked_axis,
    define,
    filled,
    gradient_of,
    onnx,
    operands,
    parse_rule,
    relax,
    reshape_to,
)


def _infer_gather(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, index = types
    axis = checked_axis(types, attrs)
    if len(index.shape) != len(data.shape) or "int" not in index.dtype:
        raise ValueError(f"expected an integer index of {len(data.shape)} dims")
    if any(m > n for d, (n, m) in enumerate(zip(data.shape, index.shape, strict=True)) if d != axis):
        raise ValueError(f"index {index.shape} leaves {data.shape}")
    return (TensorType(index.shape, data.dtype),)


def _gather_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    data, index = types
    # Booleans cannot be summed over devices.
    looked = "[axis]" if data.dtype == "bool" else "axis"
    data_dims, index_dims = [], []
    for d, (n, m) in enumerate(zip(data.shape, index.shape, strict=True)):
        shared = d != attrs["axis"] and n == m
        data_dims.append(looked if d == attrs["axis"] else f"d{d}" if shared else f"[x{d}]")
        # If the index covers only the beginning of a dim, a device's part of it would need another device's data.
        index_dims.append(f"d{d}" if shared or d == attrs["axis"] else f"[i{d}]")
    text = f"{' '.join(data_dims)}, {' '.join(index_dims)} -> {' '.join(index_dims)}"
    return parse_rule(text, [data.shape, index.shape], [results[0].shape])


def _gather_gradient(b: Backward) -> Value:
    """Return for each element the sum of the gradients of its lookups, and of its gradient so far."""
    shape, axis, index, grad = b.x().tensor.shape, b.attrs["axis"], b.x(1), b.grad
    missing = tuple(0 if d == axis else n - m for d, (n, m) in enumerate(zip(shape, index.tensor.shape, strict=True)))
    if any(missing):
        # Rows without lookups: zeros are added to their first element.
        none = (0,) * len(shape)
        index = b.emit("pad", index, low=none, high=missing, value=0)
        grad = b.emit("pad", grad, low=none, high=missing, value=0.0)
    so_far = b.zeros(b.x()) if b.so_far is None else b.so_far
    return b.emit("scatter_elements", so_far, index, grad, axis=axis, reduction="add")  # type: ignore[no-any-return]


define(
    "gather_elements",
    Semantics(infer=_infer_gather, torch="torch.gather({0}, {axis}, {1})", linear=(operands(0),)),
    Split(
        _gather_rule,
        expand={"axis": split_lookup("gather_elements")},
        positional=frozenset({"axis"}),
        indices=operands(1),
        order=Order(looks_up=True),
    ),
    cost=LOOK_UP,
    code=Code(relax="R.gather_elements({0}, {1}, {axis})"),
    gradient=Gradient((_gather_gradient,), accumulates=True),
)


def _infer_index(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, indices = types[0], types[1:]
    if not indices or len(indices) > len(data.shape) or any("int" not in t.dtype for t in indices):
        raise ValueError(f"expected 1 to {len(data.shape)} integer indices")
    return (TensorType((*broadcast_shape(indices), *data.shape[len(indices) :]), data.dtype),)


def _index_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    data, indices = types[0], types[1:]
    rank = len(broadcast_shape(indices))
    picked = [f"[x{i}]" for i in range(len(indices))]
    rest = [f"d{i}" for i in range(len(indices), len(data.shape))]
    names = [f"i{i}" for i in range(rank)]
    operand = ", ".join(" ".join(names[rank - len(t.shape) :]) for t in indices)
    text = f"{' '.join(picked + rest)}, {operand} -> {' '.join(names + rest)}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape])


def _index_gradient(b: Backward) -> Value:
    """Flatten the indexed dims, combine the indices of each point into one, and compute a segment sum."""
    shape, indices = b.x().tensor.shape, b.op.operands[1:]
    sizes, rest = shape[: len(indices)], shape[len(indices) :]
    picked = broadcast_shape([ids.tensor for ids in indices])
    count = math.prod(picked)
    ids = broadcast_to(b.g, flatten_indices(b.g, indices, sizes), picked)
    rows = reshape_to(b.g, b.grad, (count, *rest))
    total = sum_segments(b.g, rows, 0, reshape_to(b.g, ids, (count,)), math.prod(sizes))
    return reshape_to(b.g, total, shape)  # type: ignore[no-any-return]


define(
    "index_tensor",
    Semantics(
        infer=_infer_index,
        torch=lambda attrs: "{0}[" + ", ".join(f"{{{i + 1}}}" for i in range(attrs["count"])) + "]",
        linear=(operands(0),),
    ),
    Split(
        _index_rule,  # All operands except the data, in any number.
        indices=range(1, sys.maxsize),
    ),
    cost=LOOK_UP,
    code=Code(
        relax=lambda attrs: "R.index_tensor({0}, [" + ", ".join(f"{{{i + 1}}}" for i in range(attrs["count"])) + "])"
    ),
    gradient=gradient_of(_index_gradient),
    # Tensors without dims as indices give a view.
    traits={Trait.MAY_SHARE},
)


# ATen spellings


@aten("gather.default")
def _gather(g: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Any:
    shape = index.tensor.shape
    if not index.tensor.elements:
        return filled(g, shape, 0, x.tensor.dtype)
    if not x.tensor.shape or not shape:
        x, index = _flat(g, x), _flat(g, index)
    axis = axis_in(x, dim)
    index = check_range(g, index, x.tensor.shape[axis], "gather")
    return reshape_to(g, g.emit("gather_elements", x, index, axis=axis), shape)


@aten("take_along_dim.default")
def _take_along(g: Builder, x: Value, ids: Value, dim: int | None = None) -> Any:
    """As `gather`, with index and data broadcast to each other except along the dim."""
    if dim is None:
        x, ids, dim = _flat(g, x), _flat(g, ids), 0
    axis = axis_of(dim, len(x.tensor.shape))
    # torch takes these indices modulo the size of the dim, where other lookups reject indices out of range.
    if x.tensor.shape[axis]:
        ids = g.emit("mod", ids, g.constant(x.tensor.shape[axis], ids.tensor.dtype))
    both = [max(n, m) for n, m in zip(x.tensor.shape, ids.tensor.shape, strict=True)]
    x, ids = (
        broadcast_to(g, t, tuple(t.tensor.shape[axis] if d == axis else n for d, n in enumerate(both)))
        for t in (x, ids)
    )
    return g.emit("gather_elements", x, ids, axis=axis)


def _flat(g: Builder, x: Value) -> Any:
    return reshape_to(g, x, (x.tensor.elements,))


# Relax spellings


@relax("relax.gather_elements")
def _relax_gather_elements(g: Builder, args: Any, attrs: Attrs) -> Any:
    axis = axis_in(args[0], attrs["axis"])
    ids = to_nonnegative(g, args[1], args[0].tensor.shape[axis], "gather_elements")
    return g.emit("gather_elements", args[0], ids, axis=axis)


# ONNX spellings


@onnx("GatherElements")
def _onnx_gather_elements(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axis = axis_in(x[0], attrs.get("axis", 0))
    ids = nonnegative_operand(g, x, 1, x[0].tensor.shape[axis], "GatherElements")
    return g.emit("gather_elements", x[0], ids, axis=axis)
