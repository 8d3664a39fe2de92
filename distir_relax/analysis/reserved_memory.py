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
    return replay.peak if replay.run(changes) else None


@dataclass
class _Replay:
    device_class: int
    allocator: CachingAllocator
    """The allocator now. Those after calls are kept, and never change: they are copied before they would."""
    peak: int = 0
    _number: int | None = None
    """The number of the allocator's state, equal for equal states; None if it has changed since the last call."""
    _numbers: dict[object, int] = field(default_factory=dict)
    """The number of each state."""
    _after: dict[tuple[int, int], tuple[CachingAllocator, int] | None] = field(default_factory=dict)
    """The allocator after a call, and the number of its state, by the call's changes and the state before; None if
    memory has run out."""
    _of_class: dict[int, Sequence[Change | Called]] = field(default_factory=dict)
    """The changes of the class among changes, by identity, with calls that have any."""

    def run(self, changes: Sequence[Change | Called]) -> bool:
        """Replay changes in order; return whether there was memory for all."""
        for change in self._concerning(changes):
            if isinstance(change, Called):
                if not self._call(change.changes):
                    return False
                continue
            if self._number is not None:
                # It is kept as the state after a call.
                self.allocator, self._number = self.allocator.copy(), None
            if change.bytes < 0:
                self.allocator.free(-change.bytes, change.category)
            elif change.bytes:
                if not self.allocator.allocate(change.bytes, change.category):
                    return False
                self.peak = max(self.peak, self.allocator.reserved)
        return True

    def _call(self, changes: Sequence[Change | Called]) -> bool:
        key = id(changes), self._state()
        if key not in self._after:
            self._after[key] = (self.allocator, self._state()) if self.run(changes) else None
        after = self._after[key]
        if after is None:
            return False
        # The peak has already risen to that of the call, when it was replayed.
        self.allocator, self._number = after
        return True

    def _state(self) -> int:
        if self._number is None:
            self._number = self._numbers.setdefault(self.allocator.state(), len(self._numbers))
        return self._number

    def _concerning(self, changes: Sequence[Change | Called]) -> Sequence[Change | Called]:
        found = self._of_class.get(id(changes))
        if found is None:
            found = self._of_class[id(changes)] = [
                change
                for change in changes
                if (
                    self._concerning(change.changes)
                    if isinstance(change, Called)
                    else change.device_class == self.device_class
                )
            ]
        return found
