"""The elements of a tensor as bytes, their hash and their checksum."""

from __future__ import annotations

import hashlib
import zlib
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


_BLOCK = 4096


def tensor_checksum(x: torch.Tensor, start: int = 0, most: int = 1 << 20) -> int:
    """Return the CRC-32 of a tensor's dtype, shape and elements, and of what has the CRC-32 `start` before them.

    Of more than `most` bytes, blocks of 4 kB at equal distances are read, about `most` bytes in all, and the last one:
    a millisecond.
    """
    import torch

    content = tensor_bytes(x)
    step = -(-content.numel() // max(1, most))
    if step > 1:
        blocks = content[: content.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)[::step]
        content = torch.cat([blocks.reshape(-1), content[-_BLOCK:]])
    elements: Any = content.numpy()
    return zlib.crc32(elements, zlib.crc32(repr((str(x.dtype), tuple(x.shape))).encode(), start))


def tensor_digest(x: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and elements, in hex."""
    digest = hashlib.sha256(repr((str(x.dtype), tuple(x.shape))).encode())
    content: Any = tensor_bytes(x).numpy()
    digest.update(content)
    return digest.hexdigest()
