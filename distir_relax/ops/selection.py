"""Ops that pick or order elements along a dim: arg-reductions, top-k, sorting, gathering, triangles, reversal.

The dim they look along must be whole on a device; all others split freely.
"""

from __future__ import annotations

import sys
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.indexing import counted_from_front
from distir_relax.ops.pointwise import broadcast
from distir_relax.ops.registry import Attrs, Types, aten, define, onnx_spelling, operands
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.shape import reshape_to


def _axis_of(types: Types, attrs: Attrs) -> int:
    axis = int(attrs["axis"])
    if not 0 <= axis < len(types[0].shape):
        raise ValueError(f"axis {axis} of a tensor of {len(types[0].shape)} dims")
    return axis


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _dims(count: int, axis: int, at_axis: str) -> str:
    return " ".join(at_axis if i == axis else f"d{i}" for i in range(count))


def _whole_axis_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rank, axis = len(types[0].shape), attrs["axis"]
    left = _dims(rank, axis, "[whole]")
    kept = "[result]" if len(results[0].shape) == rank else ""
    right = ", ".join([_dims(rank, axis, kept)] * len(results))
    return parse_rule(f"{left} -> {right}", [types[0].shape], [t.shape for t in results])


# argmax, argmin


def _infer_arg(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, shape = _axis_of(types, attrs), types[0].shape
    kept = (1,) if attrs["keepdims"] else ()
    return (TensorType((*shape[:axis], *kept, *shape[axis + 1 :]), "int64"),)


for _name in ("argmax", "argmin"):
    define(
        _name,
        infer=_infer_arg,
        rule=_whole_axis_rule,
        torch=f"torch.{_name}({{0}}, {{axis}}, {{keepdims}})",
        relax=f"R.{_name}({{0}}, {{axis}}, {{keepdims}})",
        flops=lambda types, attrs, results: float(types[0].elements),
    )


# topk, argsort


def _infer_topk(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, shape = _axis_of(types, attrs), types[0].shape
    if not 0 <= attrs["k"] <= shape[axis]:
        raise ValueError(f"the {attrs['k']} largest of {shape[axis]}")
    picked = _resized(shape, axis, attrs["k"])
    return TensorType(picked, types[0].dtype), TensorType(picked, "int64")


define(
    "topk",
    infer=_infer_topk,
    rule=_whole_axis_rule,
    torch="torch.topk({0}, {k}, {axis}, {largest})",
    relax='R.topk({0}, {k}, {axis}, "both", {largest}, "int64")',
    flops=lambda types, attrs, results: 8.0 * types[0].elements,
)


def _infer_argsort(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _axis_of(types, attrs)
    return (TensorType(types[0].shape, "int64"),)


define(
    "argsort",
    infer=_infer_argsort,
    rule=_whole_axis_rule,
    torch="torch.argsort({0}, dim={axis}, descending={descending}, stable=True)",
    relax='R.argsort({0}, {axis}, {descending}, "int64")',
    flops=lambda types, attrs, results: 16.0 * types[0].elements,
)


# gather_elements: result[i][j] = data[index[i][j]][j] for axis 0


def _infer_gather(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, index = types
    axis = _axis_of(types, attrs)
    if len(index.shape) != len(data.shape) or "int" not in index.dtype:
        raise ValueError(f"an integer index of {len(data.shape)} dims")
    if any(m > n for d, (n, m) in enumerate(zip(data.shape, index.shape, strict=True)) if d != axis):
        raise ValueError(f"index {index.shape} leaves {data.shape}")
    return (TensorType(index.shape, data.dtype),)


def _gather_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    data, index = types
    left, middle = [], []
    for d, (n, m) in enumerate(zip(data.shape, index.shape, strict=True)):
        shared = d != attrs["axis"] and n == m
        left.append(f"d{d}" if shared else f"[x{d}]")
        # Where the index covers the beginning of a dim only, a device's part of it would need another's data.
        middle.append(f"d{d}" if shared or d == attrs["axis"] else f"[i{d}]")
    text = f"{' '.join(left)}, {' '.join(middle)} -> {' '.join(middle)}"
    return parse_rule(text, [data.shape, index.shape], [results[0].shape])


define(
    "gather_elements",
    infer=_infer_gather,
    rule=_gather_rule,
    torch="torch.gather({0}, {axis}, {1})",
    relax="R.gather_elements({0}, {1}, {axis})",
    linear=(operands(0),),
    indices=operands(1),
    flops=lambda types, attrs, results: 0.0,
)


# index_tensor: data[i, j, …] with index tensors that broadcast, for the first dims of data


def _infer_index(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, indices = types[0], types[1:]
    if not indices or len(indices) > len(data.shape) or any("int" not in t.dtype for t in indices):
        raise ValueError(f"1 to {len(data.shape)} integer indices")
    return (TensorType((*broadcast(indices), *data.shape[len(indices) :]), data.dtype),)


def _index_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    data, indices = types[0], types[1:]
    rank = len(broadcast(indices))
    picked = [f"[x{i}]" for i in range(len(indices))]
    rest = [f"d{i}" for i in range(len(indices), len(data.shape))]
    names = [f"i{i}" for i in range(rank)]
    operand = ", ".join(" ".join(names[rank - len(t.shape) :]) for t in indices)
    text = f"{' '.join(picked + rest)}, {operand} -> {' '.join(names + rest)}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape])


define(
    "index_tensor",
    infer=_infer_index,
    rule=_index_rule,
    torch=lambda attrs: "{0}[" + ", ".join(f"{{{i + 1}}}" for i in range(attrs["count"])) + "]",
    relax=lambda attrs: "R.index_tensor({0}, [" + ", ".join(f"{{{i + 1}}}" for i in range(attrs["count"])) + "])",
    linear=(operands(0),),
    # All operands but the data, however many there are.
    indices=range(1, sys.maxsize),
    flops=lambda types, attrs, results: 0.0,
)


# flip, tril, triu


def _infer_same(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _axis_of(types, attrs)
    return (types[0],)


def _flip_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    text = _dims(len(types[0].shape), attrs["axis"], "[whole]")
    return parse_rule(f"{text} -> {text}", [types[0].shape], [results[0].shape])


define(
    "flip",
    infer=_infer_same,
    rule=_flip_rule,
    torch="torch.flip({0}, ({axis},))",
    relax="R.flip({0}, {axis})",
    linear=(operands(0),),
    flops=lambda types, attrs, results: 0.0,
)


def _infer_triangle(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if len(types[0].shape) < 2:
        raise ValueError("a tensor of at least 2 dims")
    return (types[0],)


for _name in ("tril", "triu"):
    define(
        _name,
        infer=_infer_triangle,
        rule="... [rows] [columns] -> ... [rows] [columns]",
        torch=f"torch.{_name}({{0}}, {{k}})",
        relax=f"R.{_name}({{0}}, {{k}})",
        linear=(operands(0),),
        flops=lambda types, attrs, results: 0.0,
    )


# ATen spellings


def _positive(x: Any, dim: int) -> int:
    return dim % max(1, len(x.type.shape))


def _arg_reduce(name: str) -> Any:
    def convert(g: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            flat = g.emit(name, reshape_to(g, x, (x.type.elements,)), axis=0, keepdims=False)
            return reshape_to(g, flat, (1,) * len(x.type.shape)) if keepdim else flat
        return g.emit(name, x, axis=_positive(x, dim), keepdims=keepdim)

    return convert


for _name in ("argmax", "argmin"):
    aten(f"{_name}.default")(_arg_reduce(_name))


def _reduce_with_index(name: str) -> Any:
    def convert(g: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
        axis = _positive(x, dim)
        return (
            g.emit(name, x, axis=(axis,), keepdims=keepdim),
            g.emit(f"arg{name}", x, axis=axis, keepdims=keepdim),
        )

    return convert


for _name in ("max", "min"):
    aten(f"{_name}.dim")(_reduce_with_index(_name))


@aten("topk.default")
def _topk(g: Any, x: Any, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    return g.emit("topk", x, k=k, axis=_positive(x, dim), largest=largest)


@aten("argsort.default")
def _argsort(g: Any, x: Any, dim: int = -1, descending: bool = False) -> Any:
    return g.emit("argsort", x, axis=_positive(x, dim), descending=descending)


@aten("argsort.stable")
def _argsort_stable(g: Any, x: Any, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Any:
    return _argsort(g, x, dim, descending)


@aten("sort.default")
def _sort(g: Any, x: Any, dim: int = -1, descending: bool = False) -> Any:
    order = _argsort(g, x, dim, descending)
    return g.emit("gather_elements", x, order, axis=_positive(x, dim)), order


@aten("sort.stable")
def _sort_stable(g: Any, x: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    return _sort(g, x, dim, descending)


@aten("gather.default")
def _gather(g: Any, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    return g.emit("gather_elements", x, index, axis=_positive(x, dim))


@aten("flip.default")
def _flip(g: Any, x: Any, dims: list[int]) -> Any:
    for dim in dims:
        x = g.emit("flip", x, axis=_positive(x, dim))
    return x


@aten("tril.default")
def _tril(g: Any, x: Any, diagonal: int = 0) -> Any:
    return g.emit("tril", x, k=diagonal)


@aten("triu.default")
def _triu(g: Any, x: Any, diagonal: int = 0) -> Any:
    return g.emit("triu", x, k=diagonal)


# ONNX spellings


def _onnx_arg(op_type: str, name: str) -> None:
    def convert(g: Any, x: Any, attrs: Any) -> Any:
        axis, keepdims = _positive(x[0], attrs.get("axis", 0)), bool(attrs.get("keepdims", 1))
        if not attrs.get("select_last_index", 0):
            return g.emit(name, x[0], axis=axis, keepdims=keepdims)
        backwards = g.emit(name, g.emit("flip", x[0], axis=axis), axis=axis, keepdims=keepdims)
        return g.emit("subtract", g.constant(x[0].type.shape[axis] - 1, "int64"), backwards)

    onnx_spelling(op_type)(convert)


_onnx_arg("ArgMax", "argmax")
_onnx_arg("ArgMin", "argmin")


@onnx_spelling("TopK")
def _onnx_topk(g: Any, x: Any, attrs: Any) -> Any:
    """Of equal elements the first comes first, which only a stable sort promises."""
    axis, k = _positive(x[0], attrs.get("axis", -1)), x.number(1, attrs.get("k"))
    order = g.emit("argsort", x[0], axis=axis, descending=bool(attrs.get("largest", 1)))
    picked = g.emit("strided_slice", order, axes=(axis,), begin=(0,), end=(k,), strides=(1,))
    return g.emit("gather_elements", x[0], picked, axis=axis), picked


@onnx_spelling("GatherElements")
def _onnx_gather_elements(g: Any, x: Any, attrs: Any) -> Any:
    axis = _positive(x[0], attrs.get("axis", 0))
    return _gather(g, x[0], axis, counted_from_front(g, x, 1, x[0].type.shape[axis]))


@onnx_spelling("Trilu")
def _onnx_trilu(g: Any, x: Any, attrs: Any) -> Any:
    return g.emit("triu" if attrs.get("upper", 1) else "tril", x[0], k=x.number(1, 0))
