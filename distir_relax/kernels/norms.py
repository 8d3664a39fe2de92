"""Normalization by the root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.kernels.native import is_small
from distir_relax.kernels.native import rms_norm as native_rms_norm

if TYPE_CHECKING:
    import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dim, whose size is that of `weight`."""
    import torch

    width = weight.shape[0]
    if is_small(x) and x.dtype == weight.dtype == torch.float32 and (kernel := native_rms_norm(width)):
        x, weight = x.contiguous(), weight.contiguous()
        result = torch.empty_like(x)
        kernel(x.data_ptr(), weight.data_ptr(), result.data_ptr(), x.numel() // width, epsilon)
        return result
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)
