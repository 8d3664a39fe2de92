"""Comparisons, logical and bitwise ops, and selection by masks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.layout import are_equal
from distir_relax.ops.elementwise.pointwise import (
    aten_binary,
    aten_unary,
    define_binary,
    define_unary,
    infer_common,
    onnx_pointwise,
    pointwise_rule,
    same_dtype,
)
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Element,
    ElementOf,
    OnnxOperands,
    Semantics,
    Split,
    Trait,
    Types,
    all_of,
    any_of,
    aten,
    broadcast_shape,
    compared,
    define,
    gradient_of,
    is_number,
    like,
    negated,
    onnx,
    operands,
    pointwise_sizes,
    promote,
)


def _infer_bool(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    same_dtype(types)
    return (TensorType(broadcast_shape(types), "bool"),)


def _infer_integers(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if "int" not in same_dtype(types):
        raise ValueError(f"expected integers, found {types[0].dtype}")
    return infer_common(types, attrs)


def _infer_where(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(broadcast_shape(types), same_dtype(types[1:])),)


def _comparison(symbol: str) -> ElementOf:
    def element(elements: Sequence[Element], shapes: Any, attrs: Attrs, shape: Sequence[int]) -> Element | None:
        first, second = elements
        return compared(first, symbol, second, shape) if is_number(first) and is_number(second) else None

    return element


def _chosen(elements: Sequence[Element], shapes: Any, attrs: Attrs, shape: Any) -> Element | None:
    condition, a, b = elements
    if isinstance(condition, bool) or a == b:
        return a if condition or a == b else b
    if is_number(a) or is_number(b):
        return None
    return any_of([all_of([condition, a]), all_of([negated(condition), b])])


for _name, _element in (
    ("and", lambda elements, *_: all_of(elements)),
    ("or", lambda elements, *_: any_of(elements)),
    ("xor", None),
):
    define_binary(f"logical_{_name}", f"torch.logical_{_name}({{0}}, {{1}})", element=_element)
define_unary("logical_not", "torch.logical_not({0})", element=lambda elements, *_: negated(elements[0]))

for _name, _symbol, _compare in (
    ("equal", "==", are_equal),
    ("not_equal", "!=", lambda a, b: not are_equal(a, b)),
    ("less", "<", operator.lt),
    ("less_equal", "<=", operator.le),
    ("greater", ">", operator.gt),
    ("greater_equal", ">=", operator.ge),
):
    define_binary(_name, f"{{0}} {_symbol} {{1}}", infer=_infer_bool, sizes=_compare, element=_comparison(_symbol))

for _name in ("isnan", "isinf", "isfinite"):
    define_unary(_name, f"torch.{_name}({{0}})", infer=_infer_bool)

for _name, _symbol in (
    ("bitwise_and", "&"),
    ("bitwise_or", "|"),
    ("bitwise_xor", "^"),
    ("left_shift", "<<"),
    ("right_shift", ">>"),
):
    define_binary(_name, f"{{0}} {_symbol} {{1}}", infer=_infer_integers, numbers=False)
define_unary("bitwise_not", "~{0}", infer=_infer_integers)

define(
    "where",
    Semantics(
        infer=_infer_where,
        torch="torch.where({0}, {1}, {2})",
        linear=(operands(1, 2),),
        sizes=pointwise_sizes(lambda condition, a, b: a if condition else b),
        element=_chosen,
    ),
    Split(pointwise_rule),
    code=Code(numbers=operands(1, 2)),
    gradient=gradient_of(None, "where(0, g, 0.0)", "where(0, 0.0, g)"),
    traits={Trait.POINTWISE},
)


# ATen spellings

for _name, _aten in (
    *(("equal", "eq"), ("not_equal", "ne"), ("less", "lt"), ("less_equal", "le")),
    *(("greater", "gt"), ("greater_equal", "ge")),
):
    aten_binary(_name, f"{_aten}.Tensor", f"{_aten}.Scalar")
    if _name != "equal":
        aten_binary(_name, f"{_name}.Tensor", f"{_name}.Scalar")
for _name in ("isnan", "isinf", "isfinite"):
    aten_unary(_name, f"{_name}.default")


def _logical(name: str, *spellings: str) -> None:
    def convert(g: Builder, *items: Any) -> Any:
        return g.emit(name, *[_truth(g, item) for item in items])

    aten(*spellings)(convert)


def _truth(g: Builder, item: Any) -> Any:
    if not isinstance(item, Value):
        return g.constant(bool(item), "bool")
    return item if item.tensor.dtype == "bool" else g.emit("not_equal", item, g.constant(0, item.tensor.dtype))


for _name in ("and", "or", "xor", "not"):
    _logical(f"logical_{_name}", f"logical_{_name}.default")


def _bitwise(name: str, *spellings: str) -> None:
    """Register bitwise ops, which are the logical ops on booleans."""

    def convert(g: Builder, *items: Any) -> Any:
        values = promote(g, *items)
        kind = "logical" if values[0].tensor.dtype == "bool" else "bitwise"
        return g.emit(f"{kind}_{name}", *values)

    aten(*spellings)(convert)


for _name in ("and", "or", "xor"):
    _bitwise(_name, f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", f"__{_name}__.Tensor", f"__{_name}__.Scalar")
_bitwise("not", "bitwise_not.default")
for _side in ("left", "right"):
    aten_binary(
        f"{_side}_shift",
        *(f"bitwise_{_side}_shift.Tensor", f"bitwise_{_side}_shift.Tensor_Scalar"),
        *(f"__{_side[0]}shift__.Tensor", f"__{_side[0]}shift__.Scalar"),
    )


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(g: Builder, condition: Value, a: Any, b: Any) -> Any:
    values = [a, b]
    if not any(isinstance(v, Value) for v in values):
        values = [
            g.constant(v, g.default_dtype if any(isinstance(v, float) for v in values) else "int64") for v in values
        ]
    return g.emit("where", condition, *promote(g, *values))


@aten("masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor")
def _masked_fill(g: Builder, x: Value, mask: Value, value: Any) -> Any:
    return g.emit("where", mask, like(g, x, value), x)


# ONNX spellings

for _onnx, _name in {
    **{"Not": "logical_not", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "IsNaN": "isnan"},
    **{n.title(): n for n in ("equal", "less", "greater", "where")},
    **{"LessOrEqual": "less_equal", "GreaterOrEqual": "greater_equal"},
    **{f"Bitwise{n.title()}": f"bitwise_{n}" for n in ("and", "or", "xor", "not")},
}.items():
    onnx_pointwise(_onnx, _name)


@onnx("IsInf")
def _onnx_isinf(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    if attrs.get("detect_negative", 1) and attrs.get("detect_positive", 1):
        return g.emit("isinf", x[0])
    name = "less" if attrs.get("detect_negative", 1) else "greater"
    return g.emit("logical_and", g.emit("isinf", x[0]), g.emit(name, x[0], g.constant(0, x[0].tensor.dtype)))


@onnx("BitShift")
def _onnx_shift(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return g.emit(f"{attrs['direction'].lower()}_shift", *x.pointwise())
