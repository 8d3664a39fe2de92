"""Normalization by mean and variance or by the root mean square, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from distir_relax.kernels.native import Kernel, is_small, norm_grad, norm_weight_grad, stored_name, threads_for
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
        width = weight.numel()
        kernel(x.data_ptr(), weight.data_ptr(), result.data_ptr(), x.numel() // width, width, epsilon, threads_for(x))
        return result
    if x.dtype == weight.dtype and (not rounded or x.dtype.itemsize > 2):
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normal = F.rms_norm(x.to(torch.float32), weight.shape, None, epsilon)
    return ((normal.to(x.dtype) if rounded else normal) * weight).to(x.dtype)


def native_forms() -> dict[Any, Callable[..., Any]]:
    """Return the kernels of small tensors by the ops of torch that compute the same (`kernels.recorded_ops`)."""
    return {torch.ops.aten.layer_norm.default: _small_layer_norm}


def _small_layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    epsilon: float = 1e-5, *_: Any,
) -> torch.Tensor | None:  # fmt: skip
    """Return the layer norm of a small tensor over its last dims, of this shape; None if there is no kernel for it."""
    if weight is None or bias is None:
        return None
    dtype, weight_dtype = stored_name(x.dtype), stored_name(weight.dtype)
    is_plain = bias.dtype == weight.dtype and all(t.is_contiguous() for t in (x, weight, bias)) and is_small(x)
    kernel = native_layer_norm(dtype, weight_dtype) if is_plain and dtype and weight_dtype else None
    if kernel is None:
        return None
    result = torch.empty_like(x)
    width = weight.numel()
    kernel(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), result.data_ptr(), x.numel() // width, width, epsilon)
    return result


def _kernel(x: torch.Tensor, weight: torch.Tensor, rounded: bool) -> Kernel | None:
    """Return the native kernel for these dtypes, if there is one."""
    dtype, weight_dtype = stored_name(x.dtype), stored_name(weight.dtype)
    if not dtype or not weight_dtype or not x.is_cpu or not x.numel():
        return None
    return native_rms_norm(dtype, weight_dtype, rounded and dtype != "float32")


def layer_norm_grad(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the gradient of `x` from that of its layer norm, of its shape and dtype."""
    result = _native_grad(x, weight, grad, epsilon, True)
    if result is None:
        result = _torch_layer_norm_grads(x, weight, grad, epsilon, (True, False, False))[0].to(x.dtype)
    return result


