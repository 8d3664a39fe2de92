"""ATen ops that are written as several entries of the table, and need none of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ops.pointwise import cast, promote
from distir_relax.ops.registry import aten, lookup_aten
from distir_relax.ops.shape import reshape_to


def _aten(g: Any, spelling: str, *args: Any, **kwargs: Any) -> Any:
    convert = lookup_aten(spelling)
    assert convert is not None, spelling
    return convert(g, *args, **kwargs)


def _dtype_name(dtype: Any, like: Any) -> str:
    return like.type.dtype if dtype is None else str(dtype).removeprefix("torch.")


# Tensors filled with one number


def _filled(g: Any, shape: Sequence[int], value: Any, dtype: str) -> Any:
    scalar = cast(g, value, dtype) if hasattr(value, "type") else g.constant(value, dtype)
    return g.emit("broadcast_to", scalar, shape=tuple(shape)) if shape else scalar


@aten("full_like.default")
def _full_like(g: Any, x: Any, value: Any, *, dtype: Any = None) -> Any:
    return _filled(g, x.type.shape, value, _dtype_name(dtype, x))


# What an empty tensor holds is anyone's guess.
@aten("zeros_like.default", "empty_like.default")
def _zeros_like(g: Any, x: Any, *, dtype: Any = None) -> Any:
    return _filled(g, x.type.shape, 0, _dtype_name(dtype, x))


@aten("ones_like.default")
def _ones_like(g: Any, x: Any, *, dtype: Any = None) -> Any:
    return _filled(g, x.type.shape, 1, _dtype_name(dtype, x))


@aten("new_full.default")
def _new_full(g: Any, x: Any, shape: Sequence[int], value: Any, *, dtype: Any = None) -> Any:
    return _filled(g, shape, value, _dtype_name(dtype, x))


@aten("new_zeros.default", "new_empty.default")
def _new_zeros(g: Any, x: Any, shape: Sequence[int], *, dtype: Any = None) -> Any:
    return _filled(g, shape, 0, _dtype_name(dtype, x))


@aten("new_ones.default")
def _new_ones(g: Any, x: Any, shape: Sequence[int], *, dtype: Any = None) -> Any:
    return _filled(g, shape, 1, _dtype_name(dtype, x))


# Arithmetic and activations


@aten("reciprocal.default")
def _reciprocal(g: Any, x: Any) -> Any:
    return g.emit("divide", *promote(g, 1, x, floating=True))


@aten("log1p.default")
def _log1p(g: Any, x: Any) -> Any:
    return g.emit("log", g.emit("add", *promote(g, x, 1, floating=True)))


@aten("log2.default")
def _log2(g: Any, x: Any) -> Any:
    x = promote(g, x, floating=True)[0]
    return g.emit("multiply", g.emit("log", x), g.constant(1 / math.log(2), x.type.dtype))


@aten("addcmul.default")
def _addcmul(g: Any, x: Any, a: Any, b: Any, *, value: float = 1) -> Any:
    product = g.emit("multiply", *promote(g, a, b))
    return _aten(g, "add.Tensor", x, product, alpha=value)


@aten("div.Tensor_mode")
def _div_mode(g: Any, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _aten(g, "div.Tensor", a, b)
    if rounding_mode == "floor":
        return g.emit("floor_divide", *promote(g, a, b))
    raise NotImplementedError(f"division rounded by {rounding_mode!r}")


@aten("clamp_min.default", "clamp_min_.default")
def _clamp_min(g: Any, x: Any, low: float) -> Any:
    return _aten(g, "clamp.default", x, low, None)


@aten("clamp_max.default", "clamp_max_.default")
def _clamp_max(g: Any, x: Any, high: float) -> Any:
    return _aten(g, "clamp.default", x, None, high)


@aten("clamp.Tensor")
def _clamp_tensor(g: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = g.emit("maximum", *promote(g, x, low))
    return x if high is None else g.emit("minimum", *promote(g, x, high))


@aten("relu6.default", "relu6_.default")
def _relu6(g: Any, x: Any) -> Any:
    return _aten(g, "clamp.default", x, 0.0, 6.0)


@aten("hardtanh.default", "hardtanh_.default")
def _hardtanh(g: Any, x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    return _aten(g, "clamp.default", x, low, high)


@aten("leaky_relu.default", "leaky_relu_.default")
def _leaky_relu(g: Any, x: Any, slope: float = 0.01) -> Any:
    zero, factor = g.constant(0, x.type.dtype), g.constant(slope, x.type.dtype)
    return g.emit("where", g.emit("greater", x, zero), x, g.emit("multiply", x, factor))


@aten("elu.default", "elu_.default")
def _elu(g: Any, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if scale != 1 or input_scale != 1:
        raise NotImplementedError("elu with a scale")
    zero, one, factor = (g.constant(n, x.type.dtype) for n in (0, 1, alpha))
    negative = g.emit("subtract", g.emit("exp", g.emit("minimum", x, zero)), one)
    return g.emit("where", g.emit("greater", x, zero), x, g.emit("multiply", negative, factor))


@aten("softplus.default")
def _softplus(g: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    dtype = x.type.dtype
    scaled = x if beta == 1 else g.emit("multiply", x, g.constant(beta, dtype))
    # Capped, so that the branch that is not taken stays finite.
    capped = g.emit("minimum", scaled, g.constant(threshold, dtype))
    soft = g.emit("log", g.emit("add", g.emit("exp", capped), g.constant(1, dtype)))
    soft = soft if beta == 1 else g.emit("divide", soft, g.constant(beta, dtype))
    return g.emit("where", g.emit("greater", scaled, g.constant(threshold, dtype)), x, soft)


@aten("hardsigmoid.default", "hardsigmoid_.default")
def _hardsigmoid(g: Any, x: Any) -> Any:
    three, sixth = g.constant(3, x.type.dtype), g.constant(1 / 6, x.type.dtype)
    return g.emit("multiply", _relu6(g, g.emit("add", x, three)), sixth)


@aten("hardswish.default", "hardswish_.default")
def _hardswish(g: Any, x: Any) -> Any:
    return g.emit("multiply", x, _hardsigmoid(g, x))


@aten("glu.default")
def _glu(g: Any, x: Any, dim: int = -1) -> Any:
    axis = dim % len(x.type.shape)
    half = x.type.shape[axis] // 2
    a, b = g.emit("split", x, sizes=(half, half), axis=axis)
    return g.emit("multiply", a, g.emit("sigmoid", b))


# Reductions


@aten("max.default")
def _max_all(g: Any, x: Any) -> Any:
    return _aten(g, "amax.default", x)


@aten("min.default")
def _min_all(g: Any, x: Any) -> Any:
    return _aten(g, "amin.default", x)


def _truth_reduce(name: str) -> Any:
    def convert(g: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        truth = x if x.type.dtype == "bool" else g.emit("not_equal", x, g.constant(0, x.type.dtype))
        extreme = _aten(g, name, cast(g, truth, "int32"), dim, keepdim)
        return g.emit("not_equal", extreme, g.constant(0, "int32"))

    return convert


aten("any.default", "any.dim", "any.dims")(_truth_reduce("amax.default"))
aten("all.default", "all.dim", "all.dims")(_truth_reduce("amin.default"))


@aten("var.correction")
def _var(g: Any, x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    mean = _aten(g, "mean.dim", x, dim, True)
    squares = g.emit("square", g.emit("subtract", x, mean))
    count = x.type.elements / max(1, mean.type.elements)
    variance = _aten(g, "mean.dim", squares, dim, keepdim)
    bessel = 1 if correction is None else correction
    if bessel == 0:
        return variance
    return g.emit("multiply", variance, g.constant(count / (count - bessel), x.type.dtype))


@aten("var.dim")
def _var_dim(g: Any, x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _var(g, x, dim, correction=int(unbiased), keepdim=keepdim)


@aten("std.correction")
def _std(g: Any, x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return g.emit("sqrt", _var(g, x, dim, correction=correction, keepdim=keepdim))


@aten("std.dim")
def _std_dim(g: Any, x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _std(g, x, dim, correction=int(unbiased), keepdim=keepdim)


@aten("linalg_vector_norm.default")
def _vector_norm(g: Any, x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if order == 1:
        return _aten(g, "sum.dim_IntList", g.emit("abs", x), dim, keepdim, dtype=dtype)
    if order != 2:
        raise NotImplementedError(f"norm of order {order}")
    return g.emit("sqrt", _aten(g, "sum.dim_IntList", g.emit("square", x), dim, keepdim, dtype=dtype))


@aten("norm.ScalarOpt_dim")
def _norm(g: Any, x: Any, order: float | None, dim: Any, keepdim: bool = False) -> Any:
    return _vector_norm(g, x, 2 if order is None else order, dim, keepdim)


@aten("norm.Scalar")
def _norm_all(g: Any, x: Any, order: float = 2) -> Any:
    return _vector_norm(g, x, order)


# Shapes


@aten("expand_as.default")
def _expand_as(g: Any, x: Any, other: Any) -> Any:
    return _aten(g, "expand.default", x, list(other.type.shape))


@aten("view_as.default", "reshape_as.default")
def _view_as(g: Any, x: Any, other: Any) -> Any:
    return reshape_to(g, x, other.type.shape)


@aten("movedim.int")
def _movedim(g: Any, x: Any, source: int, destination: int) -> Any:
    return _movedims(g, x, [source], [destination])


@aten("movedim.intlist")
def _movedims(g: Any, x: Any, source: list[int], destination: list[int]) -> Any:
    rank = len(x.type.shape)
    home = {d % rank: s % rank for s, d in zip(source, destination, strict=True)}
    rest = iter([i for i in range(rank) if i not in home.values()])
    return _aten(g, "permute.default", x, [home[i] if i in home else next(rest) for i in range(rank)])


@aten("repeat.default")
def _repeat(g: Any, x: Any, times: list[int]) -> Any:
    own = (1,) * (len(times) - len(x.type.shape)) + x.type.shape
    opened = [n for size in own for n in (1, size)]
    spread = tuple(n for count, size in zip(times, own, strict=True) for n in (count, size))
    wide = _aten(g, "expand.default", reshape_to(g, x, tuple(opened)), list(spread))
    return reshape_to(g, wide, tuple(count * size for count, size in zip(times, own, strict=True)))


@aten("repeat_interleave.self_int")
def _repeat_interleave(g: Any, x: Any, times: int, dim: int | None = None, *, output_size: Any = None) -> Any:
    if dim is None:
        x, dim = reshape_to(g, x, (x.type.elements,)), 0
    shape = x.type.shape
    axis = dim % len(shape)
    opened = reshape_to(g, x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    wide = _aten(g, "expand.default", opened, [*shape[: axis + 1], times, *shape[axis + 1 :]])
    return reshape_to(g, wide, (*shape[:axis], shape[axis] * times, *shape[axis + 1 :]))


@aten("roll.default")
def _roll(g: Any, x: Any, shifts: list[int], dims: list[int] = []) -> Any:  # noqa: B006 - never changed
    if not dims:
        flat = _roll(g, reshape_to(g, x, (x.type.elements,)), shifts, [0])
        return reshape_to(g, flat, x.type.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % len(x.type.shape)
        size = x.type.shape[axis]
        if size and shift % size:
            head, tail = g.emit("split", x, sizes=(size - shift % size, shift % size), axis=axis)
            x = g.emit("concat", tail, head, axis=axis)
    return x


@aten("einsum.default")
def _einsum(g: Any, equation: str, tensors: list[Any], *, path: Any = None) -> Any:
    """The operands are contracted two by two, from the left; letters in one operand alone are summed before."""
    terms, right = _einsum_terms(equation, [len(t.type.shape) for t in tensors])
    if any(len(set(t)) != len(t) for t in (*terms, right)):
        raise NotImplementedError(f"einsum {equation!r}: a letter twice in one operand")
    values = promote(g, *tensors)
    for i, (term, value) in enumerate(zip(terms, values, strict=True)):
        used = set(right).union(*(other for j, other in enumerate(terms) if j != i))
        if alone := [d for d, letter in enumerate(term) if letter not in used]:
            values[i] = g.emit("sum", value, axis=tuple(alone), keepdims=False)
            terms[i] = "".join(letter for letter in term if letter in used)
    (a, *rest), (x, *others) = terms, values
    for i, (b, y) in enumerate(zip(rest, others, strict=True)):
        needed = set(right).union(*rest[i + 1 :])
        kept = "".join(dict.fromkeys(letter for letter in a + b if letter in needed))
        x, a = _contract(g, a, b, kept, x, y), kept
    return _aten(g, "permute.default", x, [a.index(c) for c in right])


def _einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result; an ellipsis becomes capital letters that the equation lacks."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [letter for letter in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in equation]
    widths = [rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=True) if "..." in term]
    if len(set(widths)) > 1:
        raise NotImplementedError(f"einsum {equation!r}: dims in ... that broadcast")
    dots = "".join(spare[: widths[0]]) if widths else ""
    terms = [term.replace("...", dots) for term in terms]
    if not arrow:
        letters = "".join(terms)
        right = "..." + "".join(sorted(c for c in set(letters) - set(dots) if letters.count(c) == 1))
    return terms, right.replace("...", dots)


def _contract(g: Any, a: str, b: str, right: str, x: Any, y: Any) -> Any:
    """Two operands are brought to (shared, own, summed) and multiplied as matrices."""
    batch = [c for c in a if c in b and c in right]
    summed = [c for c in a if c in b and c not in right]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    size = dict(zip(a + b, (*x.type.shape, *y.type.shape), strict=True))
    lead = tuple(size[c] for c in batch)
    x = _aten(g, "permute.default", x, [a.index(c) for c in (*batch, *rows, *summed)])
    y = _aten(g, "permute.default", y, [b.index(c) for c in (*batch, *summed, *columns)])
    row_count, sum_count, column_count = (math.prod(size[c] for c in group) for group in (rows, summed, columns))
    x = reshape_to(g, x, (*lead, row_count, sum_count))
    y = reshape_to(g, y, (*lead, sum_count, column_count))
    z = reshape_to(g, g.emit("matmul", x, y), tuple(size[c] for c in (*batch, *rows, *columns)))
    order = [*batch, *rows, *columns]
    return _aten(g, "permute.default", z, [order.index(c) for c in right])
