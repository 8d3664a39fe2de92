"""Relax ops that mean what the op table says, where TVM's own refuse a dtype, or round otherwise than torch does.

=========================  =====================================================================================
op                         TVM's own
=========================  =====================================================================================
`power`                    refuses integers
`floor_divide`             rounds ``floor(a / b)``: 10 for ``1.0 // 0.1``, where the exact quotient is below 10
`floor_mod`                is ``a - b * floor(a / b)``, with that error; by zero it refuses or ends the process
`divide`                   refuses a zero that is known when it compiles
`equal`, `not_equal`       refuse truth values; NaN does not differ from NaN
`layer_norm`, `rms_norm`   refuse float64 and bfloat16, or compute them in float32
products, sums, softmax    add up float16 and bfloat16 as they are; torch does so in float32
products, sums             write nothing where there is nothing to add up
`permute_dims`             of nothing has, in a later pass, another shape
`log1p`                    is missing
=========================  =====================================================================================

They are compositions of Relax ops, so that every pipeline of TVM's can compile them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

NARROW = ("float16", "bfloat16")

SUMMED = ("matmul", "sum")
"""Ops that are zero where an operand has no elements."""

WIDENED = ("mean", "prod", "cumsum", "variance", "std", "nn.softmax", "nn.log_softmax",
           "nn.group_norm", "nn.batch_norm", *(f"nn.conv{n}d{t}" for n in (1, 2, 3) for t in ("", "_transpose")),
           *(f"nn.{kind}avg_pool{n}d" for n in (1, 2, 3) for kind in ("", "adaptive_")))  # fmt: skip
"""Ops that sum many numbers: those of narrow floats are summed in float32."""


def exact_ops(ops: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Of TVM's `ops` by name, those to be replaced, with what takes their place."""
    return {
        **{name: _in_float32(ops[name]) for name in WIDENED if name in ops},
        **{name: _zero_of_nothing(_in_float32(ops[name])) for name in SUMMED},
        "permute_dims": _zero_of_nothing(ops["permute_dims"]),
        "power": power,
        "log1p": log1p,
        "floor_divide": floor_divide,
        "floor_mod": floor_mod,
        "divide": divide,
        "equal": equal,
        "not_equal": not_equal,
        "nn.layer_norm": layer_norm,
        "nn.rms_norm": rms_norm,
    }


def divide(a: Any, b: Any) -> Any:
    """``a / b``; by zero it is an infinity, or NaN."""
    op, number = _op(), _known(b)
    if number == 0:
        return op.multiply(a, _number(math.copysign(math.inf, number), a))
    return op.divide(a, b)


def equal(a: Any, b: Any) -> Any:
    """``a == b``."""
    op = _op()
    return op.logical_not(_emit(not_equal(a, b))) if _dtype(a) == "bool" else op.equal(a, b)


def not_equal(a: Any, b: Any) -> Any:
    """``a != b``; NaN differs from everything."""
    op = _op()
    if _dtype(a) == "bool":
        return op.logical_xor(a, b)
    return op.logical_not(_emit(op.equal(a, b))) if _is_float(a) else op.not_equal(a, b)


def floor_divide(a: Any, b: Any) -> Any:
    """The quotient rounded downwards, as torch rounds it; integers by zero are 0, as in NumPy."""
    op = _op()
    if not _is_float(a):
        if _known(b):
            return op.floor_divide(a, b)
        zero = _emit(op.equal(b, _number(0, b)))
        return op.where(zero, _number(0, a), _emit(op.floor_divide(a, _emit(op.where(zero, _number(1, b), b)))))
    rest, differs = _remainder(a, b)
    whole = _emit(op.divide(_emit(op.subtract(a, rest)), _or_nan(b)))
    whole = _emit(op.where(differs, _emit(op.subtract(whole, _number(1, a))), whole))
    floor = _emit(op.floor(whole))
    above = _emit(op.greater(_emit(op.subtract(whole, floor)), _number(0.5, a)))
    floor = _emit(op.where(above, _emit(op.add(floor, _number(1, a))), floor))
    # What is between two numbers of one sign is a zero of that sign; by zero there is no rest.
    quotient = _emit(divide(a, b))
    small = _emit(op.multiply(quotient, _number(0, a)))
    floor = _emit(op.where(_emit(op.equal(whole, _number(0, a))), small, floor))
    return op.where(_emit(op.equal(b, _number(0, b))), quotient, floor)


def floor_mod(a: Any, b: Any) -> Any:
    """The remainder with the sign of the divisor, as torch has it; integers by zero are 0, as in NumPy."""
    op = _op()
    if not _is_float(a):
        if _known(b):
            return op.floor_mod(a, b)
        zero = _emit(op.equal(b, _number(0, b)))
        return op.where(zero, _number(0, a), _emit(op.floor_mod(a, _emit(op.where(zero, _number(1, b), b)))))
    rest, differs = _remainder(a, b)
    return op.where(differs, _emit(op.add(rest, b)), rest)


def power(a: Any, b: Any) -> Any:
    """``a ** b``; integers by squaring, and wrapping around, as torch has them."""
    op = _op()
    if _is_float(a):
        return op.power(a, b)
    number = _known(b)
    bits = int(number).bit_length() if number is not None and number >= 0 else _bits(a) - 1
    result, square = _emit(op.ones_like(a)), a
    for bit in range(bits):
        if number is None or number < 0:
            odd = op.bitwise_and(_emit(op.right_shift(b, _number(bit, b))), _number(1, b))
            chosen = _emit(op.where(_emit(op.equal(_emit(odd), _number(1, b))), square, _number(1, a)))
        else:
            chosen = square if int(number) >> bit & 1 else None
        result = result if chosen is None else _emit(op.multiply(result, chosen))
        square = _emit(op.multiply(square, square)) if bit + 1 < bits else square
    if number is not None and number >= 0:
        return result
    # One over a whole number is whole for 1 and -1 alone; their powers are those of the exponent's bits.
    unit = _emit(op.equal(_emit(op.abs(a)), _number(1, a)))
    none = _emit(op.logical_and(_emit(op.less(b, _number(0, b))), _emit(op.logical_not(unit))))
    return op.where(none, _number(0, a), result)


