"""Memory that the caching allocators of devices reserve during a simulated run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.simulation.caching_allocator import CachingAllocator
from distir_relax.simulation.events import Called, Change

_Sequence = tuple[tuple[int, int] | int, ...]
"""The allocations and frees of a class of devices, each with bytes and category, and calls by number of sequence."""


@dataclass
class AllocatorReplays:
    """Sequences of allocations and frees of calls, and their effects on allocators, for any number of simulations.

    A call that finds an allocator in the same state as an earlier call with the same allocations and frees leaves it in
    the same state, and is not replayed.
    """

    _sequences: list[_Sequence] = field(default_factory=list)
    _numbers: dict[_Sequence, int] = field(default_factory=dict)
    """The number of each sequence."""
    _by_call: dict[int, tuple[Sequence[Change | Called], dict[int, int]]] = field(default_factory=dict)
    """The changes of a call, by their identity, with the number of the sequence of each class in them."""
    _after: dict[float, dict[tuple[int, int], _After | None]] = field(default_factory=dict)
    """What follows a call, by the memory of the device, the call's sequence, and the number of the state before; None
    if memory runs out."""
    _states: dict[object, int] = field(default_factory=dict)
    """The number of each state of an allocator."""

    def divide(self, changes: Sequence[Change | Called]) -> dict[int, _Sequence]:
        """Return the sequence of each class of devices in changes."""
        items: dict[int, list[tuple[int, int] | int]] = defaultdict(list)
        for change in changes:
            if isinstance(change, Called):
                for device_class, number in self._of_call(change.changes).items():
                    items[device_class].append(number)
            elif change.bytes:
                items[change.device_class].append((change.bytes, change.category))
        return {device_class: tuple(found) for device_class, found in items.items()}

    def peak(self, sequence: _Sequence, memory: float) -> int | None:
        """Return the most bytes that an allocator of a device reserves for a sequence, None if it has not enough."""
        replay = _Replay(self._sequences, CachingAllocator(memory), self._states, self._after.setdefault(memory, {}))
        return replay.peak if replay.run(sequence) else None

    def _of_call(self, changes: Sequence[Change | Called]) -> dict[int, int]:
        found = self._by_call.get(id(changes))
        if found is None:
            numbers = {device_class: self._number(items) for device_class, items in self.divide(changes).items()}
            found = self._by_call[id(changes)] = changes, numbers
        return found[1]

    def _number(self, sequence: _Sequence) -> int:
        number = self._numbers.setdefault(sequence, len(self._sequences))
        if number == len(self._sequences):
            self._sequences.append(sequence)
        return number


@dataclass
class ReservedMemory:
    """The bytes that allocators reserve for `changes`, those of the entry function of a simulation.

    Classes of devices with the same allocations and frees share the result.
    """

    changes: Sequence[Change | Called]
    replays: AllocatorReplays = field(default_factory=AllocatorReplays)
    _sequences: dict[int, _Sequence] | None = None
    _peaks: dict[tuple[_Sequence, float], int | None] = field(default_factory=dict)

    def peak(self, device_class: int, memory: float) -> int | None:
        """Return the most bytes that the allocator of a device of a class with `memory` bytes reserves.

        None if the device does not have enough.
        """
        if self._sequences is None:
            self._sequences = self.replays.divide(self.changes)
        sequence = self._sequences.get(device_class)
        if sequence is None:
            return 0
        key = sequence, memory
        if key not in self._peaks:
            self._peaks[key] = self.replays.peak(sequence, memory)
        return self._peaks[key]


@dataclass(frozen=True, slots=True)
class _After:
    """The allocator after a call, the number of its state, and its peak during the call."""

    allocator: CachingAllocator
    state: int
    peak: int


@dataclass
class _Replay:
    sequences: Sequence[_Sequence]
    allocator: CachingAllocator
    """The allocator now. Those after calls are kept, and never change: they are copied before they would."""
    states: dict[object, int]
    after: dict[tuple[int, int], _After | None]
    peak: int = 0
    _state: int | None = None
    """The number of the allocator's state, equal for equal states; None if it has changed since the last call."""

    def run(self, sequence: _Sequence) -> bool:
        """Replay a sequence; return whether there was memory for all."""
        for item in sequence:
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
        if key not in self.after:
            before, self.peak = self.peak, 0
            has_room = self.run(self.sequences[number])
            self.after[key] = _After(self.allocator, self._state_number(), self.peak) if has_room else None
            self.peak = max(self.peak, before)
        after = self.after[key]
        if after is None:
            return False
        self.allocator, self._state = after.allocator, after.state
        self.peak = max(self.peak, after.peak)
        return True

    def _state_number(self) -> int:
        if self._state is None:
            self._state = self.states.setdefault(self.allocator.state(), len(self.states))
        return self._state
