"""Memory of a step whose tensors are known before it runs: it is used again after the last use of a tensor."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
_LEAST = 1 << 16


class Memory:
    """Memory for tensors, which is used again as soon as a tensor and all of its views are gone."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Any, list[tuple[int, int]]]] = []
        """Blocks of memory, each with its free intervals: offsets of begin and end, in order."""
        self.size = 0
        """Bytes of all blocks."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose elements may have any value."""
        import torch

        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        number, start = self._take(size)
        block = self._blocks[number][0]
        slot = (ctypes.c_char * size).from_address(block.data_ptr() + start)
        slot.block = block  # type: ignore[attr-defined]
        weakref.finalize(slot, self._free, number, start, start + size)
        return torch.frombuffer(slot, dtype=dtype, count=count).view(tuple(shape))

    def contains(self, address: int) -> bool:
        """Return whether an address is one of this memory."""
        starts = ((block.data_ptr(), block.nbytes) for block, _ in self._blocks)
        return any(start <= address < start + size for start, size in starts)

    def _take(self, size: int) -> tuple[int, int]:
        """Return the block and the offset of free memory, the smallest interval that is large enough."""
        import torch

        fits = [
            (end - start, number, start)
            for number, (_, free) in enumerate(self._blocks)
            for start, end in free
            if end - start >= size
        ]
        if not fits:
            block = max(size, _LEAST, self.size)
            self._blocks.append((torch.empty(block, dtype=torch.uint8), [(0, block)]))
            self.size += block
            return self._take(size)
        _, number, start = min(fits)
        free = self._blocks[number][1]
        place = next(i for i, interval in enumerate(free) if interval[0] == start)
        end = free[place][1]
        free[place : place + 1] = [(start + size, end)] if end > start + size else []
        return number, start

    def _free(self, number: int, start: int, end: int) -> None:
        free = self._blocks[number][1]
        free.append((start, end))
        free.sort()
        joined: list[tuple[int, int]] = []
        for interval in free:
            if joined and joined[-1][1] == interval[0]:
                joined[-1] = (joined[-1][0], interval[1])
            else:
                joined.append(interval)
        free[:] = joined


def unowned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, which others may take when `x` is gone."""
    import torch

    if not x.numel():
        return x
    size = 1 + sum((count - 1) * step for count, step in zip(x.shape, x.stride(), strict=True))
    memory = (ctypes.c_char * (size * x.itemsize)).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype, count=size).as_strided(x.shape, x.stride())
