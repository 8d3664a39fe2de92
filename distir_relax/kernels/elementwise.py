"""Elementwise ops: activations, their gradients, gated ones, and any as parts of a step that is bound.

Torch's activations take several times as long as a copy of their operand, those of native kernels about as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.kernels.native import (
    GELU,
    GELU_GRAD,
    GELU_TANH,
    GELU_TANH_GRAD,
    SILU,
    SILU_GRAD,
    elementwise,
    is_small,
    stored_name,
    threads_for,
    times_next,
)

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.bound_step import BoundStep, Kind


_LEAST = 1 << 15
"""Elements of the smallest tensors whose activations a native kernel computes."""


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x sigmoid(x)``."""
    result = _of_many(SILU, x)
    if result is None:
        import torch.nn.functional as F

        result = F.silu(x)
    return result


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return ``x`` times the probability of less than it; as torch, with ``approximate="tanh"`` nearly so."""
    result = _of_many(GELU if approximate == "none" else GELU_TANH, x)
    if result is None:
        import torch.nn.functional as F

        result = F.gelu(x, approximate=approximate)
    return result


def silu_grad(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `x` from that of ``silu(x)``, of its shape and dtype."""
    result = _of_many(SILU_GRAD, x, grad)
    if result is None:
        import torch

        result = torch.ops.aten.silu_backward(grad, x)
    return result


def gelu_grad(x: torch.Tensor, grad: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return the gradient of `x` from that of ``gelu(x)``, of its shape and dtype."""
    result = _of_many(GELU_GRAD if approximate == "none" else GELU_TANH_GRAD, x, grad)
    if result is None:
        import torch

        result = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return result


def silu_multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x) * y``, of equal shapes and dtypes."""
    result = _native(times_next(SILU), x, y)
    if result is None:
        import torch.nn.functional as F

        result = F.silu(x) * y
    return result


def gelu_multiply(x: torch.Tensor, y: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return ``gelu(x) * y``, of equal shapes and dtypes."""
    result = _native(times_next(GELU if approximate == "none" else GELU_TANH), x, y)
    if result is None:
        import torch.nn.functional as F

        result = F.gelu(x, approximate=approximate) * y
    return result


def bind(
    step: BoundStep, expression: str, compute: Callable[..., Any], operands: Sequence[torch.Tensor], result: Kind
) -> Any:
    """Add a native `expression` of operands (`native.elementwise`) to a step; return its result.

    Where there is no kernel for them, it is what `compute` returns for the operands.
    """
    shape, kind = result
    rows, columns = _rows(shape)
    strides = [_row_stride(x, shape) for x in operands]
    dtype = stored_name(kind)
    y = step.empty(shape, kind)
    is_plain = None not in strides and all(x.dtype == kind and x.is_cpu for x in operands) and is_small(y)
    kernel = elementwise(expression, len(operands), dtype, False) if is_plain and dtype else None
    if kernel is None:
        return step.python(compute, operands, result)
    places = [number for x, stride in zip(operands, strides, strict=True) for number in (x.data_ptr(), stride or 0)]
    step.add(kernel, *places, y.data_ptr(), columns, rows, columns, 1)
    return y


def _of_many(expression: str, *operands: torch.Tensor) -> torch.Tensor | None:
    """As `_native`, where it is worth the compilation of a kernel."""
    return _native(expression, *operands) if operands[0].numel() >= _LEAST else None


def _native(expression: str, *operands: torch.Tensor) -> torch.Tensor | None:
    """Return a native `expression` of operands of one shape and dtype; None if there is no kernel for them."""
    x = operands[0]
    dtype, shape = stored_name(x.dtype), x.shape
    if not dtype or not x.is_cpu or not x.numel():
        return None
    places: list[int] = []
    for y in operands:
        stride = _row_stride(y, shape)
        # Kernels have no gradients for torch.
        if stride is None or y.shape != shape or y.dtype != x.dtype or y.requires_grad:
            return None
        places += (y.data_ptr(), stride)
    threads = threads_for(x)
    kernel = elementwise(expression, len(operands), dtype, threads > 1)
    if kernel is None:
        return None
    result = x.new_empty(shape)
    rows, columns = _rows(shape)
    kernel(*places, result.data_ptr(), columns, rows, columns, threads)
    return result


def _rows(shape: Sequence[int]) -> tuple[int, int]:
    """Return a shape as rows of its last dim."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _row_stride(x: torch.Tensor, shape: Sequence[int]) -> int | None:
    """Return the stride by row of an operand that broadcasts to a shape; None if it has none."""
    columns = shape[-1] if shape else 1
    if not x.dim() or x.shape[-1] != columns or (columns > 1 and x.stride(-1) != 1):
        return None
    if x.numel() == columns:
        return 0
    if tuple(x.shape) != tuple(shape):
        return None
    stride = 0
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if not stride:
            stride, count = step, size
        elif step != stride * count:
            return None
        else:
            count *= size
    return stride
