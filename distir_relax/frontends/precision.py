"""Models in another floating-point precision."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from distir_relax.errors import ImportModelError

if TYPE_CHECKING:
    import torch

PRECISIONS = {"float32": "float32", "bf16": "bfloat16"}
"""The dtype of weights and activations, by the name of a precision."""


def precision_dtype(precision: str) -> torch.dtype:
    """Return the dtype of a precision. Raises `ImportModelError` for another name."""
    import torch

    if precision not in PRECISIONS:
        raise ImportModelError(f"expected a precision of {' or '.join(PRECISIONS)}, found {precision!r}")
    dtype: torch.dtype = getattr(torch, PRECISIONS[precision])
    return dtype


def with_precision(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    """Return a copy of a model with floating-point weights and stored buffers of a precision.

    Buffers that are not stored, such as the frequencies of rotary positions, keep their dtype, as when transformers
    loads a model with ``dtype=``. Raises `ImportModelError` for an unknown precision.
    """
    import torch

    dtype = precision_dtype(precision)
    stored = model.state_dict(keep_vars=True).values()
    if all(tensor.dtype == dtype for tensor in stored if tensor.is_floating_point()):
        return model
    # What deepcopy finds here it does not copy: weights are never held twice in the old precision.
    memo: dict[int, object] = {}
    for tensor in stored:
        if tensor.is_floating_point():
            cast = tensor.detach().to(dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(cast, tensor.requires_grad) if is_parameter else cast
    return copy.deepcopy(model, memo)
