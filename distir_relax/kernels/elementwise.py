"""Elementwise ops: activations, their gradients, gated ones, and the kernels of small tensors in recorded steps.

Torch's activations take several times as long as a copy of their operand, those of native kernels about as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distir_relax.kernels.native import (
    MOST_ELEMENTS,
    elementwise,
    stored_name,
    threads_for,
)

if TYPE_CHECKING:
    import torch


_LEAST = 1 << 15
"""Elements of the smallest tensors whose activations a native kernel computes."""


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x sigmoid(x)``."""
    result = _of_many("silu", x)
    if result is None:
        import torch.nn.functional as F

        result = F.silu(x)
    return result


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return ``x`` times the probability of less than it; as torch, with ``approximate="tanh"`` nearly so."""
    result = _of_many(_gelu(approximate), x)
    if result is None:
        import torch.nn.functional as F

        result = F.gelu(x, approximate=approximate)
    return result


def silu_grad(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `x` from that of ``silu(x)``, of its shape and dtype."""
    result = _of_many("silu_grad", x, grad)
    if result is None:
        import torch

        result = torch.ops.aten.silu_backward(grad, x)
    return result


def gelu_grad(x: torch.Tensor, grad: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return the gradient of `x` from that of ``gelu(x)``, of its shape and dtype."""
    result = _of_many(f"{_gelu(approximate)}_grad", x, grad)
    if result is None:
        import torch

        result = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return result


def silu_multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x) * y``, of equal shapes and dtypes."""
    result = _native("silu", x, y, gated=True)
    if result is None:
        import torch.nn.functional as F

        result = F.silu(x) * y
    return result


def gelu_multiply(x: torch.Tensor, y: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return ``gelu(x) * y``, of equal shapes and dtypes."""
    result = _native(_gelu(approximate), x, y, gated=True)
    if result is None:
        import torch.nn.functional as F

        result = F.gelu(x, approximate=approximate) * y
    return result


def native_forms() -> dict[Any, Callable[..., torch.Tensor | None]]:
    """Return the kernels of small tensors by the ops of torch that compute the same (`kernels.recorded_ops`).

    They take the operands of these ops, and return None where there is no kernel for them.
    """
    import torch

    aten = torch.ops.aten
    activations = {aten.silu: "silu", aten.relu: "relu"}
    arithmetic = {aten.add: "add", aten.sub: "subtract", aten.mul: "multiply", aten.div: "divide"}
    forms: dict[Any, Callable[..., torch.Tensor | None]] = {
        aten.gelu.default: lambda x, approximate="none": _small(_gelu(approximate), x),
        aten.rsub.Scalar: lambda x, y, alpha=1: _small("subtract", y, x, alpha=alpha),
    }
    for activation, function in activations.items():
        forms[activation.default] = partial(_small, function)
    for op, function in arithmetic.items():
        forms[op.Tensor] = forms[op.out] = partial(_small, function)
    return forms


def _gelu(approximate: str) -> str:
    return "gelu" if approximate == "none" else "gelu_tanh"


def _small(function: str, *operands: Any, alpha: float = 1, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return a native function of tensors, which broadcast, and numbers; None if there is no kernel for them.

    The result is small, of the dtype of the tensors, and written to `out` unless that is None.
    """
    import torch

    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    numbers = {place: float(x) for place, x in enumerate(operands) if isinstance(x, (int, float))}
    if len(tensors) + len(numbers) < len(operands) or alpha != 1 or not all(map(math.isfinite, numbers.values())):
        return None
    number, value = next(iter(numbers.items()), (-1, 0.0))
    shape: Sequence[int] = torch.broadcast_shapes(*(x.shape for x in tensors))  # type: ignore[no-untyped-call]
    if not 0 < math.prod(shape) <= MOST_ELEMENTS:
        return None
    if out is not None and (out.dtype != tensors[0].dtype or out.shape != shape or not out.is_contiguous()):
        return None
    return _compute(function, tensors, shape, 1, out, number=number, value=value) if len(numbers) < 2 else None


def _of_many(function: str, *operands: torch.Tensor) -> torch.Tensor | None:
    """As `_native`, where it is worth the compilation of a kernel."""
    return _native(function, *operands) if operands[0].numel() >= _LEAST else None


def _native(function: str, *operands: torch.Tensor, gated: bool = False) -> torch.Tensor | None:
    """Return a native `function` of operands of one shape and dtype; None if there is no kernel for them."""
    x = operands[0]
    if not x.numel() or any(y.shape != x.shape for y in operands):
        return None
    return _compute(function, operands, x.shape, threads_for(x), gated=gated)


def _compute(
    function: str, tensors: Sequence[torch.Tensor], shape: Sequence[int], threads: int,
    out: torch.Tensor | None = None, gated: bool = False, number: int = -1, value: float = 0.0,
) -> torch.Tensor | None:  # fmt: skip
    """Return a native function of one or two operands; None if there is no kernel for them.

    They are `tensors` of one dtype that broadcast to a shape, and operand `number`, if it is not -1, which is the
    number `value`. If it is `gated`, the function of the first is multiplied with the second.
    """
    x = tensors[0]
    dtype = stored_name(x.dtype)
    if not dtype:
        return None
    places: list[int] = []
    for y in tensors:
        stride = _row_stride(y, shape)
        # Kernels have no gradients for torch.
        if stride is None or y.dtype != x.dtype or not y.is_cpu or y.requires_grad:
            return None
        places += (y.data_ptr(), stride)
    count = len(tensors)
    if number >= 0:
        places[2 * number : 2 * number] = (0, 0)
        count += 1
    elif count == 1:
        places += (0, 0)
    kernel = elementwise(function, count, number, gated, dtype)
    if kernel is None:
        return None
    result = x.new_empty(shape) if out is None else out
    rows, columns = _rows(shape)
    kernel(*places, value, result.data_ptr(), columns, rows, columns, threads)
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
