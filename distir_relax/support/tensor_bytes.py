"""The elements of a tensor as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def tensor_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in order, as a flat CPU tensor of uint8; a copy only where it needs one."""
    import torch

    flat = x.detach().cpu().contiguous().view(-1)
    if flat.stride(0) != 1:
        # Of at most one element, such as a part of an expanded or a strided tensor: contiguous with any stride.
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return flat.view(torch.uint8)
