"""Normalization by the root mean square."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distir_relax.kernels.bound_step import BoundStep
from distir_relax.kernels.native import Kernel, is_small, stored_name, threads_for
from distir_relax.kernels.native import layer_norm as native_layer_norm
from distir_relax.kernels.native import rms_norm as native_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, rounded: bool = False) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dims, whose shape is that of `weight`.

    It is computed in float32, or float64, and has the dtype of `x`. With `rounded`, the normalized `x` is rounded to
    its dtype before it is multiplied with `weight`, as language models do.
    """
    kernel = _kernel(x, weight, rounded)
    if kernel:
        x, weight = x.contiguous(), weight.contiguous()
        result = torch.empty_like(x)
        rows = x.numel() // weight.numel()
        kernel(x.data_ptr(), weight.data_ptr(), result.data_ptr(), rows, epsilon, threads_for(x))
        return result
    if x.dtype == weight.dtype and (not rounded or x.dtype.itemsize > 2):
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normal = F.rms_norm(x.to(torch.float32), weight.shape, None, epsilon)
    return ((normal.to(x.dtype) if rounded else normal) * weight).to(x.dtype)


def bind_rms_norm(
    step: BoundStep, x: torch.Tensor, weight: torch.Tensor, epsilon: float, rounded: bool = False
) -> torch.Tensor:
    """Add `rms_norm` to a step; return its result."""
    kernel = _kernel(x, weight, rounded)
    if kernel is None or not x.is_contiguous() or not weight.is_contiguous():
        return step.python(lambda x: rms_norm(x, weight, epsilon, rounded), (x,), (x.shape, x.dtype))
    result = step.empty(x.shape, x.dtype)
    rows = x.numel() // weight.numel()
    step.add(kernel, x.data_ptr(), weight.data_ptr(), result.data_ptr(), rows, epsilon, threads_for(x))
    return result


def bind_layer_norm(
    step: BoundStep, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add the normalization of the dims of `x` that `weight` and `bias` have to a step; return its result."""
    dtype, weight_dtype = stored_name(x.dtype), stored_name(weight.dtype)
    is_plain = bias.dtype == weight.dtype and all(t.is_contiguous() for t in (x, weight, bias)) and is_small(x)
    kernel = native_layer_norm(weight.numel(), dtype, weight_dtype) if is_plain and dtype and weight_dtype else None
    if kernel is None:
        kind = (x.shape, x.dtype)
        return step.python(lambda x: F.layer_norm(x, weight.shape, weight, bias, epsilon), (x,), kind)
    result = step.empty(x.shape, x.dtype)
    rows = x.numel() // weight.numel()
    step.add(kernel, x.data_ptr(), weight.data_ptr(), bias.data_ptr(), result.data_ptr(), rows, epsilon)
    return result


def _kernel(x: torch.Tensor, weight: torch.Tensor, rounded: bool) -> Kernel | None:
    """Return the native kernel for these dtypes, if there is one."""
    dtype, weight_dtype = stored_name(x.dtype), stored_name(weight.dtype)
    if not dtype or not weight_dtype or not x.is_cpu or not x.numel():
        return None
    return native_rms_norm(weight.numel(), dtype, weight_dtype, rounded and dtype != "float32", threads_for(x) > 1)
