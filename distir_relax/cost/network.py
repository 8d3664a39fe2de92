"""Cost of collectives: standard algorithms over a topology of levels, each with a link latency and bandwidth.

With n devices, a latency of ``a`` seconds and ``b`` seconds per byte, for a tensor of B bytes::

    ring all-reduce           2 (n - 1) (a + B b / n)          each device sends 2 B (n - 1) / n bytes
    doubling all-reduce       ceil(log2 n) (a + B b)           fewer steps: better for small tensors
    tree all-reduce           2 (ceil(log2 n) a + B b)         up and down a pipelined tree: better on many devices
    ring all-gather           (n - 1) (a + s b)                s the largest shard
    ring reduce-scatter       (n - 1) (a + s b)
    pairwise all-to-all       (n - 1) (a + B b / n)
    send                      a + B b

Over several levels each step has the latency and bandwidth of its own messages: `cost.network_steps` derives a table of
steps from where the devices are. If they are in several units, equally many in each, hierarchical algorithms are
considered too, over two levels and more. An all-reduce: reduce-scatter within a unit, all-reduce between units,
all-gather within. An all-gather: each device gathers the shards of its position in all units, then those of its unit; a
reduce-scatter the other way around. An all-to-all: each device gets what its unit has for those at its position in
other units, then sends it there. And rings in parallel, as NCCL has them: as many as a unit has devices, each through
all devices, crossing units on another device's link, with a part of each message. They take more steps, but links
within and between units work at the same time. In all of these every device of a unit sends over its own link; if the
unit has an uplink, they share it. The cost is that of the fastest algorithm.

All groups of an op communicate at the same time, and share uplinks. Each is timed as if the others sent as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from distir_relax.cost.network_steps import Algorithm, algorithms, seconds_of, uplink_seconds
from distir_relax.cost.profile import Level, Profile
from distir_relax.errors import ProfileError
from distir_relax.layout import Collective

_COLLECTIVES = frozenset(Collective)


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """The seconds of a collective, and its use of uplinks.

    `uplinks` has for each level with an uplink that it crosses the level's number, the seconds for which all groups of
    the op occupy the most loaded uplink at its full bandwidth, and the seconds in which the group's bytes cross it.
    """

    seconds: float
    uplinks: tuple[tuple[int, float, float], ...] = ()


def collective_seconds(
    profile: Profile,
    name: str | None,
    members: Sequence[int],
    sizes: Sequence[float],
    groups: npt.NDArray[Any] | None = None,
) -> float:
    """Return the seconds of the collective called `name`. Arguments and errors are those of `collective_timing`."""
    return collective_timing(profile, name, members, sizes, groups).seconds


def collective_timing(
    profile: Profile,
    name: str | None,
    members: Sequence[int],
    sizes: Sequence[float],
    groups: npt.NDArray[Any] | None = None,
) -> CollectiveTiming:
    """Return the time of the collective called `name` on the devices `members`.

    `sizes` are the bytes of each: the whole tensor for ``all_reduce``, ``reduce_scatter`` and ``all_to_all``, its shard
    for ``all_gather``, the message for ``send``, whose members are sender and receiver. `groups` are all groups that
    communicate at the same time, `members` among them, one per row; None if it is the only one. Raises `ProfileError`
    for a communication without a model, or devices that the machine does not have.
    """
    if len(members) < 2:
        return CollectiveTiming(0.0)
    if name not in _COLLECTIVES:
        raise ProfileError(f"there is no model of the communication {name!r}")
    collective = Collective(name)
    if max(members) >= profile.devices:
        raise ProfileError(
            f"the program uses device {max(members)}, the profile {profile.name} has {profile.devices}",
            hint="give a profile of more devices or nodes: NAME:NODES",
        )
    is_gather = collective is Collective.ALL_GATHER
    measured = _measured(profile, collective, members, sum(sizes) if is_gather else max(sizes))
    if measured is not None:
        return CollectiveTiming(profile.collective_overhead + measured)

    size = max(sizes)
    ordered = members if collective is Collective.SEND else sorted(members)
    choices = algorithms(profile.levels, collective, ordered, groups)
    fastest = min(choices, key=lambda algorithm: seconds_of(algorithm, size))
    seconds = profile.collective_overhead + seconds_of(fastest, size)
    return CollectiveTiming(seconds, _uplinks(profile.levels, fastest, size))


def min_seconds_per_byte(profile: Profile) -> float:
    """Return a lower bound of the seconds per byte received, over all collectives: that of the fastest links.

    Parallel rings use a device's links of two levels at once.
    """
    bandwidth = sum(sorted(level.bandwidth for level in profile.levels)[-2:])
    return max(0.0, min(1.0 / bandwidth, *(line.min_seconds_per_byte for line in profile.lines), math.inf))


def level_of(profile: Profile, members: Sequence[int]) -> Level:
    """Return the innermost level with a unit that contains all `members`; the outermost one otherwise."""
    low, high = min(members), max(members)
    return next((level for level in profile.levels if low // level.size == high // level.size), profile.levels[-1])


def _uplinks(levels: Sequence[Level], algorithm: Algorithm, size: float) -> tuple[tuple[int, float, float], ...]:
    numbers = [number for number, level in enumerate(levels) if level.uplink]
    used = [(number, *uplink_seconds(algorithm, size, number)) for number in numbers]
    return tuple(entry for entry in used if entry[1])


def _measured(profile: Profile, collective: Collective, members: Sequence[int], payload: float) -> float | None:
    """Return the seconds by the profile's measured lines, interpolated between the nearest numbers of ranks."""
    count, places = len(members), ("", level_of(profile, members).name)
    rows = (line for line in profile.lines if line.collective == collective and line.level in places)
    lines = sorted(rows, key=lambda line: line.ranks)
    of_recorded = [line for line in lines if line.recorded] if profile.is_recorded else []
    lines = of_recorded or [line for line in lines if not line.recorded]
    if not lines:
        return None
    below = [line for line in lines if line.ranks <= count]
    above = [line for line in lines if line.ranks >= count]
    if below and above:
        low, high = below[-1], above[0]
        if low.ranks == high.ranks:
            return low.seconds(payload)
        share = (count - low.ranks) / (high.ranks - low.ranks)
        return low.seconds(payload) * (1 - share) + high.seconds(payload) * share
    return (below[-1] if below else above[0]).seconds(payload)
