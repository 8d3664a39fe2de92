"""Memory that a caching allocator reserves for a sequence of allocations and frees: torch's, of CUDA devices.

Its rules (`c10/cuda/CUDACachingAllocator.cpp`): sizes are multiples of 512 bytes. A tensor of at most 1 MiB is put into
a segment of 2 MiB; a larger one into one of 20 MiB, or, from 10 MiB on, of its own size in units of 2 MiB. The smallest
free block that is large enough is taken, the first of equal ones, and split if the rest is worth it. A free block is
merged with free neighbors. Segments are kept; when memory runs out, those without a tensor are given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 1 << 20
UNIT = 512
SMALL, MEDIUM = MIB, 10 * MIB
"""The largest tensor of a small segment, and the smallest one that has a segment of its size."""
SMALL_SEGMENT, MEDIUM_SEGMENT, LARGE_UNIT = 2 * MIB, 20 * MIB, 2 * MIB

Owner = tuple[int, int] | None
"""The size and the tag of the tensor in a block; None if it is free."""

# Addresses are offsets in a segment, after its number: no two segments touch.
_SEGMENT_BITS = 64


@dataclass(slots=True)
class CachingAllocator:
    """The allocator of one device with `memory` bytes; `reserved` is the size of its segments."""

    memory: float
    reserved: int = 0
    _segments: list[int] = field(default_factory=list)
    """The size of each segment, in the order in which they were reserved."""
    _blocks: dict[int, tuple[int, Owner]] = field(default_factory=dict)
    """The length and the owner of each block, by its address."""
    _free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))
    """The lengths and addresses of free blocks, in ascending order: of large segments, and of small ones."""
    _free_ends: dict[int, int] = field(default_factory=dict)
    """The address of each free block, by that of its end."""
    _tensors: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """The addresses of the blocks of each owner, in ascending order."""

    def allocate(self, size: int, tag: int = 0) -> bool:
        """Allocate `size` bytes for a tensor of a kind, its `tag`; return whether there is room."""
        rounded = max(UNIT, -(-size // UNIT) * UNIT)
        is_small = rounded <= SMALL
        free = self._free[is_small]
        best = bisect_left(free, (rounded, -1))
        if best == len(free):
            if not self._reserve(rounded, is_small):
                return False
            free = self._free[is_small]
            best = bisect_left(free, (rounded, -1))
        found, address = free.pop(best)
        del self._free_ends[address + found]
        rest = found - rounded
        if rest >= UNIT if is_small else rest > SMALL:
            self._blocks[address] = rounded, (size, tag)
            self._add_free(address + rounded, rest, is_small)
        else:
            self._blocks[address] = found, (size, tag)
        addresses = self._tensors.get((size, tag))
        if addresses is None:
            self._tensors[size, tag] = [address]
        else:
            insort(addresses, address)
        return True

    def free(self, size: int, tag: int = 0) -> None:
        """Free a tensor of this size and tag: of several, the one in the first segment, at the lowest address."""
        addresses = self._tensors[size, tag]
        address = addresses.pop(0)
        if not addresses:
            del self._tensors[size, tag]
        length, _ = self._blocks.pop(address)
        is_small = self._segments[address >> _SEGMENT_BITS] == SMALL_SEGMENT
        after, owner = self._blocks.get(address + length, (0, (0, 0)))
        if owner is None:
            self._remove_free(address + length, after, is_small)
            length += after
        before = self._free_ends.get(address)
        if before is not None:
            self._remove_free(before, address - before, is_small)
            address, length = before, length + address - before
        self._add_free(address, length, is_small)

    def state(self) -> object:
        """Return a value that is equal for allocators that treat all that follows equally."""
        return tuple(sorted(self._blocks.items()))

    def copy(self) -> CachingAllocator:
        """Return an allocator in the same state."""
        free = self._free[0].copy(), self._free[1].copy()
        tensors = {owner: addresses.copy() for owner, addresses in self._tensors.items()}
        segments, blocks, free_ends = self._segments.copy(), self._blocks.copy(), self._free_ends.copy()
        return CachingAllocator(self.memory, self.reserved, segments, blocks, free, free_ends, tensors)

    def _add_free(self, address: int, length: int, is_small: bool) -> None:
        self._blocks[address] = length, None
        self._free_ends[address + length] = address
        insort(self._free[is_small], (length, address))

    def _remove_free(self, address: int, length: int, is_small: bool) -> None:
        del self._blocks[address], self._free_ends[address + length]
        free = self._free[is_small]
        del free[bisect_left(free, (length, address))]

    def _reserve(self, size: int, is_small: bool) -> bool:
        """Reserve a segment for a tensor; return whether there is memory for it."""
        large = MEDIUM_SEGMENT if size < MEDIUM else -(-size // LARGE_UNIT) * LARGE_UNIT
        room = SMALL_SEGMENT if is_small else large
        if self.reserved + room > self.memory:
            self._release_unused()
        if self.reserved + room > self.memory:
            return False
        self.reserved += room
        self._segments.append(room)
        self._add_free(len(self._segments) - 1 << _SEGMENT_BITS, room, is_small)
        return True

    def _release_unused(self) -> None:
        """Give segments without a tensor back, and number the others anew, so that equal states stay equal."""
        kept = [n for n, size in enumerate(self._segments) if self._blocks[n << _SEGMENT_BITS] != (size, None)]
        number = {old << _SEGMENT_BITS: new << _SEGMENT_BITS for new, old in enumerate(kept)}
        offset = (1 << _SEGMENT_BITS) - 1
        blocks, self._blocks = self._blocks, {}
        self._segments = [self._segments[n] for n in kept]
        self.reserved = sum(self._segments)
        self._free, self._free_ends, self._tensors = ([], []), {}, {}
        for address, (length, owner) in sorted(blocks.items()):
            segment = number.get(address & ~offset)
            if segment is None:
                continue
            moved = segment | address & offset
            if owner is None:
                self._add_free(moved, length, self._segments[moved >> _SEGMENT_BITS] == SMALL_SEGMENT)
            else:
                self._blocks[moved] = length, owner
                self._tensors.setdefault(owner, []).append(moved)
