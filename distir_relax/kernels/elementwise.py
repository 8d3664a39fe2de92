"""Elementwise ops as parts of a step that is bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.kernels.native import elementwise, is_small, stored_name

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.bound_step import BoundStep, Kind


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
    kernel = elementwise(expression, len(operands), dtype) if is_plain and dtype else None
    if kernel is None:
        return step.python(compute, operands, result)
    places = [number for x, stride in zip(operands, strides, strict=True) for number in (x.data_ptr(), stride or 0)]
    step.add(kernel, *places, y.data_ptr(), columns, rows, columns)
    return y


def _rows(shape: Sequence[int]) -> tuple[int, int]:
    """Return a shape as rows of its last dim."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1] if shape else 1


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
