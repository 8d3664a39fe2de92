"""Tensors of exact numbers: the ops' own torch code runs on them.

An `Exact` has the shape and dtype of a tensor of floats, and for each element the index of a number (`Numbers`). Torch
calls `__torch_dispatch__` with the ATen ops that the code of an op comes down to. Those that move elements are done on
the indices by torch; arithmetic and reductions are done number by number; ops that compare are done by torch on the
numbers' places in their order; all others are decomposed into these, by torch's own table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.exact.exact_numbers import Numbers

Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
"""The handlers of ATen ops by name: of the numbers, the arguments, and the op."""


class Unsupported(Exception):
    """An op that exact tensors do not have."""


class Exact(torch.Tensor):
    """A tensor of numbers, each as an index."""

    ids: torch.Tensor
    numbers: Numbers[Any]

    @staticmethod
    def __new__(cls, ids: torch.Tensor, numbers: Numbers[Any], dtype: torch.dtype = torch.float64) -> Exact:
        made = torch.Tensor._make_wrapper_subclass(cls, ids.shape, strides=ids.stride(), dtype=dtype)  # type: ignore[attr-defined]
        made.ids, made.numbers = ids, numbers
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Exact({self.ids.tolist()})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        numbers = next(x.numbers for x in tree_flatten((args, kwargs))[0] if isinstance(x, Exact))
        name = func._schema.name.removeprefix("aten::")
        handler = HANDLERS.get(f"{name}.{func._overloadname}") or HANDLERS.get(name)
        if handler is not None:
            return handler(numbers, func, *args, **kwargs)
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        decomposed = decompositions().get(func)
        if decomposed is None:
            raise Unsupported(f"{func} of exact numbers")
        return decomposed(*args, **kwargs)


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    return decomposition_table  # type: ignore[return-value]


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler of ATen ops, by name or by name and overload."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def drawn(numbers: Any, like: torch.Tensor, text: str) -> Exact:
    """Return random numbers of the shape and dtype of a tensor of floats; `text` tells draws apart."""
    ids = [numbers.random(f"{text} {i}") for i in range(like.numel())]
    return Exact(torch.tensor(ids, dtype=torch.int64).reshape(like.shape), numbers, like.dtype)


def lifted(numbers: Numbers[Any], x: Any) -> torch.Tensor:
    """Return the indices of the numbers of a tensor, or of a Python number."""
    if isinstance(x, Exact):
        return x.ids
    if not isinstance(x, torch.Tensor):
        return torch.tensor(numbers.constant(x))
    is_single = x.dtype == torch.float32
    ids = [numbers.constant(value, is_single) for value in x.reshape(-1).tolist()]
    return torch.tensor(ids, dtype=torch.int64).reshape(x.shape)


def _dtype(*operands: Any) -> torch.dtype:
    """Return the dtype of a result: that of torch for such operands."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    ranked = [x for x in tensors if x.dim()] or tensors
    result = ranked[0].dtype
    for x in ranked[1:]:
        result = torch.promote_types(result, x.dtype)
    return result if result.is_floating_point else torch.float64


def pointwise(numbers: Numbers[Any], name: str, *operands: Any) -> torch.Tensor:
    """Return the indices of the results of a function of numbers, element by element."""
    ids = torch.broadcast_tensors(*(lifted(numbers, x) for x in operands))
    columns = [x.reshape(-1).tolist() for x in ids]
    apply = numbers.apply
    found = [apply(name, *row) for row in zip(*columns, strict=True)]
    return torch.tensor(found, dtype=torch.int64).reshape(ids[0].shape)


def _of(numbers: Numbers[Any], name: str, *operands: Any) -> Exact:
    return Exact(pointwise(numbers, name, *operands), numbers, _dtype(*operands))


