"""Bitwise ops on integers; on booleans they are the logical ops."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.elementwise.pointwise import pointwise_rule, same_dtype
from distir_relax.ops.table import (
    Attrs,
    Builder,
    OnnxOperands,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    broadcast_shape,
    define,
    onnx,
    promote,
)


def _infer_integers(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dtype = same_dtype(types)
    if "int" not in dtype:
        raise ValueError(f"expected integers, found {dtype}")
    return (TensorType(broadcast_shape(types), dtype),)


for _name, _symbol in (
    ("bitwise_and", "&"),
    ("bitwise_or", "|"),
    ("bitwise_xor", "^"),
    ("left_shift", "<<"),
    ("right_shift", ">>"),
):
    define(
        _name,
        Semantics(infer=_infer_integers, torch=f"{{0}} {_symbol} {{1}}"),
        Split(pointwise_rule),
        traits={Trait.POINTWISE},
    )

define(
    "bitwise_not",
    Semantics(infer=_infer_integers, torch="~{0}"),
    Split(pointwise_rule),
    traits={Trait.POINTWISE},
)


def _bitwise(name: str, *spellings: str) -> None:
    def convert(g: Builder, *items: Any) -> Any:
        values = promote(g, *items)
        kind = "logical" if values[0].tensor.dtype == "bool" else "bitwise"
        return g.emit(f"{kind}_{name}", *values)

    aten(*spellings)(convert)


def _shift(name: str, *spellings: str) -> None:
    def convert(g: Builder, *items: Any) -> Any:
        return g.emit(name, *promote(g, *items))

    aten(*spellings)(convert)


# ATen spellings

for _name in ("and", "or", "xor"):
    _bitwise(_name, f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", f"__{_name}__.Tensor", f"__{_name}__.Scalar")
_bitwise("not", "bitwise_not.default")
_shift("left_shift", *(f"{name}.Tensor" for name in ("bitwise_left_shift", "__lshift__")))
_shift("left_shift", "bitwise_left_shift.Tensor_Scalar", "__lshift__.Scalar")
_shift("right_shift", *(f"{name}.Tensor" for name in ("bitwise_right_shift", "__rshift__")))
_shift("right_shift", "bitwise_right_shift.Tensor_Scalar", "__rshift__.Scalar")


# ONNX spellings


def _onnx_bitwise(op_type: str, name: str) -> None:
    def convert(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
        return g.emit(name, *x.pointwise())

    onnx(op_type)(convert)


for _onnx, _name in (("And", "and"), ("Or", "or"), ("Xor", "xor"), ("Not", "not")):
    _onnx_bitwise(f"Bitwise{_onnx}", f"bitwise_{_name}")


@onnx("BitShift")
def _onnx_shift(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return g.emit(f"{attrs['direction'].lower()}_shift", *x.pointwise())
