"""Functions of positions: masks, and rotations of features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distir_relax.kernels.index_expression import compute, dim_of
from distir_relax.kernels.native import Kernel, stored_name, threads_for
from distir_relax.kernels.native import rotary as native_rotary


def indexed(
    value: str, names: Sequence[str], sizes: Sequence[int], shape: Sequence[int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Return the tensor whose elements are the `value` of their indices ``i0``, ``i1``, ..., such as ``i1 <= i0 + n``.

    The `names` in it stand for the `sizes`. Along a dim whose index the value does not have, it is a view of one
    element. Raises ValueError for a value that is no such expression.
    """
    rank, known = len(shape), dict(zip(names, sizes, strict=True))

    def named(name: str) -> torch.Tensor:
        if name in known:
            return torch.tensor(known[name], device=device)
        dim = dim_of(name, rank)
        return torch.arange(shape[dim], device=device).reshape([n if d == dim else 1 for d, n in enumerate(shape)])

    def call(op: str, *operands: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(torch, _OPS[op])(*operands)
        return result

    found = compute(value, named, lambda number: torch.tensor(number, device=device), call)
    return found.to(dtype).expand(tuple(shape))


_OPS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "floor_divide": "floor_divide", "negative": "neg",
    "minimum": "minimum", "maximum": "maximum", "less_equal": "le", "equal": "eq", "not_equal": "ne",
    "logical_and": "logical_and", "logical_or": "logical_or",
}  # fmt: skip


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` with its halves along the last dim rotated: ``x * cos + concat(-x[h:], x[:h]) * sin``.

    `cos` and `sin` have as many dims as `x` (batch, heads, positions, features), and broadcast to its shape, except in
    the last dim. The order of the result's dims in memory is that of `x`.
    """
    kernel = _kernel(x, cos, sin)
    if kernel is None:
        first, second = x.tensor_split(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
    result = torch.empty_like(x)
    for arguments in _calls(x, cos, sin, result):
        kernel(*arguments)
    return result


def _kernel(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Kernel | None:
    """Return the native kernel for angles that all heads share, if there is one."""
    dtype = stored_name(x.dtype)
    if not dtype or x.dim() != 4 or not cos.dtype == sin.dtype == x.dtype or not x.is_cpu or not x.numel():
        return None
    width = x.shape[3]
    is_plain = cos.shape == sin.shape and cos.stride() == sin.stride() and cos.shape[1:] == (1, x.shape[2], width)
    if not is_plain or not x.stride(3) == cos.stride(3) == 1:
        return None
    return native_rotary(dtype)


def _calls(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, result: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """Return the arguments of the kernel for each element of the batch."""
    batch, heads, positions, width = x.shape
    x_batch, x_head, x_position, _ = x.stride()
    angle_batch, _, angle_position, _ = cos.stride()
    to_batch, to_head, to_position, _ = result.stride()
    step = x.itemsize
    angle_step = step * angle_batch if cos.shape[0] != 1 else 0
    at, cos_at, sin_at, to = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), result.data_ptr()
    for i in range(batch):
        yield (
            at + i * step * x_batch, cos_at + i * angle_step, sin_at + i * angle_step, to + i * step * to_batch,
            positions, heads, width, x_position, x_head, angle_position, to_position, to_head, threads_for(x),
        )  # fmt: skip
