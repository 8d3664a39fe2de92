"""Relax ops with the semantics of the op table, where TVM's own reject a dtype or round differently than torch.

=========================  =====================================================================================
op                         TVM's version
=========================  =====================================================================================
`power`                    rejects integers
`floor_divide`             rounds ``floor(a / b)``: 10 for ``1.0 // 0.1``, whose exact quotient is below 10
`floor_mod`                is ``a - b * floor(a / b)``, with that error; by zero it raises or ends the process
`divide`                   rejects a divisor that is zero at compile time
`equal`, `not_equal`       reject booleans; NaN does not differ from NaN
`layer_norm`, `rms_norm`   reject float64 and bfloat16, or compute them in float32
products, sums, softmax    accumulate float16 and bfloat16 in that precision; torch does so in float32
products, sums             leave the result unwritten if there are no terms
`permute_dims`             of an empty tensor gets a wrong shape in a later pass
`log1p`                    is missing
=========================  =====================================================================================

They are compositions of Relax ops, so every TVM pipeline can compile them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir_relax.kernels.prim_func_text import parse_prim_func
from distir_relax.lowering.emit.relax_sizes import static_size

NARROW = ("float16", "bfloat16")

OPAQUE = 8
"""TVM's `OpPatternKind` of kernels that are not fused with others."""

SUMMED = ("matmul", "sum")
"""Ops whose result is zero if an operand has no elements."""

SCANS = ("cumsum", "cumprod")
"""Ops that write each element along a dim, the first without a condition."""

EMPTY = {"mean": math.nan, "prod": 1.0, "max": -math.inf}
"""The results of reductions of no elements; that of `max` is for floats."""

WIDENED = ("mean", "prod", "cumsum", "variance", "std", "nn.softmax", "nn.log_softmax",
           "nn.group_norm", "nn.batch_norm", *(f"nn.conv{n}d{t}" for n in (1, 2, 3) for t in ("", "_transpose")),
           *(f"nn.{kind}avg_pool{n}d" for n in (1, 2, 3) for kind in ("", "adaptive_")))  # fmt: skip
"""Ops that sum many numbers: those of narrow floats are accumulated in float32."""


