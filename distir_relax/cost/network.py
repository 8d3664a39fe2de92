"""Cost of collectives: standard algorithms over a topology of levels, each with a link latency and bandwidth.

With n devices, a latency of ``a`` seconds and ``b`` seconds per byte, for a tensor of B bytes::

    ring all-reduce           2 (n - 1) (a + B b / n)          each device sends 2 B (n - 1) / n bytes
    doubling all-reduce       ceil(log2 n) (a + B b)           fewer steps: better for small tensors
    tree all-reduce           2 (ceil(log2 n) a + B b)         up and down a pipelined tree: better on many devices
    ring all-gather           (n - 1) (a + s b)                s the largest shard
    ring reduce-scatter       (n - 1) (a + s b)
    pairwise all-to-all       (n - 1) (a + B b / n)
    send                      a + B b

If the devices are in several units, equally many in each, hierarchical algorithms are considered too. An all-reduce:
reduce-scatter within a unit, all-reduce between units, all-gather within. An all-gather: each device gathers the shards
of its position in all units, then those of its unit; a reduce-scatter the other way around. So every device of a unit
sends over a link of its own, as NCCL's rings do, of which each crosses units on another NIC. The cost is that of the
fastest algorithm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from distir_relax.cost.profile import Level, Profile
from distir_relax.errors import ProfileError
from distir_relax.layout import Collective

_COLLECTIVES = frozenset(Collective)


def collective_seconds(profile: Profile, name: str | None, members: Sequence[int], sizes: Sequence[float]) -> float:
    """Return the seconds of the collective called `name`.

    `members` are the participating devices, `sizes` the bytes of each: the whole tensor for ``all_reduce``,
    ``reduce_scatter`` and ``all_to_all``, its shard for ``all_gather``, the message for ``send``. Raises `ProfileError`
    for a communication without a model, or devices that the machine does not have.
    """
    if len(members) < 2:
        return 0.0
    if name not in _COLLECTIVES:
        raise ProfileError(f"there is no model of the communication {name!r}")
    collective = Collective(name)
    if max(members) >= profile.devices:
        raise ProfileError(
            f"the program uses device {max(members)}, the profile {profile.name} has {profile.devices}",
            hint="give a profile of more devices or nodes",
        )
    count = len(members)
    payload = sum(sizes) if collective is Collective.ALL_GATHER else max(sizes)
    measured = _measured(profile, collective, count, payload)
    if measured is not None:
        return measured
    level = level_of(profile, members)
    a, b = level.latency, 1.0 / level.bandwidth
    part = max(sizes) if collective is Collective.ALL_GATHER else payload / count
    match collective:
        case Collective.SEND:
            seconds = a + payload * b
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            seconds = min(collective.rounds(count) * (a + part * b), _hierarchical_gather(profile, members, part))
        case Collective.ALL_TO_ALL:
            seconds = collective.rounds(count) * (a + part * b)
        case Collective.ALL_REDUCE:
            ring = collective.rounds(count) * (a + part * b)
            rounds = math.ceil(math.log2(count))
            doubling = rounds * (a + payload * b)
            tree = 2 * (rounds * a + payload * b)
            seconds = min(ring, doubling, tree, _hierarchical(profile, members, payload))
    return profile.collective_overhead + seconds


def min_seconds_per_byte(profile: Profile) -> float:
    """Return a lower bound of the seconds per byte received, over all collectives: that of the fastest link."""
    rates = [1.0 / level.bandwidth for level in profile.levels]
    return max(0.0, min(*rates, *(line.min_seconds_per_byte for line in profile.lines), math.inf))


def level_of(profile: Profile, members: Sequence[int]) -> Level:
    """Return the innermost level with a unit that contains all `members`; the outermost one otherwise."""
    low, high = min(members), max(members)
    return next((level for level in profile.levels if low // level.size == high // level.size), profile.levels[-1])


def _two_levels(profile: Profile, members: Sequence[int]) -> Iterator[tuple[Level, Level, int, int]]:
    """Yield inner and outer level, devices in a unit, and units, where all units have equally many devices."""
    for inner in profile.levels[:-1]:
        units = Counter(member // inner.size for member in members)
        counts = set(units.values())
        if len(units) > 1 and len(counts) == 1 and counts != {1}:
            yield inner, level_of(profile, members), counts.pop(), len(units)


def _hierarchical_gather(profile: Profile, members: Sequence[int], part: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of shards of `part` bytes in two levels, or infinity."""
    return min(
        (
            (m - 1) * (outer.latency + part / outer.bandwidth) + (n - 1) * (inner.latency + m * part / inner.bandwidth)
            for inner, outer, n, m in _two_levels(profile, members)
        ),
        default=math.inf,
    )


def _hierarchical(profile: Profile, members: Sequence[int], payload: float) -> float:
    """Return the seconds of an all-reduce in two levels, infinite if units have unequal numbers of devices."""
    best = math.inf
    for inner, outer, n, m in _two_levels(profile, members):
        within = 2 * (n - 1) * (inner.latency + payload / n / inner.bandwidth)
        part = payload / n
        ring = 2 * (m - 1) * (outer.latency + part / m / outer.bandwidth)
        doubling = math.ceil(math.log2(m)) * (outer.latency + part / outer.bandwidth)
        best = min(best, within + min(ring, doubling))
    return best


def _measured(profile: Profile, collective: Collective, count: int, payload: float) -> float | None:
    """Return the seconds by the profile's measured lines, interpolated between the nearest numbers of ranks."""
    lines = sorted((line for line in profile.lines if line.collective == collective), key=lambda line: line.ranks)
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