def summed(numbers: Numbers[Any], ids: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """Return the indices of the sums along dims, all if there are none."""
    return _folded(numbers.sum, ids, dims, keepdim)


def _folded(
    fold: Callable[[Sequence[int]], int], ids: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool
) -> torch.Tensor:
    if isinstance(dims, int):
        dims = [dims]
    chosen = sorted(d % max(ids.dim(), 1) for d in dims or range(ids.dim()))
    if not ids.dim():
        return ids.clone()
    rest = [d for d in range(ids.dim()) if d not in chosen]
    shape = [1 if d in chosen else ids.shape[d] for d in range(ids.dim())]
    count = math.prod(ids.shape[d] for d in chosen)
    rows = ids.permute(*rest, *chosen).reshape(math.prod(ids.shape[d] for d in rest), count).tolist()
    found = torch.tensor([fold(row) for row in rows], dtype=torch.int64)
    return found.reshape(shape if keepdim else [ids.shape[d] for d in rest])


# Ops that move elements.

MOVES = (
    "view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "permute", "t", "transpose", "slice",
    "select", "unsqueeze", "squeeze", "unbind", "split", "split_with_sizes", "unsafe_split", "cat", "stack",
    "index", "index_select", "gather", "clone", "detach", "alias", "as_strided", "flip", "roll", "unfold",
    "diagonal", "tril", "triu", "repeat", "repeat_interleave", "contiguous", "copy_", "copy", "index_put_",
    "index_put", "scatter", "scatter_", "constant_pad_nd", "masked_fill", "masked_fill_", "fill_", "fill",
    "new_zeros", "new_full", "zeros_like", "zero_", "zero", "new_empty", "empty_like", "full_like",
    "lift_fresh", "narrow_copy", "index_fill", "slice_backward", "select_backward", "diag_embed",
    "pixel_shuffle", "pixel_unshuffle", "new_empty_strided", "select_scatter", "slice_scatter", "movedim",
    "_to_copy", "lift", "masked_select", "new_ones", "ones_like", "index_copy",
    "index_copy_", "split_copy", "reflection_pad1d",
)  # fmt: skip
POSITIONAL = {"fill_": (1,), "fill": (1,), "constant_pad_nd": (2,), "masked_fill": (2,), "masked_fill_": (2,),
              "new_full": (2,), "full_like": (1,), "scatter": (3,), "scatter_": (3,), "index_fill": (3,)}  # fmt: skip
"""The arguments that are elements."""


CREATIONS: dict[str, Callable[[Numbers[Any], Any, Any], torch.Tensor]] = {
    **dict.fromkeys(("_to_copy", "lift_fresh", "lift", "contiguous"), lambda numbers, args, ids: ids[0].clone()),
    "new_ones": lambda numbers, args, ids: ids[0].new_full(args[1], numbers.constant(1)),
    "ones_like": lambda numbers, args, ids: torch.full(args[0].shape, numbers.constant(1)),
    "full_like": lambda numbers, args, ids: torch.full(args[0].shape, ids[1]),
    **dict.fromkeys(("zeros_like", "empty_like"), lambda numbers, args, ids: torch.zeros_like(args[0].ids)),
    **dict.fromkeys(("new_empty", "new_empty_strided"), lambda numbers, args, ids: ids[0].new_zeros(args[1])),
}
"""Ops whose results have elements of their own, from the arguments and those with indices."""


@handles(*MOVES)
def _move(numbers: Numbers[Any], func: Any, *args: Any, **kwargs: Any) -> Any:
    name = func._schema.name.removeprefix("aten::")
    dtype = kwargs.pop("dtype", None)
    first = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Exact)), None)
    assert first is not None
    if name in ("scatter", "scatter_") and kwargs.get("reduce"):
        raise Unsupported(f"{func} with a reduction")
    if dtype is not None and not dtype.is_floating_point:
        if name == "_to_copy":
            return _cast(numbers, first, dtype)
        return func(*(torch.empty(x.shape) if isinstance(x, Exact) else x for x in args), dtype=dtype, **kwargs)
    elements = POSITIONAL.get(name, ())

    def ids(x: Any) -> Any:
        if isinstance(x, Exact):
            return x.ids
        return lifted(numbers, x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    target = args[0]
    if name.endswith("_") and isinstance(target, torch.Tensor) and not isinstance(target, Exact):
        raise Unsupported(f"{func} of exact numbers into others")
    moved = list(tree_map(ids, args))
    for place in elements:
        if place < len(moved) and not (isinstance(args[place], torch.Tensor) and args[place].is_floating_point()):
            value = args[place]
            moved[place] = lifted(numbers, value) if isinstance(value, torch.Tensor) else numbers.constant(value)
    if name in ("copy_", "copy"):
        moved[1] = lifted(numbers, args[1])
    if name == "constant_pad_nd":
        moved = [*moved[:2], numbers.constant(args[2] if len(args) > 2 else 0)]
    if name in CREATIONS:
        result = CREATIONS[name](numbers, args, moved)
    else:
        rest = {key: ids(x) for key, x in kwargs.items() if key not in ("layout", "device", "pin_memory")}
        result = func(*moved, **rest)
    if name.endswith("_"):
        # In-place ops change the indices, which views share, and return their operand.
        return target
    made = partial(_wrapped, numbers, dtype or first.dtype)
    return tree_map(lambda x: made(x) if isinstance(x, torch.Tensor) else x, result)


def _wrapped(numbers: Numbers[Any], dtype: torch.dtype, ids: torch.Tensor) -> Exact:
    return Exact(ids, numbers, dtype)


def _cast(numbers: Numbers[Any], x: Exact, dtype: torch.dtype) -> torch.Tensor:
    """Rounding to integers is a function without properties. Symbolic booleans are numbers 0 and 1."""
    if dtype == torch.bool:
        return _compare(numbers, torch.ops.aten.ne.Scalar, x, 0)
    if not numbers.is_ordered:
        raise Unsupported(f"a cast to {dtype}")
    found = pointwise(numbers, "truncate", x).reshape(-1).tolist()
    return torch.tensor([numbers.values[i][0] % 101 for i in found], dtype=dtype).reshape(x.shape)


# Arithmetic.


@handles("add", "sub", "rsub", "add_", "sub_")
def _add(numbers: Numbers[Any], func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    name = func._schema.name
    if "rsub" in name:
        x, y = y, x
    term = lifted(numbers, y) if alpha == 1 else pointwise(numbers, "mul", y, alpha)
    if "sub" in name:
        term = _mapped(numbers, "neg", term)
    ids = _pairs(numbers, "add", lifted(numbers, x), term)
    return _result(numbers, name, x, ids, _dtype(x, y))


def _pairs(numbers: Numbers[Any], name: str, *ids: torch.Tensor) -> torch.Tensor:
    same = torch.broadcast_tensors(*ids)
    columns = [x.reshape(-1).tolist() for x in same]
    found = [numbers.apply(name, *row) for row in zip(*columns, strict=True)]
    return torch.tensor(found, dtype=torch.int64).reshape(same[0].shape)


def _mapped(numbers: Numbers[Any], name: str, ids: torch.Tensor) -> torch.Tensor:
    return _pairs(numbers, name, ids)


def _result(numbers: Numbers[Any], name: str, target: Any, ids: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a new tensor, or write into the first operand of an in-place op."""
    if name.endswith("_"):
        if not isinstance(target, Exact):
            raise Unsupported(f"{name} of exact numbers into others")
        target.ids.copy_(ids)
        return target
    return Exact(ids, numbers, dtype)


@handles("mul", "mul_")
def _mul(numbers: Numbers[Any], func: Any, x: Any, y: Any) -> Any:
    return _result(numbers, func._schema.name, x, pointwise(numbers, "mul", x, y), _dtype(x, y))


@handles("div", "div_", "true_divide")
def _div(numbers: Numbers[Any], func: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode:
        ids = pointwise(numbers, f"div {rounding_mode}", x, y)
    else:
        ids = _pairs(numbers, "mul", lifted(numbers, x), pointwise(numbers, "inv", y))
    return _result(numbers, func._schema.name, x, ids, _dtype(x, y))


@handles("neg", "exp", "sqrt")
def _unary(numbers: Numbers[Any], func: Any, x: Exact) -> Exact:
    return _of(numbers, func._schema.name.removeprefix("aten::"), x)


@handles("reciprocal", "rsqrt", "square", "log", "sigmoid", "tanh", "erf", "sin", "cos", "tan", "asin", "acos", "atan",
         "sinh", "cosh", "asinh", "acosh", "atanh", "expm1", "log1p", "log2", "log10", "abs", "floor", "ceil", "round",
         "trunc", "sign", "sgn", "atan2", "fmod", "remainder", "floor_divide", "erfc", "exp2", "lgamma", "erfinv",
         "silu", "softplus", "elu", "mish", "log_sigmoid", "hypot")  # fmt: skip
def _function(numbers: Numbers[Any], func: Any, *operands: Any) -> Exact:
    name = func._schema.name.removeprefix("aten::")
    if name == "reciprocal":
        return _of(numbers, "inv", operands[0])
    if name == "square":
        return _of(numbers, "mul", operands[0], operands[0])
    if name == "rsqrt":
        return Exact(_mapped(numbers, "inv", pointwise(numbers, "sqrt", operands[0])), numbers, operands[0].dtype)
    if name == "silu":
        return _of(numbers, "mul", operands[0], _of(numbers, "sigmoid", operands[0]))
    return _of(numbers, name, *operands)


@handles("gelu")
def _gelu(numbers: Numbers[Any], func: Any, x: Exact, *, approximate: str = "none") -> Exact:
    return _of(numbers, f"gelu {approximate}", x)


@handles("gelu_backward")
def _gelu_backward(numbers: Numbers[Any], func: Any, grad: Any, x: Any, *, approximate: str = "none") -> Exact:
    return _of(numbers, "mul", grad, _of(numbers, f"slope of gelu {approximate}", x))


@handles("silu_backward")
def _silu_backward(numbers: Numbers[Any], func: Any, grad: Any, x: Any) -> Exact:
    return _of(numbers, "mul", grad, _of(numbers, "slope of silu", x))


@handles("pow")
def _pow(numbers: Numbers[Any], func: Any, x: Any, power: Any) -> Exact:
    if isinstance(power, (int, float)) and power == int(power) and 0 <= power < 8:
        ids = lifted(numbers, 1).expand(x.shape)
        for _ in range(int(power)):
            ids = _pairs(numbers, "mul", ids, x.ids)
        return Exact(ids.contiguous(), numbers, x.dtype)
    if isinstance(power, float) and power == 0.5:
        return _of(numbers, "sqrt", x)
    return _of(numbers, "pow", x, power)


@handles("addcmul", "addcmul_")
def _addcmul(numbers: Numbers[Any], func: Any, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    term = pointwise(numbers, "mul", a, b)
    if value != 1:
        term = _pairs(numbers, "mul", term, lifted(numbers, value))
    return _result(numbers, func._schema.name, x, _pairs(numbers, "add", lifted(numbers, x), term), _dtype(x, a, b))


@handles("addcdiv")
def _addcdiv(numbers: Numbers[Any], func: Any, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return _addcmul(numbers, func, x, a, _of(numbers, "inv", b), value=value)


@handles("lerp")
def _lerp(numbers: Numbers[Any], func: Any, x: Any, y: Any, weight: Any) -> Any:
    return x + (y - x) * weight


@handles("sum")
def _sum(
    numbers: Numbers[Any], func: Any, x: Exact, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Exact:
    return Exact(summed(numbers, x.ids, dim, keepdim), numbers, dtype or x.dtype)


@handles("mean")
def _mean(
    numbers: Numbers[Any], func: Any, x: Exact, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Exact:
    total = summed(numbers, x.ids, dim, keepdim)
    count = lifted(numbers, x.numel() // max(1, total.numel()))
    return Exact(_pairs(numbers, "mul", total, _mapped(numbers, "inv", count)), numbers, dtype or x.dtype)


@handles("var_mean.correction", "var.correction")
def _var_mean(
    numbers: Numbers[Any], func: Any, x: Exact, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    mean = x.mean(dim, keepdim=True)
    count = x.numel() // mean.numel() - (1 if correction is None else correction)
    variance = ((x - mean) * (x - mean)).sum(dim, keepdim=keepdim) / count
    return variance if func._schema.name == "aten::var" else (variance, x.mean(dim, keepdim=keepdim))


@handles("var_mean.dim", "var.dim")
def _var_mean_of_dims(
    numbers: Numbers[Any], func: Any, x: Exact, dim: Any, unbiased: bool = True, keepdim: bool = False
) -> Any:
    correction = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::")).correction
    return _var_mean(numbers, correction, x, dim, correction=int(unbiased), keepdim=keepdim)


@handles("prod")
def _prod(
    numbers: Numbers[Any], func: Any, x: Exact, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Exact:
    return Exact(_folded(partial(_product, numbers), x.ids, dim, keepdim), numbers, x.dtype)


def _product(numbers: Numbers[Any], factors: Sequence[int]) -> int:
    result = numbers.constant(1)
    for factor in factors:
        result = numbers.apply("mul", result, factor)
    return result


@handles("cumsum", "cumprod", "logcumsumexp")
def _cumulative(numbers: Numbers[Any], func: Any, x: Exact, dim: int, dtype: Any = None) -> Exact:
    name = func._schema.name.removeprefix("aten::")
    ids = x.ids if name != "logcumsumexp" else _mapped(numbers, "exp", x.ids)
    steps = list(ids.unbind(dim))
    for i in range(1, len(steps)):
        steps[i] = _pairs(numbers, "mul" if name == "cumprod" else "add", steps[i - 1], steps[i])
    found = torch.stack(steps, dim) if steps else ids.clone()
    return Exact(_mapped(numbers, "log", found) if name == "logcumsumexp" else found, numbers, x.dtype)


@handles("mm", "bmm", "mv", "dot")
def _matmul(numbers: Numbers[Any], func: Any, a: Any, b: Any) -> Exact:
    return Exact(product(numbers, lifted(numbers, a), lifted(numbers, b)), numbers, _dtype(a, b))


def product(numbers: Numbers[Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the indices of a matrix product."""
    if b.dim() == 1:
        return summed(numbers, _pairs(numbers, "mul", a, b), [-1])
    terms = _pairs(numbers, "mul", a.unsqueeze(-1), b.unsqueeze(-3))
    return summed(numbers, terms, [-2])


@handles("addmm", "baddbmm")
def _addmm(numbers: Numbers[Any], func: Any, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return x * beta + (a @ b) * alpha


@handles("addmv")
def _addmv(numbers: Numbers[Any], func: Any, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return x * beta + torch.mv(a, b) * alpha


@handles("_softmax")
def _softmax(numbers: Numbers[Any], func: Any, x: Exact, dim: int, half: bool) -> Any:
    powers = x.exp()
    return powers / powers.sum(dim, keepdim=True)


@handles("_log_softmax")
def _log_softmax(numbers: Numbers[Any], func: Any, x: Exact, dim: int, half: bool) -> Any:
    # The logarithm of a multiple is a number of its own here: the maximum is subtracted as ranks do.
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


@handles("logsumexp")
def _logsumexp(numbers: Numbers[Any], func: Any, x: Exact, dim: Any, keepdim: bool = False) -> Any:
    return x.exp().sum(dim, keepdim=keepdim).log()


@handles("native_layer_norm")
def _layer_norm(numbers: Numbers[Any], func: Any, x: Any, shape: Any, weight: Any, bias: Any, epsilon: float) -> Any:
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    scale = ((centred * centred).mean(dims, keepdim=True) + epsilon).rsqrt()
    y = centred * scale
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, scale


@handles("_fused_rms_norm")
def _rms_norm(numbers: Numbers[Any], func: Any, x: Any, shape: Any, weight: Any, epsilon: float | None) -> Any:
    dims = list(range(x.dim() - len(shape), x.dim()))
    scale = ((x * x).mean(dims, keepdim=True) + epsilon).rsqrt()
    return x * scale if weight is None else x * scale * weight, scale


def attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention by its definition: torch's kernels differ in the roots of `scale` that they multiply with."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.softmax(scores, -1) @ v  # type: ignore[no-any-return]


# Convolution, by its definition.


@handles("convolution", "_convolution")
def _convolution(
    numbers: Numbers[Any], func: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, *rest: Any,
) -> Exact:  # fmt: skip
    ids, kernel = lifted(numbers, x), lifted(numbers, weight)
    dims = ids.dim() - 2
    stride, padding, dilation, output_padding = (
        list(n) * dims if len(n) == 1 else list(n) for n in (stride, padding, dilation, output_padding)
    )
    if transposed:
        kernel = kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(list(range(2, dims + 2)))
        for d in range(dims):
            wide = ids.new_zeros(
                (*ids.shape[: d + 2], max(0, (ids.shape[d + 2] - 1) * stride[d] + 1), *ids.shape[d + 3 :])
            )
            wide.narrow(d + 2, 0, wide.shape[d + 2])[(slice(None),) * (d + 2) + (slice(None, None, stride[d]),)] = ids
            reach = dilation[d] * (kernel.shape[d + 2] - 1) - padding[d]
            ids = _padded(wide, d + 2, reach, reach + output_padding[d])
        stride, padding = [1] * dims, [0] * dims
    found = _correlated(numbers, ids, kernel, stride, padding, dilation, groups)
    result = Exact(found, numbers, _dtype(x, weight))
    return result if bias is None else result + bias.reshape(1, -1, *[1] * dims)  # type: ignore[return-value]


def _padded(ids: torch.Tensor, dim: int, low: int, high: int) -> torch.Tensor:
    widths = [0, 0] * (ids.dim() - 1 - dim) + [low, high]
    return torch.nn.functional.pad(ids, widths)


def windows(ids: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> torch.Tensor:
    """Return (n, c, ...windows, ...kernel): the elements that each window reads, zeros where it is outside."""
    for d in range(len(kernel)):
        ids = _padded(ids, d + 2, padding[d], padding[d])
        reach = dilation[d] * (kernel[d] - 1) + 1
        ids = ids.unfold(d + 2, reach, stride[d])[..., :: dilation[d]]
    return ids


def _correlated(
    numbers: Numbers[Any],
    ids: torch.Tensor,
    kernel: torch.Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> torch.Tensor:
    dims = ids.dim() - 2
    seen = windows(ids, kernel.shape[2:], stride, padding, dilation)
    shape = seen.shape[2 : 2 + dims]
    # (n, groups, 1, windows, terms) times (groups, outputs, 1, terms).
    seen = seen.unflatten(1, (groups, -1)).movedim(2, 2 + dims)
    rows = seen.reshape(seen.shape[0], groups, 1, math.prod(shape), -1)
    weights = kernel.reshape(groups, -1, 1, math.prod(kernel.shape[1:]))
    found = summed(numbers, _pairs(numbers, "mul", rows, weights), [-1])
    return found.reshape(seen.shape[0], kernel.shape[0], *shape)


@handles("convolution_backward")
def _convolution_backward(
    numbers: Numbers[Any], func: Any, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Any,
) -> Any:  # fmt: skip
    if transposed:
        raise Unsupported(f"{func} of a transposed convolution")
    if mask[0]:
        rest = [
            (n - 1) - (m - 1) * step + 2 * low - wide * (k - 1)
            for n, m, step, low, wide, k in zip(
                x.shape[2:], grad.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
            )
        ]
        of_x = _convolution(numbers, func, grad, weight, None, stride, padding, dilation, True, rest, groups)
    else:
        of_x = None
    of_bias = grad.sum([d for d in range(grad.dim()) if d != 1]) if mask[2] else None
    if not mask[1]:
        return of_x, None, of_bias
    dims = x.dim() - 2
    full = [list(n) * dims if len(n) == 1 else list(n) for n in (stride, padding, dilation)]
    seen = windows(lifted(numbers, x), weight.shape[2:], *full)
    shape = seen.shape[2 : 2 + dims]
    # (groups, 1, channels, kernel, n windows) times (groups, outputs, 1, 1, n windows).
    seen = seen.unflatten(1, (groups, -1)).flatten(3 + dims).flatten(3, 2 + dims)
    seen = seen.permute(1, 2, 4, 0, 3).flatten(3).unsqueeze(1)
    grads = lifted(numbers, grad)
    grads = grads[(slice(None), slice(None), *(slice(0, n) for n in shape))]
    grads = grads.flatten(2).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2)[:, :, None, None]
    found = summed(numbers, _pairs(numbers, "mul", seen, grads), [-1])
    return of_x, Exact(found.reshape(weight.shape), numbers, _dtype(grad, x)), of_bias


# Sums into places.


@handles("index_add", "index_add_")
def _index_add(numbers: Numbers[Any], func: Any, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return _into(numbers, func, x, dim, index.reshape(shape).expand(source.shape), source, "add")


@handles("scatter_add", "scatter_add_")
def _scatter_add(numbers: Numbers[Any], func: Any, x: Any, dim: int, index: Any, source: Any) -> Any:
    return _into(numbers, func, x, dim, index, source, "add")


@handles("scatter_reduce", "scatter_reduce_")
def _scatter_reduce(
    numbers: Numbers[Any],
    func: Any,
    x: Any,
    dim: int,
    index: Any,
    source: Any,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    if not include_self:
        raise Unsupported(f"{func} without its operand")
    return _into(numbers, func, x, dim, index, source,
                 {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}[reduce])  # fmt: skip


def _into(numbers: Numbers[Any], func: Any, x: Any, dim: int, index: Any, source: Any, combine: str) -> Any:
    ids = lifted(numbers, x)
    places = torch.arange(ids.numel()).reshape(ids.shape)
    source_ids = lifted(numbers, source)[tuple(slice(0, n) for n in index.shape)]
    targets = places
    for d in range(ids.dim()):
        if d != dim % ids.dim():
            targets = targets.narrow(d, 0, index.shape[d])
    targets = targets.gather(dim, index.long()).reshape(-1).tolist() if ids.dim() else [0]
    found = ids.reshape(-1).tolist()
    for place, term in zip(targets, source_ids.reshape(-1).tolist(), strict=True):
        found[place] = numbers.apply(combine, found[place], term)
    result = torch.tensor(found, dtype=torch.int64).reshape(ids.shape)
    return _result(numbers, func._schema.name, x, result, _dtype(x, source))


@handles("index_put_", "index_put", "_unsafe_index_put")
def _index_put(numbers: Numbers[Any], func: Any, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    ids, terms = lifted(numbers, x), lifted(numbers, values)
    if not accumulate:
        found = torch.ops.aten.index_put(ids, indices, terms)
    else:
        places = torch.arange(ids.numel()).reshape(ids.shape)
        targets = torch.ops.aten.index(places, indices)
        flat = ids.reshape(-1).tolist()
        for place, term in zip(
            targets.reshape(-1).tolist(), terms.expand(targets.shape).reshape(-1).tolist(), strict=True
        ):
            flat[place] = numbers.apply("add", flat[place], term)
        found = torch.tensor(flat, dtype=torch.int64).reshape(ids.shape)
    return _result(numbers, func._schema.name, x, found, x.dtype)


@handles("embedding")
def _embedding(numbers: Numbers[Any], func: Any, weight: Any, index: Any, *rest: Any) -> Any:
    return weight[index]


# Comparisons.


@handles("lt", "le", "gt", "ge", "eq", "ne")
def _compare(numbers: Numbers[Any], func: Any, x: Any, y: Any) -> torch.Tensor:
    if numbers.is_ordered:
        return _by_order(numbers, func, x, y)  # type: ignore[no-any-return]
    name = func._schema.name.removeprefix("aten::")
    return Exact(pointwise(numbers, name, x, y), numbers, torch.bool)


@handles("where")
def _where(numbers: Numbers[Any], func: Any, condition: Any, x: Any, y: Any) -> Exact:
    if isinstance(condition, Exact):
        return Exact(
            _pairs(numbers, "select", condition.ids, lifted(numbers, x), lifted(numbers, y)), numbers, _dtype(x, y)
        )
    return Exact(torch.where(condition, lifted(numbers, x), lifted(numbers, y)), numbers, _dtype(x, y))


@handles("logical_and", "bitwise_and", "logical_not", "bitwise_not", "logical_or", "bitwise_or")
def _logic(numbers: Numbers[Any], func: Any, x: Any, y: Any = None) -> Exact:
    name = func._schema.name.removeprefix("aten::").removeprefix("bitwise_").removeprefix("logical_")
    operands = [x] if y is None else [x, y]
    return Exact(
        pointwise(numbers, {"and": "mul", "not": "inverse", "or": "maximum"}[name], *operands), numbers, torch.bool
    )


@handles("relu")
def _relu(numbers: Numbers[Any], func: Any, x: Exact) -> Exact:
    return _of(numbers, "maximum", x, 0)


@handles("threshold_backward")
def _threshold_backward(numbers: Numbers[Any], func: Any, grad: Any, x: Any, threshold: Any) -> Any:
    return torch.where(x > threshold, grad, 0.0)


@handles("isnan", "isinf")
def _never(numbers: Numbers[Any], func: Any, x: Exact) -> torch.Tensor:
    """Numbers are finite."""
    return torch.zeros(x.shape, dtype=torch.bool)


@handles("maximum", "minimum")
def _extreme(numbers: Numbers[Any], func: Any, x: Any, y: Any) -> Exact:
    return _of(numbers, func._schema.name.removeprefix("aten::"), x, y)


@handles("clamp", "clamp_min", "clamp_max", "hardtanh", "clamp_")
def _clamp(numbers: Numbers[Any], func: Any, x: Exact, low: Any = None, high: Any = None, **bounds: Any) -> Any:
    name = func._schema.name.removeprefix("aten::")
    low, high = bounds.get("min", low), bounds.get("max", high)
    if name == "clamp_max":
        low, high = None, low
    if name == "hardtanh":
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
    ids = x.ids
    for bound, combine in ((low, "maximum"), (high, "minimum")):
        if bound is not None and not (isinstance(bound, float) and math.isinf(bound)):
            ids = _pairs(numbers, combine, ids, lifted(numbers, bound))
    return _result(numbers, name, x, ids.clone(), x.dtype)


@handles("amax", "amin", "max", "min", "argmax", "argmin", "topk", "sort", "argsort", "cummax", "cummin", "max_pool2d",
         "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
         "adaptive_max_pool3d", "median", "kthvalue", "_cummax_helper", "_cummin_helper", "isfinite", "searchsorted",
         "bucketize")  # fmt: skip
def _by_order(numbers: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own on the places of the numbers in their order, which such ops keep."""
    name = func._schema.name.removeprefix("aten::")
    if not numbers.is_ordered:
        if name in ("amax", "amin"):
            fold = partial(_fold, numbers, "maximum" if name == "amax" else "minimum")
            dims, keep = (*args[1:], *kwargs.values(), [], False)[:2]
            return Exact(_folded(fold, args[0].ids, dims, bool(keep)), numbers, args[0].dtype)
        raise Unsupported(f"{func} of symbolic numbers")
    leaves, spec = tree_flatten((args, kwargs))
    scalars = name in ("lt", "le", "gt", "ge", "eq", "ne")
    operands = {
        i: lifted(numbers, x)
        for i, x in enumerate(leaves)
        if (isinstance(x, torch.Tensor) and (x.is_floating_point() or scalars))
        or (scalars and i and not isinstance(x, torch.Tensor))
    }
    places: dict[int, Any] = {}
    for ids in operands.values():
        for i in ids.reshape(-1).tolist():
            places[i] = numbers.order(i)
    ranks = {
        value: float(rank) for rank, value in enumerate(sorted(v for v in set(places.values()) if abs(v) != math.inf))
    }
    ranks |= {math.inf: math.inf, -math.inf: -math.inf}
    back = {ranks[value]: i for i, value in reversed(list(places.items()))}
    back.setdefault(-math.inf, numbers.constant(-math.inf))
    for i, ids in operands.items():
        ranked = [ranks[places[j]] for j in ids.reshape(-1).tolist()]
        leaves[i] = torch.tensor(ranked, dtype=torch.float64).reshape(ids.shape)
    new_args, new_kwargs = tree_unflatten(leaves, spec)
    scalar_form = scalars and not isinstance(args[1], torch.Tensor)
    run = getattr(torch.ops.aten, name).Tensor if scalar_form else func
    result = run(*new_args, **new_kwargs)
    dtype = next(x.dtype for x in tree_flatten((args, kwargs))[0] if isinstance(x, Exact))

    def restored(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        ids = [back[v] for v in x.reshape(-1).tolist()]
        return Exact(torch.tensor(ids, dtype=torch.int64).reshape(x.shape), numbers, dtype)

    return tree_map(lambda x: restored(x) if isinstance(x, torch.Tensor) else x, result)


def _fold(numbers: Numbers[Any], name: str, ids: Sequence[int]) -> int:
    result = ids[0]
    for i in ids[1:]:
        result = numbers.apply(name, result, i)
    return result


# Ops that are linear in one operand with coefficients that depend on shapes alone.


@handles(
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_avg_pool1d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact3d", "im2col", "col2im",
    "upsample_bilinear2d_backward", "avg_pool2d_backward", "upsample_linear1d_backward",
    "upsample_bicubic2d_backward", "avg_pool3d_backward",
)  # fmt: skip
def _linear_map(numbers: Numbers[Any], func: Any, x: Exact, *args: Any, **kwargs: Any) -> Exact:
    """Take the coefficients from torch's own on one element at a time."""
    found = None
    for i, number in enumerate(x.ids.reshape(-1).tolist()):
        unit = torch.zeros(x.numel(), dtype=torch.float64)
        unit[i] = 1.0
        weights = func(unit.reshape(x.shape), *args, **kwargs)
        if found is None:
            shape, found = weights.shape, [0] * weights.numel()
        flat = weights.reshape(-1)
        for place in flat.nonzero()[:, 0].tolist():
            term = numbers.apply("mul", number, numbers.constant(float(flat[place])))
            found[place] = numbers.apply("add", found[place], term)
    if found is None:
        shape = func(torch.zeros(x.shape, dtype=torch.float64), *args, **kwargs).shape
        found = []
    return Exact(torch.tensor(found, dtype=torch.int64).reshape(shape), numbers, x.dtype)
