"""Shared memory without a name: a file in memory, opened by those that it is sent to."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.errors import RunError
from distir_relax.runtime.arrays import torch_dtype

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Alignment of tensors, in bytes."""


class Segment:
    """A block of shared memory, of `size` bytes; `file` is an open file of it, which the segment owns."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.size = os.fstat(file).st_size
        self._map = mmap.mmap(file, self.size)

    @classmethod
    def create(cls, size: int) -> Segment:
        """Return a new segment. Raises RunError if the system has no memory for it."""
        try:
            file = os.memfd_create("distir", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
            return cls(file)
        except OSError as wrong:
            raise RunError(f"cannot share {size} bytes of memory with the ranks: {wrong.strerror}") from None

    def tensor(self, offset: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor at an offset, in the segment's memory, which lives as long as its tensors."""
        import torch

        count = 1
        for size in shape:
            count *= size
        return torch.frombuffer(self._map, dtype=torch_dtype(dtype), count=count, offset=offset).view(*shape)

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)


def aligned(size: int) -> int:
    """Return the number of bytes, at least `size`, after which the next tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
