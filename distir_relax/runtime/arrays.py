"""Conversions between numpy arrays and torch tensors for the communicators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = torch.Tensor | np.ndarray[Any, Any]


def as_torch(x: Array) -> torch.Tensor:
    """Return `x` as a torch tensor of the same dtype, sharing memory wherever numpy's layout allows."""
    import torch

    if isinstance(x, torch.Tensor):
        # Outside of inference mode, a view of a tensor that was made in it may be written into.
        return x if torch.is_inference_mode_enabled() and not x.requires_grad else x.detach()
    import numpy as np

    x = np.asarray(x)
    if any(stride < 0 for stride in x.strides) or not x.flags.writeable:
        x = np.ascontiguousarray(x) if x.flags.writeable else x.copy()
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def like(result: torch.Tensor, x: Array) -> Any:
    """Return `result` as the array type of `x` (torch or numpy), without a copy."""
    import torch

    if isinstance(x, torch.Tensor):
        return result
    if result.dtype == torch.bfloat16:
        return result.view(torch.int16).numpy().view(x.dtype)
    return result.numpy()


def split(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """Return views of consecutive parts of `x` along `dim`, of the given sizes."""
    return list(x.split_with_sizes(list(sizes), dim))


def combine(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the sum, min or max of equally shaped `parts`, reduced in order, in new memory."""
    import torch

    result = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            result += part
        elif op == "min":
            torch.minimum(result, part, out=result)
        else:
            torch.maximum(result, part, out=result)
    return result


def as_ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """Map float32 or float64 to integers of the same order, with NaN last for "max" and first for "min".

    An integer maximum then propagates NaN; float maxima in MPI and gloo propagate it or not, by operand order.
    """
    import torch

    kind = torch.int64 if x.element_size() == 8 else torch.int32
    sign = 1.0 if op == "max" else -1.0
    nan = torch.copysign(torch.tensor(math.nan, dtype=x.dtype), torch.tensor(sign, dtype=x.dtype)).to(x.device)
    return _mirrored(torch.where(x.isnan(), nan, x).view(kind))


def from_ordered(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Invert `as_ordered`: map integers back to floats of `dtype`."""
    return _mirrored(x).view(dtype)


def _mirrored(x: torch.Tensor) -> torch.Tensor:
    """Flip all bits but the sign of negative numbers, so that larger magnitudes are smaller integers."""
    import torch

    return torch.where(x < 0, x ^ torch.iinfo(x.dtype).max, x)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name` ("float32"). Raises RunError when there is none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RunError(f"unknown dtype {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype: "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(x: torch.Tensor) -> int:
    """Return the size of the elements of `x` in bytes."""
    return x.numel() * x.element_size()


def row_bytes(x: torch.Tensor, dim: int) -> int:
    """Return the bytes of `x` at one index along `dim`."""
    return math.prod(size for d, size in enumerate(x.shape) if d != dim) * x.element_size()


def with_sizes(shape: Sequence[int], sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Return `shape` with some dims replaced by `sizes`."""
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def flatten(pieces: Sequence[torch.Tensor], x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the `pieces` of `x` concatenated and flat; a view of `x` if it already has that order."""
    if x.is_contiguous() and math.prod(x.shape[:dim]) == 1:
        return x.view(-1)
    flat, start = x.new_empty(x.numel()), 0
    for piece in pieces:
        flat[start : start + piece.numel()].view(piece.shape).copy_(piece)
        start += piece.numel()
    return flat


def flat_target(out: Array | None, dim: int, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return `out` as a flat buffer if gathering straight into it gives the right order, else None."""
    if out is None or math.prod(shape[:dim]) != 1:
        return None
    target = as_torch(out)
    fits = target.is_contiguous() and tuple(target.shape) == shape and target.dtype == x.dtype
    return target.view(-1) if fits else None
