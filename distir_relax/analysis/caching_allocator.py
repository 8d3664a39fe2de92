"""Memory that a caching allocator reserves for a sequence of allocations and frees: torch's, of CUDA devices.

Its rules (`c10/cuda/CUDACachingAllocator.cpp`): sizes are multiples of 512 bytes. A tensor of at most 1 MiB is put into
a segment of 2 MiB; a larger one into one of 20 MiB, or, from 10 MiB on, of its own size in units of 2 MiB. The smallest
free block that is large enough is taken, the first of equal ones, and split if the rest is worth it. A free block is
merged with free neighbors. Segments are kept; when memory runs out, those without a tensor are given back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 1 << 20
UNIT = 512
SMALL, MEDIUM = MIB, 10 * MIB
"""The largest tensor of a small segment, and the smallest one that has a segment of its size."""
SMALL_SEGMENT, MEDIUM_SEGMENT, LARGE_UNIT = 2 * MIB, 20 * MIB, 2 * MIB

Owner = tuple[int, int] | None
"""The size and the tag of the tensor in a block; None if it is free."""


@dataclass(slots=True)
class _Segment:
    is_small: bool
    blocks: list[tuple[int, Owner]]


@dataclass
class CachingAllocator:
    """The allocator of one device with `memory` bytes. `reserved` is what its segments take, `peak` its maximum."""

    memory: float
    reserved: int = 0
    peak: int = 0
    _segments: list[_Segment] = field(default_factory=list)

    def allocate(self, size: int, tag: int = 0) -> bool:
        """Allocate `size` bytes for a tensor of a kind, its `tag`; return whether there is room."""
        rounded = max(UNIT, -(-size // UNIT) * UNIT)
        is_small = rounded <= SMALL
        best = min(self._fitting(rounded, is_small), default=None)
        if best is None and not self._reserve(rounded, is_small):
            return False
        found, number, position = best or (self._segments[-1].blocks[0][0], len(self._segments) - 1, 0)
        blocks, rest = self._segments[number].blocks, found - rounded
        is_split = rest >= UNIT if is_small else rest > SMALL
        blocks[position] = (rounded if is_split else found, (size, tag))
        if is_split:
            blocks.insert(position + 1, (rest, None))
        return True

    def free(self, size: int, tag: int = 0) -> None:
        """Free a tensor of this size and tag: of several, the one in the first segment, at the lowest address."""
        owner = (size, tag)
        for segment in self._segments:
            blocks = segment.blocks
            for position, block in enumerate(blocks):
                if block[1] == owner:
                    first, end = position, position + 1
                    if end < len(blocks) and blocks[end][1] is None:
                        end += 1
                    if first and blocks[first - 1][1] is None:
                        first -= 1
                    blocks[first:end] = [(sum(length for length, _ in blocks[first:end]), None)]
                    return
        raise KeyError(owner)

    def state(self) -> object:
        """Return a value that is equal for allocators that treat all that follows equally."""
        return tuple([(segment.is_small, *segment.blocks) for segment in self._segments])

    def copy(self) -> CachingAllocator:
        """Return an allocator in the same state."""
        segments = [_Segment(segment.is_small, segment.blocks.copy()) for segment in self._segments]
        return CachingAllocator(self.memory, self.reserved, self.peak, segments)

    def _fitting(self, size: int, is_small: bool) -> Iterator[tuple[int, int, int]]:
        """Yield the free blocks with room for `size`: size, segment, position."""
        for number, segment in enumerate(self._segments):
            if segment.is_small == is_small:
                for position, (room, owner) in enumerate(segment.blocks):
                    if owner is None and room >= size:
                        yield room, number, position

    def _reserve(self, size: int, is_small: bool) -> bool:
        """Reserve a segment for a tensor; return whether there is memory for it."""
        large = MEDIUM_SEGMENT if size < MEDIUM else -(-size // LARGE_UNIT) * LARGE_UNIT
        room = SMALL_SEGMENT if is_small else large
        if self.reserved + room > self.memory:
            self._segments = [s for s in self._segments if len(s.blocks) > 1 or s.blocks[0][1] is not None]
            self.reserved = sum(length for segment in self._segments for length, _ in segment.blocks)
        if self.reserved + room > self.memory:
            return False
        self.reserved += room
        self.peak = max(self.peak, self.reserved)
        self._segments.append(_Segment(is_small, [(room, None)]))
        return True
