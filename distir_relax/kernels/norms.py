"""Normalization by the root mean square."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distir_relax.kernels.native import is_small, stored_name
from distir_relax.kernels.native import rms_norm as native_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, rounded: bool = False) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dims, whose shape is that of `weight`.

    It is computed in float32, or float64, and has the dtype of `x`. With `rounded`, the normalized `x` is rounded to
    its dtype before it is multiplied with `weight`, as language models do.
    """
    dtype, weight_dtype = stored_name(x.dtype), stored_name(weight.dtype)
    if dtype and weight_dtype and is_small(x):
        width = weight.numel()
        kernel = native_rms_norm(width, dtype, weight_dtype, rounded and dtype != "float32")
        if kernel:
            x, weight = x.contiguous(), weight.contiguous()
            result = torch.empty_like(x)
            kernel(x.data_ptr(), weight.data_ptr(), result.data_ptr(), x.numel() // width, epsilon)
            return result
    if x.dtype == weight.dtype and (not rounded or x.dtype.itemsize > 2):
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normal = F.rms_norm(x.to(torch.float32), weight.shape, None, epsilon)
    return ((normal.to(x.dtype) if rounded else normal) * weight).to(x.dtype)
