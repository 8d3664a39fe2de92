"""Casts between dtypes, dequantization of weights, copies, and gradient stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.elementwise.pointwise import pointwise_rule
from distir_relax.ops.table import (
    FREE,
    NO_GRADIENT,
    Attrs,
    Builder,
    Code,
    Condition,
    Element,
    OnnxOperands,
    Semantics,
    Split,
    Trait,
    aten,
    cast,
    compared,
    define,
    dtype_name,
    gradient_of,
    is_number,
    onnx,
    operands,
    pointwise_sizes,
    relax_as_aten,
    same_type,
)
from distir_relax.ops.table.onnx_quantization import align_scale, round_to

LINEAR = "linear"
"""The attribute of a cast to more bits that counts as linear: sums of its operand may be sums of its result."""


def _cast_sizes(operands: Sequence[Any], attrs: Attrs) -> Any:
    return pointwise_sizes(bool)(operands, attrs) if attrs["dtype"] == "bool" else operands[0]


def _cast_element(elements: Sequence[Element], shapes: Any, attrs: Attrs, shape: Sequence[int]) -> Element | None:
    (x,) = elements
    if attrs["dtype"] == "bool":
        return compared(x, "!=", 0, shape) if is_number(x) else x
    return None if isinstance(x, Condition) else int(x) if isinstance(x, bool) else x


define(
    "astype",
    Semantics(
        infer=lambda types, attrs: (TensorType(types[0].shape, attrs["dtype"]),),
        torch="{0}.to(torch.{dtype!s})",
        sizes=_cast_sizes,
        element=_cast_element,
        linear=lambda count, attrs: (operands(0),) if attrs.get(LINEAR) else (),
    ),
    Split(pointwise_rule),
    code=Code(relax="R.astype({0}, {dtype})"),
    gradient=gradient_of(lambda b: cast(b.g, b.grad, b.x().tensor.dtype)),
    traits={Trait.POINTWISE},
)

define(
    "stop_gradient",
    Semantics(infer=same_type, torch="{0}", linear=(operands(0),)),
    Split("... -> ..."),
    cost=FREE,
    code=Code(relax="{0}"),
    gradient=NO_GRADIENT,
    traits={Trait.POINTWISE, Trait.TRIVIAL, Trait.VIEW},
)


# ATen spellings


@aten("to.device")
def _to_device(g: Builder, x: Value, device: Any, dtype: Any, *options: Any, **more: Any) -> Any:
    return _to(g, x, dtype)


@aten("to.dtype", "to.dtype_layout", "_to_copy.default", "type_as.default", "to.other")
def _to(g: Builder, x: Value, dtype: Any = None, *options: Any, **more: Any) -> Any:
    if isinstance(dtype, Value):
        return cast(g, x, dtype.tensor.dtype)
    return x if dtype is None else cast(g, x, dtype_name(dtype))


@aten(
    "alias.default",
    "clone.default",
    "contiguous.default",
    "lift_fresh_copy.default",
    "positive.default",
    "resolve_conj.default",
    "resolve_neg.default",
)
def _identity(g: Builder, x: Value, *options: Any, **more: Any) -> Any:
    return x


@aten("detach.default", "detach_.default")
def _detach(g: Builder, x: Value) -> Any:
    return g.emit("stop_gradient", x) if "float" in x.tensor.dtype else x


# Relax spellings

relax_as_aten("relax.astype", "to.dtype", "dtype")


# ONNX spellings


@onnx("Cast", "CastLike")
def _onnx_cast(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return cast(g, x[0], attrs["to"] if "to" in attrs else x[1].tensor.dtype)


@onnx("DequantizeLinear")
def _dequantize(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    scale, *zero = (align_scale(g, x[0], x[i], attrs) for i in (1, 2) if x.has(i))
    kind = x[1].tensor.dtype
    y = cast(g, x[0], kind)
    y = g.emit("subtract", y, cast(g, zero[0], kind)) if zero else y
    return g.emit("multiply", y, scale)


@onnx("QuantizeLinear")
def _quantize(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    dtype = x.dtype(2) if x.has(2) else attrs.get("output_dtype") or "uint8"
    sides = [align_scale(g, x[0], x[i], attrs) for i in (1, 2) if x.has(i)]
    quotient = g.emit("divide", cast(g, x[0], "float32"), cast(g, sides[0], "float32"))
    return round_to(g, quotient, sides[1] if len(sides) > 1 else None, dtype)


@onnx("Identity")
def _onnx_identity(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return x[0]
