"""Legalizations of maxima, minima, sorts and comparisons with torch's NaN semantics.

TVM's own drop NaN: a float maximum is a comparison and a select, which returns the other operand. Here NaN propagates
through elementwise extremes and counts as the greatest number (for a minimum, the least) in reductions, pooling,
arg-reductions and sorts. A select by one comparison is as fast as the maximum; reductions compare twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir_relax.lowering.emit.relax_namespace import torch_kernel

Legalize = Callable[[Any, Any], Any]


def nan_legalizations() -> Mapping[str, Legalize]:
    """Return the legalizations for `relax.transform.LegalizeOps` of float ops that would drop NaN.

    Integers keep TVM's own.
    """
    legalizations: dict[str, Legalize] = {
        "nn.relu": _relu, "clip": _clip, "maximum": _extreme_of_two(True), "minimum": _extreme_of_two(False),
        "max": _extreme(True), "min": _extreme(False), "argmax": _arg_extreme(True), "argmin": _arg_extreme(False),
        "equal": _equal, "multiply": _multiply,
        **{f"nn.max_pool{n}d": _max_pool for n in (1, 2, 3)},
    }  # fmt: skip
    return {f"relax.{name}": _of_floats(legalize) for name, legalize in legalizations.items()}


def _of_floats(legalize: Legalize) -> Legalize:
    def convert(builder: Any, call: Any) -> Any:
        return (legalize if "float" in str(call.args[0].ty.dtype) else _of_tvm)(builder, call)

    return convert


def _of_tvm(builder: Any, call: Any) -> Any:
    return call.op.get_attr("FLegalize")(builder, call)


# Elementwise


def _relu(builder: Any, call: Any) -> Any:
    return _pointwise(builder, call, call.args, lambda x: _raised(x, 0.0))


def _clip(builder: Any, call: Any) -> Any:
    x, low, high = call.args
    bounds = [float(bound.value.value if hasattr(bound.value, "value") else bound.value) for bound in (low, high)]
    return _pointwise(builder, call, [x], lambda x: _lowered(_raised(x, bounds[0]), bounds[1]))


def _raised(x: Any, bound: float) -> Any:
    """Clamp from below. A comparison with NaN is false, so that NaN stays."""
    from tvm import tirx

    least = tirx.const(bound, x.ty.dtype)
    return x if bound == -math.inf else tirx.Select(x < least, least, x)


def _lowered(x: Any, bound: float) -> Any:
    from tvm import tirx

    most = tirx.const(bound, x.ty.dtype)
    return x if bound == math.inf else tirx.Select(x > most, most, x)


def _extreme_of_two(largest: bool) -> Legalize:
    def legalize(builder: Any, call: Any) -> Any:
        bounded = _raised if largest else _lowered
        numbers = [_number_of(x) for x in call.args]
        for i, number in enumerate(numbers):
            if number is not None and not math.isnan(number):
                return _pointwise(builder, call, [call.args[1 - i]], lambda x, number=number: bounded(x, number))
        return _pointwise(builder, call, call.args, lambda a, b: _selected(a, b, largest))

    return legalize


def _selected(a: Any, b: Any, largest: bool) -> Any:
    """Return the larger, or smaller, of two; NaN if one of them is."""
    from tvm import tirx

    return tirx.Select(tirx.any(b > a if largest else b < a, _is_nan(b)), b, a)


def _equal(builder: Any, call: Any) -> Any:
    """Write ``x == x``, which TVM folds to true, as a test for NaN."""
    from tvm import tirx

    a, b = call.args
    if a.same_as(b):
        return _pointwise(builder, call, [a], lambda x: tirx.Not(_is_nan(x)))
    return _of_tvm(builder, call)


def _multiply(builder: Any, call: Any) -> Any:
    """Keep a product with a constant zero, which TVM folds to zero even if the other operand is not finite."""
    from tvm import tirx

    def zero(x: Any) -> Any:
        wide = x if str(x.ty.dtype) in _WIDE else x.astype("float32")
        finite = tirx.abs(wide) < tirx.const(math.inf, wide.ty.dtype)
        return tirx.Select(finite, tirx.const(0.0, x.ty.dtype), tirx.const(math.nan, x.ty.dtype))

    for number, x in (call.args, reversed(call.args)):
        if _number_of(number) == 0:
            return _pointwise(builder, call, [x], zero)
    return _of_tvm(builder, call)


def _is_nan(x: Any) -> Any:
    from tvm import tirx

    return tirx.isnan(x if str(x.ty.dtype) in _WIDE else x.astype("float32"))


_WIDE = ("float32", "float64")


def _number_of(x: Any) -> float | None:
    """Return the value of an argument that is a scalar constant, else None."""
    from tvm.ir import GenericConst

    return float(x.value.numpy().item()) if isinstance(x, GenericConst) and not x.value.shape else None


def _pointwise(builder: Any, call: Any, args: Any, function: Callable[..., Any]) -> Any:
    from tvm import te

    shape = list(call.ty.shape)

    def compute(*tensors: Any) -> Any:
        def element(*i: Any) -> Any:
            return function(*(_aligned(x, i) for x in tensors))

        return te.compute(shape, element, name=_hint(call))

    return builder.call_te(compute, *args, primfunc_name_hint=_hint(call))


def _aligned(x: Any, i: tuple[Any, ...]) -> Any:
    """Return the element of a broadcast operand at the indices `i`."""
    own = i[len(i) - len(x.shape) :]
    return x(*(0 if getattr(n, "value", None) == 1 else index for n, index in zip(x.shape, own, strict=True)))


def _hint(call: Any) -> str:
    return str(call.op.name).rpartition(".")[2]


# Reductions


def _extreme(largest: bool) -> Legalize:
    def legalize(builder: Any, call: Any) -> Any:
        from tvm import te

        rank = len(call.args[0].ty.shape)
        reduced = call.attrs.axis
        axes = range(rank) if reduced is None else sorted(int(axis) % rank for axis in reduced)
        keep_dims = bool(call.attrs.keepdims)

        def compute(x: Any) -> Any:
            x = _widened(x)
            along = {axis: te.reduce_axis((0, x.shape[axis])) for axis in axes}
            element = lambda *i: x(*_with_axes(i, along, rank, keep_dims))  # noqa: E731
            return _extremes(call, element, list(along.values()), largest)

        return builder.call_te(compute, call.args[0], primfunc_name_hint=_hint(call)) if axes else call.args[0]

    return legalize


def _widened(x: Any) -> Any:
    """Cast narrow floats to float32 in a separate op: TVM cannot reduce bfloat16 to several results."""
    from tvm import te

    return x if x.dtype in _WIDE else te.compute(x.shape, lambda *i: x(*i).astype("float32"), name="wide")


def _extremes(call: Any, element: Callable[..., Any], axes: Sequence[Any], largest: bool) -> Any:
    """Return the extreme of ``element(*i)`` along the axes.

    NaNs are counted in a second result, so that the extreme still takes one comparison per iteration.
    """
    from tvm import te, tirx

    def combine(a: Any, b: Any) -> Any:
        ahead = b[0] > a[0] if largest else b[0] < a[0]
        return tirx.Select(ahead, b[0], a[0]), tirx.bitwise_or(a[1], b[1])

    def identity(number: Any, count: Any) -> Any:
        return tirx.const(-math.inf if largest else math.inf, number), tirx.const(0, count)

    reduce = te.comm_reducer(combine, identity)

    def pair(*i: Any) -> Any:
        x = element(*i)
        return reduce((x, _is_nan(x).astype("int32")), axis=axes)

    shape, dtype = list(call.ty.shape), str(call.ty.dtype)
    extremes, nans = te.compute(shape, pair, name=_hint(call))
    nan = tirx.const(math.nan, extremes.dtype)
    last = lambda *i: tirx.Select(nans(*i) > 0, nan, extremes(*i)).astype(dtype)  # noqa: E731
    return te.compute(shape, last, name="with_nan")


def _with_axes(i: tuple[Any, ...], along: Mapping[int, Any], rank: int, keep_dims: bool) -> list[Any]:
    """Return the indices of an operand of `rank` dims from those of the result and of the reduced axes."""
    rest = iter(i[axis] for axis in range(rank) if axis not in along) if keep_dims else iter(i)
    return [along[axis] if axis in along else next(rest) for axis in range(rank)]


def _arg_extreme(largest: bool) -> Legalize:
    def legalize(builder: Any, call: Any) -> Any:
        from tvm import te, tirx

        rank = len(call.args[0].ty.shape)
        axis, keep_dims, shape = int(call.attrs.axis) % rank, bool(call.attrs.keepdims), list(call.ty.shape)
        reduce = _arg_reducer(largest)

        def compute(x: Any) -> Any:
            x = _widened(x)
            along = {axis: te.reduce_axis((0, x.shape[axis]))}

            def triple(*i: Any) -> Any:
                place, number = along[axis].var.astype("int64"), x(*_with_axes(i, along, rank, keep_dims))
                nan = tirx.Select(_is_nan(number), place, tirx.const(-1, "int64"))
                return reduce((place, number, nan), axis=[along[axis]])

            places, _, nans = te.compute(shape, triple, name=_hint(call))
            return te.compute(shape, lambda *i: tirx.Select(nans(*i) >= 0, nans(*i), places(*i)), name="with_nan")

        return builder.call_te(compute, call.args[0], primfunc_name_hint=_hint(call))

    return legalize


def _arg_reducer(largest: bool) -> Any:
    """Return the reducer of (index, value, index if the value is NaN else -1): the first extreme and the first NaN."""
    from tvm import te, tirx

    def combine(a: Any, b: Any) -> Any:
        ahead = b[1] > a[1] if largest else b[1] < a[1]
        nan = tirx.Select(a[2] >= 0, a[2], b[2])
        return tirx.Select(ahead, b[0], a[0]), tirx.Select(ahead, b[1], a[1]), nan

    def identity(place: Any, number: Any, nan: Any) -> Any:
        # The first index, if no value is beyond infinity.
        least = tirx.const(-math.inf if largest else math.inf, number)
        return tirx.const(0, place), least, tirx.const(-1, nan)

    return te.comm_reducer(combine, identity)


def _max_pool(builder: Any, call: Any) -> Any:
    from tvm import te, tirx, topi

    attrs = call.attrs
    pool, strides, padding, dilation = (
        [int(n) for n in values] for values in (attrs.pool_size, attrs.strides, attrs.padding, attrs.dilation)
    )
    count = len(pool)
    least = tirx.const(-math.inf, call.ty.dtype)
    # Windows are short: keeping a second result is slower than a second comparison.
    reduce = te.comm_reducer(lambda a, b: _selected(a, b, True), lambda _: least)

    def compute(x: Any) -> Any:
        if any(padding):
            low, high = [0, 0, *padding[:count]], [0, 0, *padding[count:]]
            x = topi.nn.pad(x, low, high, least)
        along = [te.reduce_axis((0, size)) for size in pool]

        def element(batch: Any, channel: Any, *i: Any) -> Any:
            windows = zip(i, along, strides, dilation, strict=True)
            return reduce(x(batch, channel, *(p * s + a * d for p, a, s, d in windows)), axis=along)

        return te.compute(list(call.ty.shape), element, name=_hint(call))

    return builder.call_te(compute, call.args[0], primfunc_name_hint=_hint(call))


# Orders


_KERNELS: Mapping[str, Callable[[Any], dict[str, Any] | None]] = {
    "relax.argsort": lambda attrs: {"axis": int(attrs.axis), "descending": bool(attrs.descending)},
    "relax.topk": lambda attrs: {"axis": int(attrs.axis), "k": int(attrs.k), "largest": bool(attrs.largest)},
    "relax.scatter_elements": lambda attrs: (
        {"axis": int(attrs.axis), "reduction": str(attrs.reduction)} if str(attrs.reduction) in ("max", "min") else None
    ),
}
"""Kernel options by op, from a call's attributes; the kernels are in `distir_relax.kernels.ordering`."""


def order_by_torch(module: Any) -> Any:
    """Replace sorts and scatter extremes of floats by torch's, before TVM dispatches its own.

    TVM sorts by ``<`` alone, and an unordered element leaves all others out of order.
    """
    from tvm import relax

    @relax.expr_functor.mutator
    class Orders(relax.PyExprMutator):  # type: ignore[misc, name-defined, unused-ignore]
        def visit_call_(self, call: Any) -> Any:
            call = super().visit_call_(call)
            name = str(getattr(call.op, "name", ""))
            options = _KERNELS.get(name, lambda attrs: None)(call.attrs)
            if options is None or "float" not in str(call.args[0].ty.dtype):
                return call
            kinds = list(getattr(call.ty, "fields", [call.ty]))
            return torch_kernel("ordering", name.removeprefix("relax."), kinds, *call.args, **options)

    orders = Orders(module)
    for var, function in module.functions.items():
        if isinstance(function, relax.Function):
            module[var] = orders.visit_expr(function)
    return module
