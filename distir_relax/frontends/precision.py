"""Torch modules in another floating-point dtype."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from distir_relax.support.precisions import PRECISIONS

if TYPE_CHECKING:
    import torch


def precision_dtype(precision: str) -> torch.dtype:
    """Return the dtype of a precision of `PRECISIONS`."""
    import torch

    dtype: torch.dtype = getattr(torch, PRECISIONS[precision])
    return dtype


def has_precision(model: torch.nn.Module, precision: str) -> bool:
    """Return whether a model has stored floating-point tensors, all of which have a precision."""
    dtype = precision_dtype(precision)
    dtypes = {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()}
    return dtypes == {dtype}


def with_precision(model: torch.nn.Module, precision: str, all_buffers: bool = False) -> torch.nn.Module:
    """Return a copy of a model with floating-point weights and stored buffers of a precision.

    Buffers that are not stored, such as the frequencies of rotary positions, keep their dtype, as when transformers
    loads a model with ``dtype=``; with `all_buffers` they are converted too, as by `torch.nn.Module.bfloat16`.
    """
    import torch

    dtype = precision_dtype(precision)
    tensors = [*model.state_dict(keep_vars=True).values()]
    if all_buffers:
        tensors += model.buffers()
    if all(tensor.dtype == dtype for tensor in tensors if tensor.is_floating_point()):
        return model
    # What deepcopy finds here it does not copy: weights are never held twice in the old precision.
    memo: dict[int, object] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            cast = tensor.detach().to(dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(cast, tensor.requires_grad) if is_parameter else cast
    return copy.deepcopy(model, memo)
