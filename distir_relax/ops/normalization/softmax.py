"""Softmax and log-softmax; if their dim is split, devices exchange the maximum and the sum of each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.reduction.reduction_axes import axes_of, cast_for_reduction, infer_along_axis
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Expansion,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    axis_in,
    define,
    flops_per_result,
    gradient_of,
    lookup,
    names_with,
    onnx,
    parse_rule,
    relax,
    reshape_to,
)


def _softmax_gradient(b: Backward) -> Value:
    mean = b.emit("sum", b.emit("multiply", b.grad, b.y()), axis=(b.attrs["axis"],), keepdims=True)
    grad: Value = b.emit("multiply", b.y(), b.emit("subtract", b.grad, mean))
    return grad


def _log_softmax_gradient(b: Backward) -> Value:
    total = b.emit("sum", b.grad, axis=(b.attrs["axis"],), keepdims=True)
    grad: Value = b.emit("subtract", b.grad, b.emit("multiply", b.emit("exp", b.y()), total))
    return grad


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = names_with(len(types[0].shape), attrs["axis"], "axis")
    return parse_rule(f"{names} -> {names}", [types[0].shape], [results[0].shape])


def _split_softmax(is_log: bool) -> Callable[[Expansion], tuple[Value, ...]]:
    def expand(x: Expansion) -> tuple[Value, ...]:
        """Narrow floats are computed in float32, as by torch."""
        (value,), axis, dtype = x.operands, x.attrs["axis"], x.types[0].dtype
        if dtype in ("float16", "bfloat16"):
            value = x.emit("astype", value, dtype="float32")
        of_rows: dict[str, Any] = {"axis": (axis,), "keepdims": True}
        (largest,) = lookup("max").split.expand["*"](replace(x, operands=(value,), attrs=of_rows))
        shifted = x.emit("subtract", value, x.reduced(largest, "max"))
        powers = x.emit("exp", shifted)
        total = x.reduced(x.emit("sum", powers, **of_rows), "sum")
        y = x.emit("subtract", shifted, x.emit("log", total)) if is_log else x.emit("divide", powers, total)
        return (y if y.placed.dtype == dtype else x.emit("astype", y, dtype=dtype),)

    return expand


for _name, _gradient in (("softmax", _softmax_gradient), ("log_softmax", _log_softmax_gradient)):
    define(
        f"nn.{_name}",
        Semantics(infer=infer_along_axis, torch=f"F.{_name}({{0}}, {{axis}})"),
        Split(
            _rule,
            expand={"axis": _split_softmax(_name == "log_softmax")},
            exact=frozenset({"axis"}),
        ),
        cost=Cost(flops=flops_per_result(12.0)),
        code=Code(relax=f"R.nn.{_name}({{0}}, {{axis}})"),
        gradient=gradient_of(_gradient),
    )


# ATen spellings


@aten("softmax.int", "_softmax.default")
def _softmax(g: Builder, x: Value, dim: int, dtype: Any = None) -> Any:
    return g.emit("nn.softmax", cast_for_reduction(g, x, dtype or None), axis=axis_in(x, dim))


@aten("log_softmax.int", "_log_softmax.default")
def _log_softmax(g: Builder, x: Value, dim: int, dtype: Any = None) -> Any:
    return g.emit("nn.log_softmax", cast_for_reduction(g, x, dtype or None), axis=axis_in(x, dim))


# Relax spellings


def _relax_along_axis(name: str) -> None:
    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        return g.emit(name, args[0], axis=axes_of(args[0], attrs["axis"])[0])

    relax(f"relax.{name}")(convert)


for _name in ("nn.softmax", "nn.log_softmax"):
    _relax_along_axis(_name)


# ONNX spellings


def _onnx_softmax(op_type: str, name: str) -> None:
    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        if attrs["opset"] >= 13:
            return g.emit(name, x[0], axis=axes_of(x[0], attrs.get("axis", -1))[0])
        # Before opset 13, all dims from the axis on are flattened.
        shape = x[0].tensor.shape
        axis = attrs.get("axis", 1) % len(shape)
        flat = reshape_to(g, x[0], (*shape[:axis], math.prod(shape[axis:])))
        return reshape_to(g, g.emit(name, flat, axis=axis), shape)

    onnx(op_type)(convert)


_onnx_softmax("Softmax", "nn.softmax")
_onnx_softmax("LogSoftmax", "nn.log_softmax")