def log1p(x: Any) -> Any:
    """``log(1 + x)``; what the sum loses of a small `x` is made good by a factor (Kahan; HP-15C handbook, 1982)."""
    op = _op()
    x, one = _emitted((x,))[0], _number(1, x)
    whole = _emit(op.add(x, one))
    factor = _emit(op.divide(x, _emit(op.subtract(whole, one))))
    log = _emit(op.log(whole))
    lost = _emit(op.where(_emit(op.equal(whole, one)), x, _emit(op.multiply(log, factor))))
    return op.where(_emit(op.greater(whole, _number(_EXACT, x))), log, lost)


_EXACT = 1e3
"""A number from which on one more is not lost in a logarithm; a factor of infinities would be NaN."""


def layer_norm(x: Any, gamma: Any, beta: Any, axes: Any, epsilon: float) -> Any:
    """As `relax.op.nn.layer_norm`, for every float dtype."""
    op = _op()
    if _dtype(x) != "float64":
        return _in_float32(op.nn.layer_norm)(x, gamma, beta, axes, epsilon)
    centered = _emit(op.subtract(x, _emit(op.mean(x, axes, keepdims=True))))
    return op.add(_emit(op.multiply(_normal(centered, axes, epsilon), gamma)), beta)


def rms_norm(x: Any, weight: Any, axes: Any, epsilon: float) -> Any:
    """As `relax.op.nn.rms_norm`, for every float dtype."""
    op = _op()
    if _dtype(x) != "float64":
        return _in_float32(op.nn.rms_norm)(x, weight, axes, epsilon)
    return op.multiply(_normal(x, axes, epsilon), weight)


def _normal(x: Any, axes: Any, epsilon: float) -> Any:
    op = _op()
    spread = _emit(op.mean(_emit(op.multiply(x, x)), axes, keepdims=True))
    return _emit(op.divide(x, _emit(op.sqrt(_emit(op.add(spread, _number(epsilon, x)))))))


def _remainder(a: Any, b: Any) -> tuple[Any, Any]:
    """``fmod(a, b)``, and whether it has another sign than `b`."""
    op = _op()
    rest = _emit(op.mod(a, _or_nan(b)))
    zero = _number(0, a)
    signs = _emit(op.logical_xor(_emit(op.less(b, _number(0, b))), _emit(op.less(rest, zero))))
    return rest, _emit(op.logical_and(_emit(not_equal(rest, zero)), signs))


def _or_nan(b: Any) -> Any:
    """`b`, or NaN where it is zero: TVM refuses a zero that it comes to know."""
    op, number = _op(), _known(b)
    if number is not None:
        return _number(number or math.nan, b)
    return _emit(op.where(_emit(op.equal(b, _number(0, b))), _number(math.nan, b), b))


def _zero_of_nothing(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, which gives zeros where it has no elements to make its result of."""

    def zero(*args: Any, **kwargs: Any) -> Any:
        from tvm import relax

        args = _emitted(args)
        call = op(*args, **kwargs)
        if not any(0 in getattr(getattr(x, "ty", None), "shape", ()) for x in args):
            return call
        kind = relax.BlockBuilder.current().normalize(call).ty
        return _op().zeros(kind.shape, str(kind.dtype))

    return zero


def _in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` with operands of narrow floats made float32, and its results made narrow again."""

    def wide(*args: Any, **kwargs: Any) -> Any:
        args = _emitted(args)
        found = [_dtype(x) for x in args if _dtype(x) in NARROW]
        if not found:
            return op(*args, **kwargs)
        cast = _op().astype
        result = _emit(op(*(_emit(cast(x, "float32")) if _dtype(x) in NARROW else x for x in args), **kwargs))
        fields = getattr(result.ty, "fields", None)
        if fields is None:
            return cast(result, found[0])
        return tuple(cast(_emit(_item(result, i)), found[0]) for i in range(len(fields)))

    return wide


def _item(whole: Any, index: int) -> Any:
    from tvm import relax

    return relax.TupleGetItem(whole, index)


def _op() -> Any:
    from tvm import relax

    return relax.op


def _emit(call: Any) -> Any:
    """A variable of the function being built that stands for `call`, and has a type."""
    from tvm import relax

    return relax.BlockBuilder.current().emit(call)


def _emitted(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose types are known: calls among them are bound to variables."""
    from tvm import relax

    return tuple(_emit(x) if isinstance(x, relax.Call) else x for x in args)


def _number(value: float, like: Any) -> Any:
    from tvm import relax

    return relax.const(value, _dtype(like))


def _known(x: Any) -> float | None:
    """The number that a variable stands for, where it is a constant without dims."""
    from tvm import relax
    from tvm.ir import GenericConst

    if isinstance(x, relax.Var):
        x = relax.BlockBuilder.current().lookup_binding(x)
    return x.value.numpy().item() if isinstance(x, GenericConst) and not x.value.shape else None


def _dtype(x: Any) -> str:
    return str(getattr(getattr(x, "ty", None), "dtype", ""))


def _is_float(x: Any) -> bool:
    return "float" in _dtype(x)


def _bits(x: Any) -> int:
    return int(_dtype(x).lstrip("uint"))