def layer_norm_weight_grad(
    x: torch.Tensor, grad: torch.Tensor, axes: Sequence[int], epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of weight and bias, of `dtype`, from that of the layer norm of `x` over its last dims."""
    weight = x.new_empty(x.shape[axes[0] :], dtype=dtype)
    results = _native_weight_grads(x, grad, weight, epsilon, True)
    if results is None:
        _, *both = _torch_layer_norm_grads(x, weight, grad, epsilon, (False, True, True))
        results = both[0].to(dtype), both[1].to(dtype)
    return results


def rms_norm_grad(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the gradient of `x` from that of its RMS norm, of its shape and dtype."""
    result = _native_grad(x, weight, grad, epsilon, False)
    if result is None:
        axes = tuple(range(x.dim() - weight.dim(), x.dim()))
        normal, scale = _torch_rms_norm(x, axes, epsilon)
        weighted = grad.to(normal.dtype) * weight.to(normal.dtype)
        result = (scale * (weighted - normal * (weighted * normal).mean(axes, keepdim=True))).to(x.dtype)
    return result


def rms_norm_weight_grad(
    x: torch.Tensor, grad: torch.Tensor, axes: Sequence[int], epsilon: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of the weight, of `dtype`, from that of the RMS norm of `x` over its last dims."""
    weight = x.new_empty(x.shape[axes[0] :], dtype=dtype)
    results = _native_weight_grads(x, grad, weight, epsilon, False)
    if results is not None:
        return results[0]
    normal = _torch_rms_norm(x, axes, epsilon)[0]
    terms = grad.to(normal.dtype) * normal
    return (terms.sum(tuple(range(axes[0]))) if axes[0] else terms).to(dtype)


_LEAST = 1 << 15
"""Elements of the smallest tensors whose gradients a native kernel computes."""


def _native_grad(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, epsilon: float, is_centred: bool
) -> torch.Tensor | None:
    """Return the gradient of `x` by the native kernel; None if there is none for it."""
    names = _native_names(x, weight, grad)
    kernel = names and norm_grad(*names, is_centred)
    if not kernel:
        return None
    x, weight, grad = x.contiguous(), weight.contiguous(), grad.contiguous()
    result = torch.empty_like(x)
    places = x.data_ptr(), weight.data_ptr(), grad.data_ptr(), result.data_ptr()
    kernel(*places, x.numel() // weight.numel(), weight.numel(), epsilon, threads_for(x))
    return result


def _native_weight_grads(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, epsilon: float, is_centred: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the gradients of weight and bias, the latter unwritten unless `is_centred`, by the native kernel.

    `weight` has their shape and dtype. None if there is no kernel for them.
    """
    names = _native_names(x, weight, grad)
    kernel = names and norm_weight_grad(*names, is_centred)
    if not kernel:
        return None
    x, grad = x.contiguous(), grad.contiguous()
    of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
    width, threads = weight.numel(), threads_for(x)
    sums = torch.empty((threads, 2, width), dtype=torch.float32)
    places = x.data_ptr(), grad.data_ptr(), of_weight.data_ptr(), of_bias.data_ptr(), sums.data_ptr()
    kernel(*places, x.numel() // width, width, epsilon, threads)
    return of_weight, of_bias


def _native_names(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[str, str] | None:
    """Return the dtypes of `x` and `weight` if a native kernel takes them, and it is worth its compilation."""
    dtype, weight_dtype = stored_name(x.dtype), stored_name(weight.dtype)
    # Kernels have no gradients for torch.
    is_plain = (
        x.is_cpu and grad.dtype == x.dtype and not (x.requires_grad or weight.requires_grad or grad.requires_grad)
    )
    return (dtype, weight_dtype) if is_plain and x.numel() >= _LEAST and dtype and weight_dtype else None


def _torch_layer_norm_grads(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, epsilon: float, wanted: tuple[bool, bool, bool]
) -> list[torch.Tensor]:
    """Return the `wanted` gradients of a layer norm, of its operand, weight and bias, in float32 or float64."""
    x, weight, grad = (t.to(_wide(x.dtype)) for t in (x, weight, grad))
    _, mean, scale = torch.native_layer_norm(x, weight.shape, None, None, epsilon)
    backward = torch.ops.aten.native_layer_norm_backward
    # The bias is not read: only whether there is one.
    return backward(grad.contiguous(), x, weight.shape, mean, scale, weight, weight, wanted)  # type: ignore[no-any-return]


def _torch_rms_norm(x: torch.Tensor, axes: Sequence[int], epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` over its root mean square along `axes`, and one over that."""
    wide = x.to(_wide(x.dtype))
    scale = torch.rsqrt(wide.square().mean(tuple(axes), keepdim=True) + epsilon)
    return wide * scale, scale


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def renormalized_rows(weight: torch.Tensor, ids: torch.Tensor, most: float, order: float) -> torch.Tensor:
    """Return a weight whose rows `ids` have norms of at most `most`, as torch's ``embedding_renorm_`` leaves it.

    Its gradient is that of the weight: torch changes that before it is used.
    """
    import torch

    norms = weight.norm(p=order, dim=1, keepdim=True)
    is_used = torch.zeros(weight.shape[0], 1, dtype=torch.bool, device=weight.device).index_fill(0, ids.flatten(), True)
    changed = torch.where(is_used & (norms > most), weight * (most / (norms + 1e-7)), weight)
    return changed.detach() + (weight - weight.detach()) if weight.requires_grad else changed
