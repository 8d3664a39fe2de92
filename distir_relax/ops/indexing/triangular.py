"""Triangular parts of matrices, with zeros elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Builder,
    Code,
    Element,
    ElementOf,
    OnnxOperands,
    Semantics,
    Split,
    Types,
    all_of,
    aten,
    compared,
    define,
    gradient_of,
    index_of,
    is_number,
    onnx,
    operands,
    relax,
)


def _infer_triangle(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if len(types[0].shape) < 2:
        raise ValueError("expected a tensor of at least 2 dims")
    return (types[0],)


def _element(is_lower: bool) -> ElementOf:
    def element(elements: Sequence[Element], shapes: Any, attrs: Attrs, shape: Sequence[int]) -> Element | None:
        if is_number(elements[0]):
            return None
        row, column = index_of(len(shape) - 2) + attrs["k"], index_of(len(shape) - 1)
        is_kept = compared(column, "<=", row, shape) if is_lower else compared(row, "<=", column, shape)
        return all_of([elements[0], is_kept])

    return element


for _name in ("tril", "triu"):
    define(
        _name,
        Semantics(
            infer=_infer_triangle,
            torch=f"torch.{_name}({{0}}, {{k}})",
            linear=(operands(0),),
            element=_element(is_lower=_name == "tril"),
        ),
        Split("... [rows] [columns] -> ... [rows] [columns]"),
        cost=FREE,
        code=Code(relax=f"R.{_name}({{0}}, {{k}})"),
        gradient=gradient_of(lambda b: b.emit(b.op.name, b.grad, k=b.attrs["k"])),
    )


# ATen spellings


def _aten_triangle(name: str) -> None:
    @aten(f"{name}.default")
    def convert(g: Builder, x: Value, diagonal: int = 0) -> Any:
        return g.emit(name, x, k=diagonal)


for _name in ("tril", "triu"):
    _aten_triangle(_name)


# Relax spellings


@relax("relax.tril", "relax.triu")
def _relax_triangle(g: Builder, args: Any, attrs: Attrs) -> Any:
    name = attrs["op"].removeprefix("relax.")
    return g.aten(f"{name}.default", args[0], args[1] if len(args) > 1 else attrs["k"])


# ONNX spellings


@onnx("Trilu")
def _onnx_trilu(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return g.emit("triu" if attrs.get("upper", 1) else "tril", x[0], k=x.number(1, 0))
