"""Memory that the caching allocator of a device reserves during a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.analysis.caching_allocator import CachingAllocator
from distir_relax.analysis.events import Called, Change


def reserved_bytes(changes: Sequence[Change | Called], device_class: int, memory: float) -> int | None:
    """Return the most bytes that the allocator of a class of devices with `memory` bytes reserves.

    `changes` are those of the entry function. A call that finds the allocator in the same state as an earlier call of
    the same function leaves it in the same state, and is not replayed. None if the device does not have enough.
    """
    replay = _Replay(device_class, CachingAllocator(memory))
    return replay.allocator.peak if replay.run(changes) else None


@dataclass
class _Replay:
    device_class: int
    allocator: CachingAllocator
    _after: dict[object, CachingAllocator | None] = field(default_factory=dict)
    """The allocator after a call, by the call's changes and the state before; None if memory has run out."""
    _concerns: dict[int, bool] = field(default_factory=dict)
    """Whether changes, by identity, are any of the class."""

    def run(self, changes: Sequence[Change | Called]) -> bool:
        """Replay changes in order; return whether there was memory for all."""
        for change in changes:
            if isinstance(change, Called):
                if self._is_concerned(change.changes) and not self._call(change.changes):
                    return False
            elif change.device_class == self.device_class:
                if change.bytes < 0:
                    self.allocator.free(-change.bytes, change.category)
                elif change.bytes and not self.allocator.allocate(change.bytes, change.category):
                    return False
        return True

    def _call(self, changes: Sequence[Change | Called]) -> bool:
        before = self.allocator
        key = id(changes), before.state()
        if key not in self._after:
            self.allocator = before.copy()
            self._after[key] = self.allocator if self.run(changes) else None
        after = self._after[key]
        if after is None:
            return False
        peak = max(before.peak, after.peak)
        # An allocator kept for later calls must not change.
        self.allocator = after.copy()
        self.allocator.peak = peak
        return True

    def _is_concerned(self, changes: Sequence[Change | Called]) -> bool:
        found = self._concerns.get(id(changes))
        if found is None:
            found = self._concerns[id(changes)] = any(
                self._is_concerned(change.changes)
                if isinstance(change, Called)
                else change.device_class == self.device_class
                for change in changes
            )
        return found
