"""Element by element: arithmetic, activations, comparisons, casts. Operands broadcast."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import DTYPES, TensorType
from distir_relax.ops.registry import Attrs, Types, aten, define, onnx_spelling, operands, relax_spelling
from distir_relax.ops.rule import Rule, parse_rule


def broadcast(types: Types) -> tuple[int, ...]:
    """The shape that all operands broadcast to; raises ValueError when there is none."""
    rank = max(len(t.shape) for t in types)
    shape = []
    for i in range(rank):
        sizes = {t.shape[i - rank + len(t.shape)] for t in types if i - rank + len(t.shape) >= 0} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {[t.shape for t in types]} do not broadcast")
        shape.append(sizes.pop() if sizes else 1)
    return tuple(shape)


def _same_dtype(types: Types) -> str:
    if len({t.dtype for t in types}) != 1:
        raise ValueError(f"operands have dtypes {[t.dtype for t in types]}, expected one")
    return types[0].dtype


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(broadcast(types), _same_dtype(types)),)


def _infer_bool(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _same_dtype(types)
    return (TensorType(broadcast(types), "bool"),)


def _infer_where(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(broadcast(types), _same_dtype(types[1:])),)


def _infer_astype(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(types[0].shape, attrs["dtype"]),)


def pointwise_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """The rule of ops whose result has each element from the elements at its place."""
    return parse_rule(", ".join(["..."] * len(types)) + " -> ...", [t.shape for t in types], [results[0].shape])


def _unary(name: str, torch: str, relax: str = "", *, linear: bool = False, **fields: Any) -> None:
    sets = (operands(0),) if linear else ()
    define(name, infer=_infer, rule=pointwise_rule, torch=torch, relax=relax, linear=sets, pointwise=True, **fields)


def _binary(name: str, torch: str, *linear: frozenset[int], relax: str = "", commutative: bool = False) -> None:
    numbers = operands() if torch.startswith("torch.") else operands(0, 1)
    define(
        name,
        infer=_infer,
        rule=pointwise_rule,
        torch=torch,
        relax=relax,
        linear=linear,
        numbers=numbers,
        pointwise=True,
        commutative=commutative,
    )


_binary("add", "{0} + {1}", operands(0, 1), commutative=True)
_binary("subtract", "{0} - {1}", operands(0, 1))
_binary("multiply", "{0} * {1}", operands(0), operands(1), commutative=True)
_binary("divide", "{0} / {1}", operands(0))
_binary("floor_divide", "{0} // {1}")
_binary("mod", "{0} % {1}", relax="R.floor_mod({0}, {1})")
_binary("power", "{0} ** {1}")
_binary("maximum", "torch.maximum({0}, {1})")
_binary("minimum", "torch.minimum({0}, {1})")
_binary("logical_and", "torch.logical_and({0}, {1})")
_binary("logical_or", "torch.logical_or({0}, {1})")
_binary("logical_xor", "torch.logical_xor({0}, {1})")

_unary("negative", "-{0}", linear=True)
_unary("exp", "torch.exp({0})", flops=lambda types, attrs, results: 8.0 * results[0].elements)
_unary("log", "torch.log({0})", flops=lambda types, attrs, results: 8.0 * results[0].elements)
_unary("sqrt", "torch.sqrt({0})")
_unary("rsqrt", "torch.rsqrt({0})")
_unary("abs", "torch.abs({0})")
_unary("square", "torch.square({0})")
_unary("tanh", "torch.tanh({0})", flops=lambda types, attrs, results: 8.0 * results[0].elements)
_unary("sigmoid", "torch.sigmoid({0})", flops=lambda types, attrs, results: 8.0 * results[0].elements)
_unary("erf", "torch.erf({0})", flops=lambda types, attrs, results: 8.0 * results[0].elements)
_unary("sin", "torch.sin({0})")
_unary("cos", "torch.cos({0})")
_unary("floor", "torch.floor({0})")
_unary("ceil", "torch.ceil({0})")
_unary("sign", "torch.sign({0})")
_unary("round", "torch.round({0})")
_unary("trunc", "torch.trunc({0})")
_unary("tan", "torch.tan({0})")
_unary("atan", "torch.atan({0})")
_unary("logical_not", "torch.logical_not({0})")
_unary("nn.relu", "F.relu({0})")
_unary("nn.gelu", "F.gelu({0})", flops=lambda types, attrs, results: 12.0 * results[0].elements)
_unary(
    "nn.gelu_tanh",
    'F.gelu({0}, approximate="tanh")',
    flops=lambda types, attrs, results: 12.0 * results[0].elements,
    # As models spell it out: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
    pattern="multiply(multiply(0, 0.5), add(tanh(multiply("
    "add(0, multiply(power(0, 3.0), 0.044715)), 0.7978845608028654)), 1.0))",
)
_unary("nn.silu", "F.silu({0})", flops=lambda types, attrs, results: 10.0 * results[0].elements)
_unary("clip", "torch.clamp({0}, {min}, {max})", "R.clip({0}, {min}, {max})")
define(
    "astype",
    infer=_infer_astype,
    rule=pointwise_rule,
    torch="{0}.to(torch.{dtype!s})",
    relax="R.astype({0}, {dtype})",
    pointwise=True,
)

for _name, _symbol in (
    ("equal", "=="),
    ("not_equal", "!="),
    ("less", "<"),
    ("less_equal", "<="),
    ("greater", ">"),
    ("greater_equal", ">="),
):
    define(
        _name,
        infer=_infer_bool,
        rule=pointwise_rule,
        torch=f"{{0}} {_symbol} {{1}}",
        numbers=operands(0, 1),
        pointwise=True,
    )

for _name in ("isnan", "isinf", "isfinite"):
    define(_name, infer=_infer_bool, rule=pointwise_rule, torch=f"torch.{_name}({{0}})", pointwise=True)

define(
    "where",
    infer=_infer_where,
    rule=pointwise_rule,
    torch="torch.where({0}, {1}, {2})",
    linear=(operands(1, 2),),
    numbers=operands(1, 2),
    pointwise=True,
)


def _infer_constant(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType((), attrs["dtype"]),)


define(
    "constant",
    infer=_infer_constant,
    rule=lambda types, attrs, results: Rule((), (), ((),)),
    torch="torch.tensor({value}, dtype=torch.{dtype!s})",
    relax="R.const({value}, {dtype})",
    pointwise=True,
    role="scalar",
    flops=lambda types, attrs, results: 0.0,
)

_PROMOTION = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def promote(g: Any, *items: Any, floating: bool = False) -> list[Any]:
    """The items as values of one dtype, by torch's rules: a Python number never widens a tensor within its kind.

    `floating` asks for a floating dtype, as torch's true division and transcendental functions do.
    """
    tensors = [item.type.dtype for item in items if hasattr(item, "type")]
    dimensioned = [item.type.dtype for item in items if hasattr(item, "type") and item.type.shape] or tensors
    dtype = max(dimensioned, key=_PROMOTION.index)
    if {"float16", "bfloat16"} <= set(dimensioned):
        dtype = "float32"
    for other in tensors:
        if "float" in other and "float" not in dtype:
            dtype = other
    for item in items:
        if isinstance(item, float) and "float" not in dtype:
            dtype = "float32"
        elif isinstance(item, int) and not isinstance(item, bool) and dtype == "bool":
            dtype = "int64"
    if floating and "float" not in dtype:
        dtype = "float32"
    return [cast(g, item, dtype) if hasattr(item, "type") else g.constant(item, dtype) for item in items]


def cast(g: Any, value: Any, dtype: str) -> Any:
    """`value` as `dtype`; itself when it is that already."""
    return value if value.type.dtype == dtype else g.emit("astype", value, dtype=dtype)


def _aten_binary(name: str, *spellings: str, floating: bool = False) -> None:
    def convert(g: Any, a: Any, b: Any) -> Any:
        return g.emit(name, *promote(g, a, b, floating=floating))

    aten(*spellings)(convert)


def _aten_unary(name: str, *spellings: str, floating: bool = False) -> None:
    def convert(g: Any, x: Any) -> Any:
        return g.emit(name, promote(g, x, floating=True)[0] if floating else x)

    aten(*spellings)(convert)


_aten_binary("multiply", "mul.Tensor", "mul.Scalar", "mul_.Tensor", "mul_.Scalar")
_aten_binary("divide", "div.Tensor", "div.Scalar", "div_.Tensor", "div_.Scalar", "true_divide.Tensor", floating=True)
_aten_binary("power", "pow.Tensor_Tensor", "pow.Scalar")
_aten_binary("maximum", "maximum.default", "max.other")
_aten_binary("minimum", "minimum.default", "min.other")
_aten_binary("mod", "remainder.Tensor", "remainder.Scalar")
_aten_binary("floor_divide", "floor_divide.default")
for _relax, _aten in (("equal", "eq"), ("not_equal", "ne"), ("less", "lt"), ("less_equal", "le")):
    _aten_binary(_relax, f"{_aten}.Tensor", f"{_aten}.Scalar")
_aten_binary("greater", "gt.Tensor", "gt.Scalar")
_aten_binary("greater_equal", "ge.Tensor", "ge.Scalar")
for _name in ("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos"):
    _aten_unary(_name, f"{_name}.default", floating=True)
_aten_unary("negative", "neg.default")
_aten_unary("abs", "abs.default")
_aten_unary("square", "square.default")
_aten_unary("floor", "floor.default")
_aten_unary("ceil", "ceil.default")
_aten_unary("sign", "sign.default")
_aten_unary("round", "round.default")
_aten_unary("trunc", "trunc.default")
_aten_unary("tan", "tan.default", floating=True)
_aten_unary("atan", "atan.default", floating=True)
for _name in ("isnan", "isinf", "isfinite"):
    _aten_unary(_name, f"{_name}.default")
_aten_unary("nn.relu", "relu.default", "relu_.default")
_aten_unary("nn.silu", "silu.default", "silu_.default")


def _logical(name: str, *spellings: str) -> None:
    def convert(g: Any, *items: Any) -> Any:
        return g.emit(name, *[_truth(g, item) for item in items])

    aten(*spellings)(convert)


def _truth(g: Any, item: Any) -> Any:
    if not hasattr(item, "type"):
        return g.constant(bool(item), "bool")
    return item if item.type.dtype == "bool" else g.emit("not_equal", item, g.constant(0, item.type.dtype))


_logical("logical_and", "logical_and.default", "__and__.Tensor", "bitwise_and.Tensor")
_logical("logical_or", "logical_or.default", "__or__.Tensor", "bitwise_or.Tensor")
_logical("logical_xor", "logical_xor.default", "bitwise_xor.Tensor")
_logical("logical_not", "logical_not.default", "bitwise_not.default")


@aten("add.Tensor", "add.Scalar", "add_.Tensor", "add_.Scalar")
def _add(g: Any, a: Any, b: Any, alpha: float = 1) -> Any:
    return g.emit("add", *_scaled(g, a, b, alpha))


@aten("sub.Tensor", "sub.Scalar", "sub_.Tensor", "sub_.Scalar")
def _sub(g: Any, a: Any, b: Any, alpha: float = 1) -> Any:
    return g.emit("subtract", *_scaled(g, a, b, alpha))


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(g: Any, a: Any, b: Any, alpha: float = 1) -> Any:
    return g.emit("subtract", *_scaled(g, b, a, alpha))


def _scaled(g: Any, a: Any, b: Any, alpha: float) -> list[Any]:
    a, b = promote(g, a, b)
    if alpha != 1:
        b = g.emit("multiply", b, g.constant(alpha, b.type.dtype))
    return [a, b]


@aten("pow.Tensor_Scalar")
def _pow(g: Any, x: Any, exponent: float) -> Any:
    if exponent == 2:
        return g.emit("square", x)
    return g.emit("power", *promote(g, x, exponent))


@aten("gelu.default")
def _gelu(g: Any, x: Any, approximate: str = "none") -> Any:
    return g.emit("nn.gelu_tanh" if approximate == "tanh" else "nn.gelu", x)


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(g: Any, condition: Any, a: Any, b: Any) -> Any:
    values = [a, b]
    if not any(hasattr(v, "type") for v in values):
        values = [g.constant(v, "float32" if any(isinstance(v, float) for v in values) else "int64") for v in values]
    return g.emit("where", condition, *promote(g, *values))


@aten("masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor")
def _masked_fill(g: Any, x: Any, mask: Any, value: Any) -> Any:
    filler = cast(g, value, x.type.dtype) if hasattr(value, "type") else g.constant(value, x.type.dtype)
    return g.emit("where", mask, filler, x)


@aten("clamp.default", "clamp_.default")
def _clamp(g: Any, x: Any, low: float | None = None, high: float | None = None) -> Any:
    bits = 8 * DTYPES[x.type.dtype][1]
    least, most = (0, 2**bits - 1) if x.type.dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    lowest, highest = (-math.inf, math.inf) if "float" in x.type.dtype else (least, most)
    return g.emit("clip", x, min=lowest if low is None else low, max=highest if high is None else high)


@relax_spelling("relax.astype")
def _relax_astype(g: Any, args: Any, attrs: Any) -> Any:
    return cast(g, args[0], attrs["dtype"])


@relax_spelling("relax.clip")
def _relax_clip(g: Any, args: Any, attrs: Any) -> Any:
    kind = float if "float" in args[0].type.dtype else int
    return g.emit("clip", args[0], min=kind(args[1]), max=kind(args[2]))


@relax_spelling("relax.floor_mod")
def _relax_floor_mod(g: Any, args: Any, attrs: Any) -> Any:
    return g.emit("mod", *args)


@relax_spelling("relax.mod")
def _relax_mod(g: Any, args: Any, attrs: Any) -> Any:
    raise NotImplementedError("a remainder with the sign of the dividend; relax.floor_mod has that of the divisor")


# ONNX spellings


def _onnx_pointwise(op_type: str, name: str) -> None:
    def convert(g: Any, x: Any, attrs: Any) -> Any:
        return g.emit(name, *x.pointwise())

    onnx_spelling(op_type)(convert)


def _onnx_folded(op_type: str, name: str) -> None:
    """An op of any number of operands, applied to two at a time."""

    def convert(g: Any, x: Any, attrs: Any) -> Any:
        total, *rest = x.pointwise()
        for item in rest:
            total = g.emit(name, total, item)
        return total

    onnx_spelling(op_type)(convert)


for _onnx, _name in {
    **{"Sub": "subtract", "Mul": "multiply", "Neg": "negative", "Not": "logical_not", "Relu": "nn.relu"},
    **{"And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "Add": "add", "IsNaN": "isnan"},
    **{n.title(): n for n in ("exp", "log", "sqrt", "abs", "tanh", "sigmoid", "erf", "sin", "cos", "tan", "atan")},
    **{n.title(): n for n in ("floor", "ceil", "sign", "round", "equal", "less", "greater", "where")},
    **{"LessOrEqual": "less_equal", "GreaterOrEqual": "greater_equal"},
}.items():
    _onnx_pointwise(_onnx, _name)
for _onnx, _name in {"Max": "maximum", "Min": "minimum", "Sum": "add"}.items():
    _onnx_folded(_onnx, _name)


@onnx_spelling("Div")
def _onnx_div(g: Any, x: Any, attrs: Any) -> Any:
    a, b = x.pointwise()
    if "float" in a.type.dtype:
        return g.emit("divide", a, b)
    # ONNX divides integers towards zero, floor_divide downwards: they agree where both are positive.
    sign = g.emit("multiply", g.emit("sign", a), g.emit("sign", b))
    return g.emit("multiply", sign, g.emit("floor_divide", g.emit("abs", a), g.emit("abs", b)))


@onnx_spelling("Pow")
def _onnx_pow(g: Any, x: Any, attrs: Any) -> Any:
    a, b = x.pointwise()
    if x.known_numbers(1) == [2]:
        return g.emit("square", a)
    return g.emit("power", a, cast(g, b, a.type.dtype))


@onnx_spelling("Cast", "CastLike")
def _onnx_cast(g: Any, x: Any, attrs: Any) -> Any:
    return cast(g, x[0], attrs["to"] if "to" in attrs else x[1].type.dtype)


@onnx_spelling("Clip")
def _onnx_clip(g: Any, x: Any, attrs: Any) -> Any:
    return _clamp(g, x[0], x.number(1, attrs.get("min")), x.number(2, attrs.get("max")))


@onnx_spelling("Gelu")
def _onnx_gelu(g: Any, x: Any, attrs: Any) -> Any:
    return _gelu(g, x[0], attrs.get("approximate", "none"))
