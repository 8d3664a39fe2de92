"""Sorting ops along a dim: argmax, argmin, top-k, sort.

The sorted dim must be whole on a device; all others may be split.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    NO_GRADIENT,
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    OnnxOperands,
    Order,
    Semantics,
    Split,
    Types,
    aten,
    axis_in,
    cast,
    checked_axis,
    define,
    flops_per_operand,
    gradient_of,
    onnx,
    relax,
    relax_as_aten,
    reshape_to,
    resized,
    unsplit_axis_rule,
)

# Positions along the axis differ between operand and result, so the two dims are not of one class.
_rule = partial(unsplit_axis_rule, same="[result]")


def _infer_arg(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, shape = checked_axis(types, attrs), types[0].shape
    reduced = (1,) if attrs["keepdims"] else ()
    return (TensorType((*shape[:axis], *reduced, *shape[axis + 1 :]), "int64"),)


for _name in ("argmax", "argmin"):
    define(
        _name,
        Semantics(infer=_infer_arg, torch=f"torch.{_name}({{0}}, {{axis}}, {{keepdims}})"),
        Split(_rule, order=Order(positions=0)),
        cost=Cost(flops=flops_per_operand()),
        code=Code(relax=f"R.{_name}({{0}}, {{axis}}, {{keepdims}})"),
        gradient=NO_GRADIENT,
    )


def _infer_topk(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, shape = checked_axis(types, attrs), types[0].shape
    if not 0 <= attrs["k"] <= shape[axis]:
        raise ValueError(f"the {attrs['k']} largest of {shape[axis]}")
    picked = resized(types[0], axis, attrs["k"])
    return picked, TensorType(picked.shape, "int64")


def _topk_gradient(b: Backward) -> Value:
    """Scatter the gradient to the selected positions, with zeros elsewhere."""
    zeros, axis = b.zeros(b.x()), b.attrs["axis"]
    return b.emit("scatter_elements", zeros, b.y(1), b.grad, axis=axis, reduction="update")  # type: ignore[no-any-return]


define(
    "topk",
    Semantics(infer=_infer_topk, torch="torch.topk({0}, {k}, {axis}, {largest})"),
    Split(_rule, order=Order(positions=1)),
    cost=Cost(flops=flops_per_operand(8.0)),
    code=Code(relax='R.topk({0}, {k}, {axis}, "both", {largest}, "int64")'),
    gradient=gradient_of(_topk_gradient),
)


def _infer_argsort(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    checked_axis(types, attrs)
    return (TensorType(types[0].shape, "int64"),)


define(
    "argsort",
    Semantics(infer=_infer_argsort, torch="torch.argsort({0}, dim={axis}, descending={descending}, stable=True)"),
    Split(_rule, order=Order(sorts=lambda attrs: not attrs["descending"], positions=0)),
    cost=Cost(flops=flops_per_operand(16.0)),
    code=Code(relax='R.argsort({0}, {axis}, {descending}, "int64")'),
    gradient=NO_GRADIENT,
)


# ATen spellings


def _arg_reduce(name: str) -> Any:
    def convert(g: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
        # torch computes the maximum of booleans, but not its index.
        x = cast(g, x, "uint8") if x.tensor.dtype == "bool" else x
        if dim is None:
            flat = g.emit(name, reshape_to(g, x, (x.tensor.elements,)), axis=0, keepdims=False)
            return reshape_to(g, flat, (1,) * len(x.tensor.shape)) if keepdim else flat
        if not x.tensor.shape:
            return g.constant(0, "int64")
        return g.emit(name, x, axis=axis_in(x, dim), keepdims=keepdim)

    return convert


for _name in ("argmax", "argmin"):
    aten(f"{_name}.default")(_arg_reduce(_name))


def _reduce_with_index(name: str) -> Any:
    def convert(g: Builder, x: Value, dim: int, keepdim: bool = False) -> Any:
        if not x.tensor.shape:
            return x, g.constant(0, "int64")
        values = g.emit(name, x, axis=(axis_in(x, dim),), keepdims=keepdim, ties="first")
        return values, g.aten(f"arg{name}.default", x, dim, keepdim)

    return convert


for _name in ("max", "min"):
    aten(f"{_name}.dim")(_reduce_with_index(_name))


@aten("topk.default")
def _topk(g: Builder, x: Value, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    if not x.tensor.shape:
        return x, g.constant(0, "int64")
    return g.emit("topk", x, k=k, axis=axis_in(x, dim), largest=largest)


@aten("argsort.default", "argsort.stable")
def _argsort(g: Builder, x: Value, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Any:
    if not x.tensor.shape:
        return g.constant(0, "int64")
    return g.emit("argsort", x, axis=axis_in(x, dim), descending=descending)


@aten("sort.default", "sort.stable")
def _sort(g: Builder, x: Value, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Any:
    order = _argsort(g, x, dim, descending)
    return g.aten("gather.default", x, dim, order), order


# Relax spellings

for _name in ("argmax", "argmin"):
    relax_as_aten(f"relax.{_name}", f"{_name}.default", "axis", "keepdims")


@relax("relax.topk")
def _relax_topk(g: Builder, args: Any, attrs: Attrs) -> Any:
    values, indices = g.aten("topk.default", args[0], attrs["k"], attrs["axis"], attrs["largest"])
    indices = cast(g, indices, attrs["dtype"])
    return {"both": [values, indices], "values": values, "indices": indices}[attrs["ret_type"]]


@relax("relax.argsort")
def _relax_argsort(g: Builder, args: Any, attrs: Attrs) -> Any:
    order = g.aten("argsort.default", args[0], attrs["axis"], attrs["descending"])
    return cast(g, order, attrs["dtype"])


@relax("relax.sort")
def _relax_sort(g: Builder, args: Any, attrs: Attrs) -> Any:
    return g.aten("sort.default", args[0], attrs["axis"], attrs["descending"])[0]


# ONNX spellings


def _onnx_arg(op_type: str, name: str) -> None:
    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        axis, keepdims = axis_in(x[0], attrs.get("axis", 0)), bool(attrs.get("keepdims", 1))
        if not attrs.get("select_last_index", 0):
            return g.emit(name, x[0], axis=axis, keepdims=keepdims)
        backwards = g.emit(name, g.emit("flip", x[0], axis=axis), axis=axis, keepdims=keepdims)
        return g.emit("subtract", g.constant(x[0].tensor.shape[axis] - 1, "int64"), backwards)

    onnx(op_type)(convert)


_onnx_arg("ArgMax", "argmax")
_onnx_arg("ArgMin", "argmin")


@onnx("TopK")
def _onnx_topk(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    """Equal elements are in order of index, which only a stable sort guarantees."""
    axis, k = axis_in(x[0], attrs.get("axis", -1)), x.number(1, attrs.get("k"))
    order = g.emit("argsort", x[0], axis=axis, descending=bool(attrs.get("largest", 1)))
    picked = g.emit("strided_slice", order, axes=(axis,), begin=(0,), end=(k,), strides=(1,))
    return g.emit("gather_elements", x[0], picked, axis=axis), picked
