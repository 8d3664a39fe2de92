"""Filled tensors: a broadcast scalar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Attrs, Builder, aten, dtype_name, filled, relax

# ATen spellings


@aten("full_like.default")
def _full_like(g: Builder, x: Value, value: Any, *, dtype: Any = None) -> Any:
    return filled(g, x.tensor.shape, value, dtype_name(dtype or x.tensor.dtype))


# The contents of an empty tensor are undefined.
@aten("zeros_like.default", "empty_like.default")
def _zeros_like(g: Builder, x: Value, *, dtype: Any = None) -> Any:
    return filled(g, x.tensor.shape, 0, dtype_name(dtype or x.tensor.dtype))


@aten("ones_like.default")
def _ones_like(g: Builder, x: Value, *, dtype: Any = None) -> Any:
    return filled(g, x.tensor.shape, 1, dtype_name(dtype or x.tensor.dtype))


@aten("new_full.default")
def _new_full(g: Builder, x: Value, shape: Sequence[int], value: Any, *, dtype: Any = None) -> Any:
    return filled(g, shape, value, dtype_name(dtype or x.tensor.dtype))


@aten("new_zeros.default", "new_empty.default")
def _new_zeros(g: Builder, x: Value, shape: Sequence[int], *, dtype: Any = None) -> Any:
    return filled(g, shape, 0, dtype_name(dtype or x.tensor.dtype))


@aten("new_ones.default")
def _new_ones(g: Builder, x: Value, shape: Sequence[int], *, dtype: Any = None) -> Any:
    return filled(g, shape, 1, dtype_name(dtype or x.tensor.dtype))


@aten("fill.Scalar", "fill.Tensor", "fill_.Scalar", "fill_.Tensor")
def _fill(g: Builder, x: Value, value: Any) -> Any:
    return filled(g, x.tensor.shape, value, x.tensor.dtype)


@aten("zero.default", "zero_.default")
def _zero(g: Builder, x: Value) -> Any:
    return filled(g, x.tensor.shape, 0, x.tensor.dtype)


@aten("copy.default", "copy_.default")
def _copy(g: Builder, x: Value, source: Any, non_blocking: bool = False) -> Any:
    return filled(g, x.tensor.shape, source, x.tensor.dtype)


# Relax spellings


@relax("relax.full")
def _relax_full(g: Builder, args: Any, attrs: Attrs) -> Any:
    return g.emit("broadcast_to", args[1], shape=args[0])


@relax("relax.zeros", "relax.ones")
def _relax_filled(g: Builder, args: Any, attrs: Attrs) -> Any:
    value = g.constant(int(attrs["op"] == "relax.ones"), attrs["dtype"])
    return g.emit("broadcast_to", value, shape=args[0])


@relax("relax.zeros_like", "relax.ones_like")
def _relax_filled_like(g: Builder, args: Any, attrs: Attrs) -> Any:
    name = attrs["op"].removeprefix("relax.")
    dtype = attrs["dtype"]
    return g.aten(f"{name}.default", args[0], dtype=None if dtype in (None, "", "void") else dtype)


@relax("relax.full_like")
def _relax_full_like(g: Builder, args: Any, attrs: Attrs) -> Any:
    dtype = attrs["dtype"]
    return g.aten("full_like.default", *args, dtype=None if dtype in (None, "", "void") else dtype)
