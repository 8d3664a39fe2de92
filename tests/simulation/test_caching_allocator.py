"""The allocator of CUDA devices: cases by hand, and against a plain model of its memory by address."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from distir_relax.cost.profile import Level
from distir_relax.simulation.caching_allocator import MIB, CachingAllocator
from distir_relax.simulation.events import Change
from distir_relax.simulation.reserved_memory import ReservedMemory
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine as made
from tests.simulation.schedules import schedule

LARGE = 100 * MIB


def reserved_bytes(changes: list[tuple[int, int]], memory: float) -> int | None:
    """The same for bytes and tags of one device."""
    return ReservedMemory([Change(0, 3, size, tag) for size, tag in changes]).peak(3, memory)


def test_small_tensors_share_a_segment() -> None:
    assert reserved_bytes([(300, 0)] * 4096, 1e12) == 2 * MIB
    assert reserved_bytes([(300, 0)] * 4097, 1e12) == 4 * MIB
    assert reserved_bytes([(MIB, 0)] * 3, 1e12) == 4 * MIB


def test_tensors_below_ten_mebibytes_share_twenty() -> None:
    assert reserved_bytes([(9 * MIB, 0)] * 2, 1e12) == 20 * MIB
    assert reserved_bytes([(9 * MIB, 0)] * 3, 1e12) == 40 * MIB
    assert reserved_bytes([(9 * MIB, 0), (2 * MIB, 0)] * 2, 1e12) == 40 * MIB
    assert reserved_bytes([(MIB + 1, 0)], 1e12) == 20 * MIB


def test_a_large_tensor_has_a_segment_of_its_size() -> None:
    assert reserved_bytes([(10 * MIB, 0)], 1e12) == 10 * MIB
    assert reserved_bytes([(10 * MIB + 1, 0)], 1e12) == 12 * MIB


def test_what_is_free_is_used_again_and_split() -> None:
    changes = [(LARGE, 0), (-LARGE, 0), (60 * MIB, 0), (40 * MIB, 0)]
    assert reserved_bytes(changes, 1e12) == LARGE
    assert reserved_bytes([*changes, (MIB, 0)], 1e12) == LARGE + 2 * MIB


def test_pieces_between_tensors_are_lost() -> None:
    # Two of three pieces are free, which do not touch: they have room for 60 MiB in total, but not in one piece.
    halves = [(LARGE, 0), (-LARGE, 0), (30 * MIB, 0), (40 * MIB, 1), (30 * MIB, 2), (-30 * MIB, 0), (-30 * MIB, 2)]
    assert reserved_bytes([*halves, (60 * MIB, 0)], 1e12) == 160 * MIB
    assert reserved_bytes([*halves, (-40 * MIB, 1), (60 * MIB, 0)], 1e12) == LARGE


def test_segments_without_a_tensor_are_given_back_before_memory_runs_out() -> None:
    changes = [(60 * MIB, 0), (-60 * MIB, 0), (LARGE, 0)]
    assert reserved_bytes(changes, 160 * MIB) == 160 * MIB
    assert reserved_bytes(changes, 120 * MIB) == LARGE
    assert reserved_bytes(changes, 90 * MIB) is None
    held = [(60 * MIB, 0), (20 * MIB, 1), (-60 * MIB, 0), (30 * MIB, 0), (60 * MIB, 2)]
    assert reserved_bytes(held, 130 * MIB) is None, "30 of the 60 MiB are in use, so none is given back"
    assert reserved_bytes(held, 140 * MIB) == 140 * MIB


class Addresses:
    """The same rules over a map of addresses: what is between two tensors is found by looking at all of them."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.segments: list[tuple[int, bool, list[tuple[int, int]]]] = []
        self.where: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @property
    def reserved(self) -> int:
        """The sizes of all segments."""
        return sum(room for room, _, _ in self.segments)

    def allocate(self, size: int, tag: int) -> bool:
        """Take the smallest gap that is large enough, of the first segment that has one."""
        rounded = max(512, -(-size // 512) * 512)
        small = rounded <= MIB
        gaps = []
        for number, (room, is_small, used) in enumerate(self.segments):
            ends = [0, *(start + length for start, length in sorted(used))]
            starts = [*(start for start, _ in sorted(used)), room]
            if is_small == small:
                gaps += [(b - a, number, a) for a, b in zip(ends, starts, strict=True) if b - a >= rounded]
        if gaps:
            gap, number, start = min(gaps)
        else:
            gap = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            if self.reserved + gap > self.memory:
                self.drop_unused()
            if self.reserved + gap > self.memory:
                return False
            number, start = len(self.segments), 0
            self.segments.append((gap, small, []))
        rest = gap - rounded
        taken = rounded if (rest >= 512 if small else rest > MIB) else gap
        self.segments[number][2].append((start, taken))
        self.where.setdefault((size, tag), []).append((number, start))
        return True

    def drop_unused(self) -> None:
        """Give back the segments without a tensor."""
        kept = [number for number, (_, _, used) in enumerate(self.segments) if used]
        self.segments = [self.segments[number] for number in kept]
        moved = ((owner, [(kept.index(n), start) for n, start in places]) for owner, places in self.where.items())
        self.where = dict(moved)

    def free(self, size: int, tag: int) -> None:
        """Give the first one back."""
        first = min(self.where[size, tag])
        self.where[size, tag].remove(first)
        number, start = first
        used = self.segments[number][2]
        used[:] = [piece for piece in used if piece[0] != start]


@pytest.mark.parametrize("memory", [1e15, 700 * MIB, 300 * MIB])
@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_reserve_what_a_map_of_addresses_does(seed: int, memory: float) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice((700, 40_000, MIB, 3 * MIB + 5, 9 * MIB, 17 * MIB, 64 * MIB + 1)) for _ in range(5)]
    ours, reference = CachingAllocator(memory), Addresses(memory)
    live: list[tuple[int, int]] = []
    for number in range(300):
        if live and draw.random() < 0.48:
            item = live.pop(draw.randrange(len(live)))
            ours.free(*item)
            reference.free(*item)
        else:
            item = (draw.choice(sizes), draw.randrange(2))
            has_room = ours.allocate(*item)
            assert has_room == reference.allocate(*item)
            live += [item] if has_room else []
        assert ours.reserved == reference.reserved
        if number % 50 == 0:
            ours = ours.copy()


@pytest.mark.parametrize("seed", range(10))
def test_calls_that_are_not_replayed_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(made(8, (Level("pair", 2, 1e-6, 4e9), Level("box", 100, 3e-6, 1e9))), caching_allocator=True)
    simulation = simulate_module(schedule(seed), profile)
    short = [simulation.reserved(device) for device in range(simulation.devices)]
    monkeypatch.setattr(CachingAllocator, "state", lambda self: object())
    whole = simulate_module(schedule(seed), profile)
    assert short == [whole.reserved(device) for device in range(whole.devices)]
    assert all(
        reserved is not None and reserved >= peak for reserved, peak in zip(short, whole.peak_memory, strict=True)
    )
