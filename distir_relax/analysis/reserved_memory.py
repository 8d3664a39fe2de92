"""Memory that the caching allocators of devices reserve during a simulated run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.analysis.caching_allocator import CachingAllocator
from distir_relax.analysis.events import Called, Change

_Sequence = tuple[tuple[int, int] | int, ...]
"""The allocations and frees of a class of devices, each with bytes and category, and calls by number of sequence."""


@dataclass
class ReservedMemory:
    """The bytes that allocators reserve for `changes`, those of the entry function of a simulation.

    A call that finds the allocator in the same state as an earlier call with the same allocations and frees leaves it
    in the same state, and is not replayed; and classes of devices with the same allocations and frees share the result.
    """

    changes: Sequence[Change | Called]
    _sequences: list[_Sequence] = field(default_factory=list)
    _numbers: dict[_Sequence, int] = field(default_factory=dict)
    """The number of each sequence."""
    _by_class: dict[int, dict[int, int]] = field(default_factory=dict)
    """The numbers of the sequences of all classes in changes, by the identity of these."""
    _peaks: dict[tuple[int, float], int | None] = field(default_factory=dict)

    def peak(self, device_class: int, memory: float) -> int | None:
        """Return the most bytes that the allocator of a device of a class with `memory` bytes reserves.

        None if the device does not have enough.
        """
        number = self._divide(self.changes).get(device_class)
        if number is None:
            return 0
        key = number, memory
        if key not in self._peaks:
            replay = _Replay(self._sequences, CachingAllocator(memory))
            self._peaks[key] = replay.peak if replay.run(number) else None
        return self._peaks[key]

    def _divide(self, changes: Sequence[Change | Called]) -> dict[int, int]:
        """Return the number of the sequence of each class."""
        result = self._by_class.get(id(changes))
        if result is None:
            items: dict[int, list[tuple[int, int] | int]] = defaultdict(list)
            for change in changes:
                if isinstance(change, Called):
                    for device_class, number in self._divide(change.changes).items():
                        items[device_class].append(number)
                elif change.bytes:
                    items[change.device_class].append((change.bytes, change.category))
            result = {device_class: self._number(tuple(found)) for device_class, found in items.items()}
            self._by_class[id(changes)] = result
        return result

    def _number(self, sequence: _Sequence) -> int:
        number = self._numbers.setdefault(sequence, len(self._sequences))
        if number == len(self._sequences):
            self._sequences.append(sequence)
        return number


@dataclass
class _Replay:
    sequences: Sequence[_Sequence]
    allocator: CachingAllocator
    """The allocator now. Those after calls are kept, and never change: they are copied before they would."""
    peak: int = 0
    _state: int | None = None
    """The number of the allocator's state, equal for equal states; None if it has changed since the last call."""
    _states: dict[object, int] = field(default_factory=dict)
    """The number of each state."""
    _after: dict[tuple[int, int], tuple[CachingAllocator, int] | None] = field(default_factory=dict)
    """The allocator after a call, and the number of its state, by the call's sequence and the state before; None if
    memory has run out."""

    def run(self, number: int) -> bool:
        """Replay a sequence; return whether there was memory for all."""
        for item in self.sequences[number]:
            if isinstance(item, int):
                if not self._call(item):
                    return False
                continue
            if self._state is not None:
                # It is kept as the state after a call.
                self.allocator, self._state = self.allocator.copy(), None
            size, category = item
            if size < 0:
                self.allocator.free(-size, category)
            elif self.allocator.allocate(size, category):
                self.peak = max(self.peak, self.allocator.reserved)
            else:
                return False
        return True

    def _call(self, number: int) -> bool:
        key = number, self._state_number()
        if key not in self._after:
            self._after[key] = (self.allocator, self._state_number()) if self.run(number) else None
        after = self._after[key]
        if after is None:
            return False
        # The peak has already risen to that of the call, when it was replayed.
        self.allocator, self._state = after
        return True

    def _state_number(self) -> int:
        if self._state is None:
            self._state = self._states.setdefault(self.allocator.state(), len(self._states))
        return self._state