def exact_ops(
    ops: Mapping[str, Callable[..., Any]], may_be_zero: Callable[[Any], bool]
) -> dict[str, Callable[..., Any]]:
    """Return replacements for some of TVM's `ops`, by name; `may_be_zero` decides on a symbolic size."""
    wide = {name: _in_float32(ops[name]) for name in (*WIDENED, *SUMMED) if name in ops}
    ops = {**ops, **wide}
    return {
        **wide,
        **{name: _filled_if_empty(ops[name], may_be_zero, value) for name, value in EMPTY.items()},
        **{name: _zeros_if_empty(ops[name], may_be_zero) for name in (*SUMMED, "permute_dims")},
        **{name: _scan_of_any_size(ops[name], may_be_zero) for name in SCANS},
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
    """``a / b``; infinity or NaN by zero."""
    op, number = _op(), _constant_value(b)
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
    """The quotient rounded down, as in torch; integers by zero are 0, as in NumPy."""
    op = _op()
    if not _is_float(a):
        if _constant_value(b):
            return op.floor_divide(a, b)
        zero = _emit(op.equal(b, _number(0, b)))
        return op.where(zero, _number(0, a), _emit(op.floor_divide(a, _emit(op.where(zero, _number(1, b), b)))))
    remainder, differs = _remainder(a, b)
    exact = _emit(op.divide(_emit(op.subtract(a, remainder)), _or_nan(b)))
    exact = _emit(op.where(differs, _emit(op.subtract(exact, _number(1, a))), exact))
    floor = _emit(op.floor(exact))
    rounds_up = _emit(op.greater(_emit(op.subtract(exact, floor)), _number(0.5, a)))
    floor = _emit(op.where(rounds_up, _emit(op.add(floor, _number(1, a))), floor))
    # A quotient between zero and one number of its sign is a zero of that sign; by zero there is no remainder.
    quotient = _emit(divide(a, b))
    signed_zero = _emit(op.multiply(quotient, _number(0, a)))
    floor = _emit(op.where(_emit(op.equal(exact, _number(0, a))), signed_zero, floor))
    return op.where(_emit(op.equal(b, _number(0, b))), quotient, floor)


def floor_mod(a: Any, b: Any) -> Any:
    """The remainder with the sign of the divisor, as in torch; integers by zero are 0, as in NumPy."""
    op = _op()
    if not _is_float(a):
        if _constant_value(b):
            return op.floor_mod(a, b)
        zero = _emit(op.equal(b, _number(0, b)))
        return op.where(zero, _number(0, a), _emit(op.floor_mod(a, _emit(op.where(zero, _number(1, b), b)))))
    remainder, differs = _remainder(a, b)
    return op.where(differs, _emit(op.add(remainder, b)), remainder)


def power(a: Any, b: Any) -> Any:
    """``a ** b``; integers by squaring, with wraparound as in torch."""
    op = _op()
    if _is_float(a):
        return op.power(a, b)
    number = _constant_value(b)
    bits = int(number).bit_length() if number is not None and number >= 0 else _bits(a) - 1
    result, square = _emit(op.ones_like(a)), a
    for bit in range(bits):
        if number is None or number < 0:
            odd = op.bitwise_and(_emit(op.right_shift(b, _number(bit, b))), _number(1, b))
            factor = _emit(op.where(_emit(op.equal(_emit(odd), _number(1, b))), square, _number(1, a)))
        else:
            factor = square if int(number) >> bit & 1 else None
        result = result if factor is None else _emit(op.multiply(result, factor))
        square = _emit(op.multiply(square, square)) if bit + 1 < bits else square
    if number is not None and number >= 0:
        return result
    # The inverse of an integer is an integer only for 1 and -1; for those, the bits of the negative exponent suffice.
    unit = _emit(op.equal(_emit(op.abs(a)), _number(1, a)))
    is_zero = _emit(op.logical_and(_emit(op.less(b, _number(0, b))), _emit(op.logical_not(unit))))
    return op.where(is_zero, _number(0, a), result)


def log1p(x: Any) -> Any:
    """``log(1 + x)``; a factor corrects the rounding error of the sum for small `x` (Kahan; HP-15C handbook, 1982)."""
    op = _op()
    x, one = _emitted((x,))[0], _number(1, x)
    shifted = _emit(op.add(x, one))
    factor = _emit(op.divide(x, _emit(op.subtract(shifted, one))))
    log = _emit(op.log(shifted))
    corrected = _emit(op.where(_emit(op.equal(shifted, one)), x, _emit(op.multiply(log, factor))))
    return op.where(_emit(op.greater(shifted, _number(_EXACT, x))), log, corrected)


_EXACT = 1e3
"""Above this, adding one loses nothing in a logarithm; the factor would be NaN for infinities."""


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


def rms_norm_rounded(x: Any, weight: Any, axes: Any, epsilon: float) -> Any:
    """As `rms_norm`, with the normalized values rounded to the dtype of `x` before they are multiplied."""
    op, dtype = _op(), _dtype(x)
    wide = x if dtype == "float64" else _emit(op.astype(x, "float32"))
    return op.multiply(weight, _emit(op.astype(_emit(_normal(wide, axes, epsilon)), dtype)))


def _normal(x: Any, axes: Any, epsilon: float) -> Any:
    op = _op()
    spread = _emit(op.mean(_emit(op.multiply(x, x)), axes, keepdims=True))
    return _emit(op.divide(x, _emit(op.sqrt(_emit(op.add(spread, _number(epsilon, x)))))))


def _remainder(a: Any, b: Any) -> tuple[Any, Any]:
    """Return ``fmod(a, b)``, and whether its sign differs from that of `b`."""
    op = _op()
    remainder = _emit(op.mod(a, _or_nan(b)))
    zero = _number(0, a)
    signs = _emit(op.logical_xor(_emit(op.less(b, _number(0, b))), _emit(op.less(remainder, zero))))
    return remainder, _emit(op.logical_and(_emit(not_equal(remainder, zero)), signs))


def _or_nan(b: Any) -> Any:
    """Return `b`, or NaN where it is zero: TVM rejects divisors that it can prove to be zero."""
    op, number = _op(), _constant_value(b)
    if number is not None:
        return _number(number or math.nan, b)
    return _emit(op.where(_emit(op.equal(b, _number(0, b))), _number(math.nan, b), b))


def _zeros_if_empty(op: Callable[..., Any], may_be_zero: Callable[[Any], bool]) -> Callable[..., Any]:
    """Wrap `op` to return zeros if an operand has no elements."""

    def zero(*args: Any, **kwargs: Any) -> Any:
        from tvm import relax

        args = _emitted(args)
        call = op(*args, **kwargs)
        sizes = [n for x in args for n in getattr(getattr(x, "ty", None), "shape", ())]
        if any(static_size(n) == 0 for n in sizes):
            kind = relax.BlockBuilder.current().normalize(call).ty
            return _op().zeros(kind.shape, str(kind.dtype))
        return fill_where_empty(call, sizes, may_be_zero)

    return zero


def _filled_if_empty(op: Callable[..., Any], may_be_zero: Callable[[Any], bool], value: float) -> Callable[..., Any]:
    """Wrap a reduction to return `value` if a symbolic dim of its operand is zero."""

    def filled(x: Any, *args: Any, **kwargs: Any) -> Any:
        (x,) = _emitted((x,))
        if math.isinf(value) and "float" not in _dtype(x):
            return op(x, *args, **kwargs)
        return fill_where_empty(op(x, *args, **kwargs), list(x.ty.shape), may_be_zero, value)

    return filled


def _scan_of_any_size(op: Callable[..., Any], may_be_zero: Callable[[Any], bool]) -> Callable[..., Any]:
    """Wrap a scan: TVM's writes the first element of a dim that turns out to have none."""

    def scan(x: Any, axis: int) -> Any:
        (x,) = _emitted((x,))
        shape = list(x.ty.shape)
        size = shape[axis]
        if static_size(size) is not None or not may_be_zero(size):
            return op(x, axis)
        shape[axis] = 1
        longer = _emit(_op().concat([x, _emit(_op().zeros(shape, _dtype(x)))], axis))
        return _op().strided_slice(_emit(op(longer, axis)), [axis], [0], [size], assume_inbound=True)

    return scan


def fill_where_empty(call: Any, sizes: Sequence[Any], may_be_zero: Callable[[Any], bool], value: float = 0) -> Any:
    """Return a tensor filled by `value` if one of the symbolic `sizes` is zero, otherwise the result of `call`.

    A kernel that loops over no elements leaves its result unwritten; if the result has that dim, it has no elements.
    """
    from tvm_ffi import structural_equal

    possible = [n for n in sizes if static_size(n) is None and may_be_zero(n)]
    if not possible:
        return call
    result = _emit(call)
    reduced = [n for n in possible if not any(structural_equal(n, m) for m in result.ty.shape)]
    if not reduced:
        return result
    count = size_scalar(math.prod(reduced), "int64")
    return _op().where(_emit(_op().equal(count, _number(0, count))), _number(value, result), result)


def size_scalar(size: Any, dtype: str) -> Any:
    """Return a symbolic size as a tensor without dims."""
    from tvm import relax

    # A kernel that is not fused: TVM's fusion fails if other kernels of a group have other symbols in their shapes.
    kernel = parse_prim_func(
        f'size(n: T.int64, y: T.Buffer((), "{dtype}"))',
        f"""
    T.func_attr({{"tirx.noalias": True, "op_pattern": {OPAQUE}}})
    with T.sblock("root"):
        y[()] = T.Cast("{dtype}", n)
""",
    )
    variable = relax.BlockBuilder.current().add_func(kernel, "size")
    return _emit(relax.call_tir(variable, [size], relax.TensorType((), dtype)))


def _in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `op` to compute narrow floats in float32, and to cast its results back."""

    def wide(*args: Any, **kwargs: Any) -> Any:
        args = _emitted(args)
        narrow = [_dtype(x) for x in args if _dtype(x) in NARROW]
        if not narrow:
            return op(*args, **kwargs)
        cast = _op().astype
        result = _emit(op(*(_emit(cast(x, "float32")) if _dtype(x) in NARROW else x for x in args), **kwargs))
        fields = getattr(result.ty, "fields", None)
        if fields is None:
            return cast(result, narrow[0])
        return tuple(cast(_emit(_item(result, i)), narrow[0]) for i in range(len(fields)))

    return wide


def _item(tuple_: Any, index: int) -> Any:
    from tvm import relax

    return relax.TupleGetItem(tuple_, index)


def _op() -> Any:
    from tvm import relax

    return relax.op


def _emit(call: Any) -> Any:
    """Bind `call` to a variable of the function under construction, with its type inferred."""
    from tvm import relax

    return relax.BlockBuilder.current().emit(call)


def _emitted(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bind calls among the arguments to variables, so that all have types."""
    from tvm import relax

    return tuple(_emit(x) if isinstance(x, relax.Call) else x for x in args)


def _number(value: float, like: Any) -> Any:
    from tvm import relax

    return relax.const(value, _dtype(like))


def _constant_value(x: Any) -> float | None:
    """Return the value of a constant scalar, None for other expressions."""
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
