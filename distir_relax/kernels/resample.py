"""Resizing and pooling of a part of a dim, in torch, on the rows that a rank has fetched.

A `part` is the position of a rank's piece: ``(size of the whole operand's dim, its first element, size of the whole
result's dim, its first element)``. It is empty if the dim is not split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from distir_relax.kernels.sampling import Adaptive, Pooling, Resizing, Sampling, Taps, taps_of

if TYPE_CHECKING:
    import torch

Part = Sequence[int]

_HALVES = ("float16", "bfloat16")


def weigh(x: torch.Tensor, axis: int, sampling: Sampling, size: int, part: Part = ()) -> torch.Tensor:
    """Resize dim `axis` of `x` to `size` elements, each the weighted sum of the elements given by `sampling`."""
    columns, weights = _columns(sampling, x.shape[axis], size, tuple(part), x, axis)
    if not weights:
        return _pick(x, axis, columns[0])
    # Half precision is too coarse for accumulation.
    wide = x.float() if _dtype(x) in _HALVES else x
    total = _pick(wide, axis, columns[0]) * weights[0]
    for column, weight in zip(columns[1:], weights[1:], strict=True):
        total.addcmul_(_pick(wide, axis, column), weight)
    return total.to(x.dtype)


def maximum(x: torch.Tensor, axis: int, sampling: Sampling, size: int, part: Part = ()) -> torch.Tensor:
    """Resize dim `axis` of `x` to `size` elements, each the maximum of the elements given by `sampling`."""
    columns, _ = _columns(sampling, x.shape[axis], size, tuple(part), x, axis)
    best = _pick(x, axis, columns[0])
    for column in columns[1:]:
        best = best.maximum(_pick(x, axis, column))
    return best


def places(
    x: torch.Tensor,
    samplings: Sequence[Sampling],
    sizes: Sequence[int],
    strides: Sequence[int],
    parts: Sequence[Part] = (),
) -> torch.Tensor:
    """Return the argmax of each window over the last dims of `x`: its indices times `strides`, summed.

    Of equal elements it is the first in row-major order; computed dim by dim, the last one first.
    """
    import torch

    result = _torch_places(x, samplings, sizes, strides) if not parts else None
    if result is not None:
        return result
    positions = torch.zeros((), dtype=torch.int64, device=x.device).expand(x.shape)
    for axis in reversed(range(2, x.dim())):
        sampling, size, part = samplings[axis - 2], sizes[axis - 2], tuple(parts[axis - 2]) if parts else ()
        first, stride = part[1] if part else 0, strides[axis - 2]
        columns, _ = _columns(sampling, x.shape[axis], size, part, x, axis)
        broadcast_shape = [-1 if dim == axis else 1 for dim in range(x.dim())]
        best = result = None
        for column in columns:
            value = _pick(x, axis, column)
            candidate = _pick(positions, axis, column) + ((column + first) * stride).reshape(broadcast_shape)
            if best is None or result is None:
                best, result = value, candidate
            else:
                better = (value > best) | (value.isnan() & ~best.isnan())
                best, result = torch.where(better, value, best), torch.where(better, candidate, result)
        assert best is not None
        assert result is not None
        x, positions = best, result
    return positions


def _torch_places(
    x: torch.Tensor, samplings: Sequence[Sampling], sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor | None:
    """Compute the argmax by torch's pooling, if that has such windows and row-major strides; else return None."""
    from torch.nn import functional as F

    spatial, count = x.shape[2:], len(sizes)
    row_major = [math.prod(spatial[i + 1 :]) for i in range(count)]
    if not x.is_floating_point() or not x.numel() or not all(sizes) or list(strides) != row_major:
        return None
    if all(isinstance(s, Adaptive) for s in samplings):
        return getattr(F, f"adaptive_max_pool{count}d")(x, tuple(sizes), return_indices=True)[1]  # type: ignore[no-any-return]
    pools = [s for s in samplings if isinstance(s, Pooling)]
    if len(pools) < count or any(2 * p.low > p.kernel for p in pools):
        return None
    # torch has no padding only at the high ends, as ONNX and `ceil_mode` do.
    torch_sizes = [
        (n + 2 * p.low - p.dilation * (p.kernel - 1) - 1) // p.stride + 1 for n, p in zip(spatial, pools, strict=True)
    ]
    if torch_sizes != list(sizes):
        return None
    numbers = [[getattr(p, name) for p in pools] for name in ("kernel", "stride", "low", "dilation")]
    return getattr(F, f"max_pool{count}d")(x, *numbers, return_indices=True)[1]  # type: ignore[no-any-return]


def rows_of(sampling: Sampling, local_size: int, size: int, part: Part, precise: bool) -> Taps:
    """Return the taps of a rank's piece: `size` elements of the result.

    Positions are relative to the first of the `local_size` elements of the operand.
    """
    operand_size, first, result_size, start = part or (local_size, 0, size, 0)
    taps = taps_of(sampling, operand_size, result_size, precise)
    rows = slice(start, start + size)
    return Taps(taps.positions[rows] - first, taps.weights[rows] if taps.weights is not None else None)


def _pick(x: torch.Tensor, axis: int, column: torch.Tensor) -> torch.Tensor:
    """Select elements of dim `axis`; for the last dim, torch is several times faster on a matrix."""
    if axis < x.dim() - 1:
        return x.index_select(axis, column)
    return x.reshape(-1, x.shape[-1]).index_select(1, column).view(*x.shape[:-1], len(column))


def _columns(
    sampling: Sampling, local_size: int, size: int, part: tuple[int, ...], x: torch.Tensor, axis: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return _tensors(sampling, local_size, size, part, _dtype(x), str(x.device), x.dim() - axis)


@lru_cache(maxsize=1024)
def _tensors(
    sampling: Sampling, local_size: int, size: int, part: tuple[int, ...], dtype: str, device: str, trailing: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the positions of each tap, and weights for a tensor with `trailing` dims from the axis on."""
    import torch

    rows = rows_of(sampling, local_size, size, part, dtype == "float64")
    columns = [torch.from_numpy(np.ascontiguousarray(c)).to(device) for c in rows.positions.T]
    if rows.weights is None:
        return columns, []
    kind = torch.float64 if dtype == "float64" else torch.float32
    shape = (-1, *(1,) * (trailing - 1))
    weights = [torch.from_numpy(np.ascontiguousarray(w)).to(device, kind).reshape(shape) for w in rows.weights.T]
    return columns, weights


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


__all__ = ["Adaptive", "Pooling", "Resizing", "maximum", "places", "rows_of", "weigh"]
