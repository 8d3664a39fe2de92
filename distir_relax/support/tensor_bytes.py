"""The elements of a tensor as bytes, and their hash."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

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


def tensor_digest(x: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and elements, in hex."""
    digest = hashlib.sha256(repr((str(x.dtype), tuple(x.shape))).encode())
    content: Any = tensor_bytes(x).numpy()
    digest.update(content)
    return digest.hexdigest()
