"""Arguments of a call by input name, for models whose inputs are plain named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch


def named_arguments(
    model: str, order: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a call of `model` by input name, for the inputs `order`, passed by position or name.

    Raises `RunError` for a missing, duplicate, or unknown input.
    """
    arguments = {**dict(zip(order, args, strict=False)), **kwargs}
    if len(args) > len(order) or set(arguments) != set(order) or set(order[: len(args)]) & set(kwargs):
        positions = [*(["?"] * len(args)), *kwargs]
        raise RunError(f"{model} takes the inputs {', '.join(order)}; found {len(positions)}: {', '.join(positions)}")
    return {label: as_tensor(arguments[label]) for label in order}


def as_tensor(data: Any) -> torch.Tensor:
    """Convert a tensor of torch, numpy or TVM to torch, without a copy if possible.

    Raises `RunError` for anything else.
    """
    import numpy as np
    import torch
    from torch.utils.dlpack import from_dlpack

    if isinstance(data, torch.Tensor):
        return data.detach()
    if isinstance(data, np.ndarray):
        array = data if data.flags.writeable and all(n >= 0 for n in data.strides) else data.copy()
        if data.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if hasattr(data, "__dlpack__"):
        return from_dlpack(data)
    raise RunError(f"expected a tensor of torch, numpy or TVM, found {type(data).__name__}")
