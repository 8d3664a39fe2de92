"""Collective algorithms as tables of steps over a topology: messages in turn, and the bottleneck link of each.

In a step each device of each group sends one message, and all groups of an op take the step together. A message between
two devices belongs to the innermost level that joins them. It loads the link of either end at that level, whose
bandwidth no other device shares, and the uplink of each unit below that level, which it leaves at one end and enters at
the other; links are full duplex. A step takes the largest latency of its messages' levels, and the largest time of a
link: its bytes by its bandwidth. Members of a group are in ascending order, so those of a unit follow each other.

Most steps are *shifts*: member i of a group of n sends to member ``i + r`` modulo n. Of k members in a unit, all but
``max(0, k - r) + max(0, k - n + r)`` leave it. So a table of all n - 1 shifts costs no more than its distinct units.

If the units of a group have equally many members, its positions are a grid, ``n = n_0 n_1 ... n_T``, with n_0 members
in a unit of the innermost chosen level. A hierarchical algorithm takes the axes of the grid in turn. Parallel rings use
both axes of a grid of two in each step, as NCCL's rings do, of which each crosses units on another NIC. The other
groups of the op do the same by position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.cost.profile import Level
from distir_relax.layout import Collective

Array = npt.NDArray[Any]


_EVERYWHERE = 1 << 62
"""The size of a unit that contains all devices."""


@dataclass(frozen=True, slots=True)
class Step:
    """`times` steps in turn, in each of which a device sends ``pieces / of`` of the size of a collective.

    Each takes ``latency + bytes * seconds_per_byte``; `uplinks` has the seconds per byte on the most loaded uplink of
    each level, 0 where no uplink is used. The size is that of a shard for an all-gather, of a device's buffer
    otherwise.
    """

    times: int
    pieces: int
    of: int
    latency: float
    seconds_per_byte: float
    uplinks: tuple[float, ...]

    def moving(self, size: float) -> float:
        """Return the seconds of the bytes of one of these steps."""
        return size * self.pieces / self.of * self.seconds_per_byte


Algorithm = tuple[Step, ...]
"""The steps of an algorithm, in turn."""


def seconds_of(algorithm: Algorithm, size: float) -> float:
    """Return the seconds of an algorithm for a size in bytes."""
    return sum([step.times * (step.latency + step.moving(size)) for step in algorithm])


def uplink_seconds(algorithm: Algorithm, size: float, level: int) -> tuple[float, float]:
    """Return for how long an algorithm occupies the uplink of a level, and how long its steps over it take in bytes."""
    crossing = [step for step in algorithm if step.uplinks[level]]
    occupied = sum([step.times * size * step.pieces / step.of * step.uplinks[level] for step in crossing])
    return occupied, sum([step.times * step.moving(size) for step in crossing])


def algorithms(
    levels: tuple[Level, ...], collective: Collective, members: Sequence[int], groups: Array | None = None
) -> tuple[Algorithm, ...]:
    """Return the algorithms that a group may run a collective by.

    `members` are the group's devices: sender and receiver for ``send``, otherwise in ascending order. `groups` are all
    groups of the op, one per row, with the members as one of them; None if it is the only one. They matter only where a
    level has an uplink.
    """
    if groups is None or len(groups) == 1 or not any(level.uplink for level in levels):
        return _cached(levels, collective, tuple(members), b"")
    return _cached(levels, collective, tuple(members), np.ascontiguousarray(groups, dtype=np.int64).tobytes())


# A search times the same groups for many programs and sizes.
@lru_cache(maxsize=1024)
def _cached(
    levels: tuple[Level, ...], collective: Collective, members: tuple[int, ...], others: bytes
) -> tuple[Algorithm, ...]:
    own = np.array([members], dtype=np.int64)
    groups = np.frombuffer(others, dtype=np.int64).reshape(-1, len(members)) if others else own
    network = _Network(levels, groups, own)
    match collective:
        case Collective.SEND:
            return ((network.exchange(1, 1, 1, (np.array([0]), np.array([1]), 1.0)),),)
        case Collective.ALL_TO_ALL:
            return tuple(_all_to_all(network))
        case Collective.ALL_GATHER:
            return tuple(_gather(network, len(members)))
        case Collective.REDUCE_SCATTER:
            return tuple(_gather(network, 1))
        case Collective.ALL_REDUCE:
            return tuple(_all_reduce(network))


def _all_to_all(network: _Network) -> Iterator[Algorithm]:
    """Pairwise, over all devices or along each axis of a grid: the data for a column, then the data for a row of it."""
    for shape in network.shapes():
        phases = [network.along(shape, axis) for axis in range(len(shape))]
        yield tuple(step for phase in phases for step in phase.shifts(1, 1, phase.size, range(1, phase.size)))


def _gather(network: _Network, scale: int) -> Iterator[Algorithm]:
    """Rings: of an all-gather from the outermost axis to the innermost, each with what the one before has gathered.

    A reduce-scatter is the same backward. Messages are fractions of the group's tensor times `scale`.
    """
    for shape in network.shapes():
        steps: list[Step] = []
        gathered = scale
        for axis in reversed(range(len(shape))):
            phase = network.along(shape, axis)
            steps += phase.shifts(phase.size - 1, gathered, network.size, (1,))
            gathered *= phase.size
        yield tuple(steps)
        if len(shape) == 2:
            yield (network.rings(shape[0], network.size - 1, scale, network.size),)


def _all_reduce(network: _Network) -> Iterator[Algorithm]:
    yield tuple(network.tree())
    for shape in network.shapes():
        within: list[Step] = []
        parts = 1
        for axis in range(len(shape) - 1):
            phase = network.along(shape, axis)
            parts *= phase.size
            within += phase.shifts(2 * (phase.size - 1), 1, parts, (1,))
        outer = network.along(shape, len(shape) - 1)
        yield (*within, *outer.shifts(2 * (outer.size - 1), 1, parts * outer.size, (1,)))
        yield (*within, *outer.doubling(parts))
        if len(shape) == 2:
            yield (network.rings(shape[0], 2 * (network.size - 1), 1, network.size),)


@dataclass(frozen=True)
class _Network:
    """The `groups` that take each step together, one per row, and those of them that are timed, `own`."""

    levels: tuple[Level, ...]
    groups: Array
    own: Array

    @property
    def size(self) -> int:
        """The number of members of a group."""
        return int(self.own.shape[1])

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of the own group as a grid of units, innermost axis first: flat, then over 2 levels or more.

        A level divides the group if it has several units, with equally many members, but more than one.
        """
        yield (self.size,)
        counts: list[int] = []
        for level in self.levels[:-1]:
            sizes = set(np.unique(self.own[0] // level.size, return_counts=True)[1].tolist())
            if len(sizes) == 1 and 1 < (count := sizes.pop()) < self.size and count not in counts:
                counts.append(count)
        for number in range(1, len(counts) + 1):
            for chosen in combinations(counts, number):
                ends = (1, *chosen, self.size)
                yield tuple(b // a for a, b in pairwise(ends))

    def along(self, shape: Sequence[int], axis: int) -> _Network:
        """Return the groups along an axis of a grid of positions, which take their steps together."""
        if len(shape) == 1:
            return self

        def split(rows: Array) -> Array:
            grid = rows.reshape(-1, *reversed(shape))
            return np.moveaxis(grid, len(shape) - axis, -1).reshape(-1, shape[axis])

        return _Network(self.levels, split(self.groups), split(self.own))

    def shifts(self, times: int, pieces: int, of: int, shifts: Sequence[int]) -> list[Step]:
        """Return the steps in which members send to those `shifts` after them; equal ones are counted, or `times`."""
        n, r = self.size, np.asarray(shifts)
        crossing = np.full(len(r), self.own.size)
        latency, per_byte = np.zeros(len(r)), np.zeros(len(r))
        uplinks = np.zeros((len(r), len(self.levels)))
        for number, level in enumerate(self.levels):
            leaving = np.zeros(len(r), dtype=np.int64)
            if number < len(self.levels) - 1:
                _, units, members = _runs(self.own, level.size)
                for count in np.unique(members):
                    leaving += (members == count).sum() * _leaving(count, n, r)
                if level.uplink:
                    uplinks[:, number] = self._shift_load(level, units, members, r) / level.uplink
            here = crossing > leaving
            latency = np.where(here, np.maximum(latency, level.latency), latency)
            per_byte = np.where(here, np.maximum(per_byte, 1.0 / level.bandwidth), per_byte)
            crossing = leaving
        per_byte = np.maximum(per_byte, uplinks.max(axis=1))
        rows, counts = np.unique(np.column_stack([latency, per_byte, uplinks]), axis=0, return_counts=True)
        scale = times if len(r) == 1 else 1
        return [
            Step(scale * int(count), pieces, of, float(row[0]), float(row[1]), tuple(row[2:].tolist()))
            for row, count in zip(rows, counts, strict=True)
        ]

    def _shift_load(self, level: Level, own_units: Array, own_members: Array, r: Array) -> Array:
        """Return for each shift the most messages over the uplink of a unit that own groups leave."""
        _, units, members = _runs(self.groups, level.size)
        sizes, kinds = np.unique(members, return_inverse=True)
        present, index = np.unique(units, return_inverse=True)
        groups_of = np.bincount(index * len(sizes) + kinds, minlength=len(present) * len(sizes))
        groups_of = groups_of.reshape(len(present), len(sizes))
        own = np.column_stack([groups_of[np.searchsorted(present, own_units)], own_members])
        distinct = np.unique(own, axis=0)
        leaving = np.stack([_leaving(count, self.size, r) for count in sizes])
        loads = distinct[:, :-1] @ leaving
        used = np.stack([_leaving(count, self.size, r) > 0 for count in distinct[:, -1]])
        most: Array = np.where(used, loads, 0).max(axis=0)
        return most

    def exchange(self, times: int, pieces: int, of: int, *patterns: tuple[Array, Array, float]) -> Step:
        """Return the step in which members at some positions send to those at others, each to one.

        Of several `patterns` (sources, targets, share of a message) at the same time, a device's messages of each use
        links of another level.
        """
        latency = per_byte = 0.0
        uplinks = [0.0] * len(self.levels)
        edges = [(self.own[:, source], self.own[:, target], share) for source, target, share in patterns]
        remaining = [np.ones(source.shape, dtype=bool) for source, _, _ in edges]
        for number, level in enumerate(self.levels):
            size = level.size if number < len(self.levels) - 1 else _EVERYWHERE
            leaving = [a // size != b // size for a, b, _ in edges]
            for before, after, (_, _, share) in zip(remaining, leaving, edges, strict=True):
                if (before & ~after).any():
                    latency, per_byte = max(latency, level.latency), max(per_byte, share / level.bandwidth)
            if level.uplink and any(part.any() for part in leaving):
                uplinks[number] = self._exchange_load(level.size, patterns) / level.uplink
            remaining = leaving
        return Step(times, pieces, of, latency, max(per_byte, *uplinks), tuple(uplinks))

    def _exchange_load(self, size: int, patterns: Sequence[tuple[Array, Array, float]]) -> float:
        """Return the most messages over the uplink of a unit of `size` that own groups leave or enter."""
        units = int(self.groups.max()) // size + 1
        out, into, uses = np.zeros(units), np.zeros(units), np.zeros((2, units), dtype=bool)
        for source, target, share in patterns:
            for rows, is_own in ((self.groups, False), (self.own, True)):
                a, b = rows[:, source] // size, rows[:, target] // size
                a, b = a[a != b], b[a != b]
                if is_own:
                    uses[0, a] = uses[1, b] = True
                else:
                    out += share * np.bincount(a, minlength=units)
                    into += share * np.bincount(b, minlength=units)
        return float(max(out[uses[0]].max(), into[uses[1]].max()))

    def rings(self, each: int, times: int, pieces: int, of: int) -> Step:
        """Return the step of rings at the same time through all units of `each` members, one for each member.

        Ring r leaves a unit at its member r and enters the next at member r + 1, so it passes from each of the others
        to the one after it in the unit. A message is divided among the rings.
        """
        p = np.arange(self.size)
        unit, after = p // each, (p + 1) % each
        within = (p, unit * each + after, (each - 1) / each)
        between = (p, (unit + 1) * each % self.size + after, 1 / each)
        return self.exchange(times, pieces, of, within, between)

    def doubling(self, of: int) -> Iterator[Step]:
        """Yield the steps of recursive doubling; by dissemination for a number of members that is no power of two."""
        positions = np.arange(self.size)
        for number in range(math.ceil(math.log2(self.size))):
            if self.size & (self.size - 1):
                yield from self.shifts(1, 1, of, (1 << number,))
            else:
                yield self.exchange(1, 1, of, (positions, positions ^ (1 << number), 1.0))

    def tree(self) -> Iterator[Step]:
        """Yield the steps of a reduction up a tree and a broadcast down, pipelined: latencies, then all bytes.

        The units within a unit make a binary tree, whose root stands for the unit in the one of the next level.
        """
        below = self.own[0]
        per_byte = 0.0
        uplinks = [0.0] * len(self.levels)
        none = (0.0,) * len(self.levels)
        for number, level in enumerate(self.levels):
            is_last = number == len(self.levels) - 1
            units = below * 0 if is_last else np.unique(self.own[0]) // level.size
            present, index = np.unique(units, return_inverse=True)
            parts = np.unique(np.column_stack([index, below]), axis=0)[:, 0]
            most = int(np.bincount(parts).max())
            if most > 1:
                yield Step(2 * math.ceil(math.log2(most)), 0, 1, level.latency, 0.0, none)
                per_byte = max(per_byte, 1.0 / level.bandwidth)
            if level.uplink and len(present) > 1:
                rows, of_units, _ = _runs(self.groups, level.size)
                leaves = np.bincount(rows)[rows] > 1
                uplinks[number] = float(np.bincount(of_units[leaves])[present].max()) / level.uplink
            below = units
        yield Step(2, 1, 1, 0.0, max(per_byte, *uplinks), tuple(uplinks))


def _runs(rows: Array, size: int) -> tuple[Array, Array, Array]:
    """Return the row, the unit of `size` devices and the number of members of each part of a row in one unit."""
    units = rows // size
    span = int(units.max()) + 1
    keys, members = np.unique(np.arange(len(rows))[:, None] * span + units, return_counts=True)
    return keys // span, keys % span, members


def _leaving(count: int, n: int, r: Array) -> Array:
    """Return how many of `count` consecutive members of n send to another one of these if all send `r` further."""
    result: Array = count - np.maximum(0, count - r) - np.maximum(0, count - n + r)
    return result
