"""Precisions by name, and torch modules in another floating-point dtype."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.errors import ImportModelError

if TYPE_CHECKING:
    import torch

PRECISIONS = {"float32": "float32", "bf16": "bfloat16"}
"""The dtype of weights and activations, by the name of a precision."""
PRECISION_NAMES = (*PRECISIONS, "int8", "int8-channel", "int4")
"""All precisions: those of `PRECISIONS`, and the formats of quantized weights."""


def check_precision(precision: str | None, keep: Sequence[str], where: str) -> None:
    """Raise `ImportModelError` for an unknown precision, and for patterns of `keep` that have no effect with it."""
    if precision is not None and precision not in PRECISION_NAMES:
        raise ImportModelError(f"expected a precision of {', '.join(PRECISION_NAMES)}, found {precision!r}", where)
    if isinstance(keep, str):
        raise ImportModelError(f"expected a list of patterns in `keep`, found {keep!r}", where, f"keep=[{keep!r}]")
    if keep and precision in (None, "float32"):
        raise ImportModelError(
            f"`keep` needs a precision that changes weights, found {precision or 'none'}", where,
            f"give one of {', '.join(name for name in PRECISION_NAMES if name != 'float32')}",
        )  # fmt: skip


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
