"""A network of explicit links, and collectives as messages on them, as `collective_seconds` is not computed.

Each device has a link to and from each level; each unit with an uplink has one link out and one in. A round is a list
of messages that all devices send at the same time; it takes the largest latency, and the largest time of a link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from distir_relax.cost.profile import Level

Message = tuple[int, int, float]
"""Sender, receiver, bytes."""
Round = list[Message]


def round_seconds(levels: Sequence[Level], messages: Round, own: set[int]) -> float:
    """The seconds of a round, as far as the devices `own` take part: on the links that their messages use."""
    loads: dict[object, float] = defaultdict(float)
    bandwidths: dict[object, float] = {}
    own_links: set[object] = set()
    latency = 0.0
    for sender, receiver, size in messages:
        number = next(
            (k for k, level in enumerate(levels) if sender // level.size == receiver // level.size), len(levels) - 1
        )
        links: dict[object, float] = {
            ("from", sender, number): levels[number].bandwidth,
            ("to", receiver, number): levels[number].bandwidth,
        }
        for k, level in enumerate(levels[:number]):
            if level.uplink:
                links["out of", k, sender // level.size] = level.uplink
                links["into", k, receiver // level.size] = level.uplink
        for link in links:
            loads[link] += size
        bandwidths |= links
        if sender in own:
            own_links |= set(links)
            latency = max(latency, levels[number].latency)
    return latency + max(loads[link] / bandwidths[link] for link in own_links)


Rounds = Callable[[Sequence[int]], Iterator[Round]]
"""The rounds of an algorithm for one group."""


def seconds(levels: Sequence[Level], groups: Sequence[Sequence[int]], own: int, rounds: Rounds) -> float:
    """The seconds of group number `own` if all `groups` take each round together."""
    total = 0.0
    for together in zip(*map(rounds, groups), strict=True):
        total += round_seconds(levels, [message for messages in together for message in messages], set(groups[own]))
    return total


def ring(group: Sequence[int], size: float, times: int) -> Iterator[Round]:
    """Each device sends to the next, `times` times."""
    for _ in range(times):
        yield [(d, group[(i + 1) % len(group)], size) for i, d in enumerate(group)]


def pairwise(group: Sequence[int], size: float) -> Iterator[Round]:
    """Each device sends to each other one."""
    for shift in range(1, len(group)):
        yield [(d, group[(i + shift) % len(group)], size) for i, d in enumerate(group)]


def doubling(group: Sequence[int], size: float) -> Iterator[Round]:
    """Each device exchanges with the one that differs in a bit of its position; else sends 1, 2, 4, ... further."""
    n = len(group)
    distance = 1
    while distance < n:
        if n & (n - 1):
            yield [(d, group[(i + distance) % n], size) for i, d in enumerate(group)]
        else:
            yield [(d, group[i ^ distance], size) for i, d in enumerate(group)]
        distance *= 2


def lines(group: Sequence[int], shape: Sequence[int], axis: int) -> list[list[int]]:
    """The lines of a grid of positions along an axis, axis 0 the innermost."""
    stride = 1
    for size in shape[:axis]:
        stride *= size
    starts = [p for p in range(len(group)) if p // stride % shape[axis] == 0]
    return [[group[p + k * stride] for k in range(shape[axis])] for p in starts]


def together(rounds: Rounds, parts: Sequence[Sequence[int]]) -> Iterator[Round]:
    """The rounds of all parts of a group at the same time."""
    for each in zip(*map(rounds, parts), strict=True):
        yield [message for messages in each for message in messages]


def all_reduce(shape: Sequence[int], size: float, last: str) -> Rounds:
    """Reduce-scatter along each axis but the last, reduce along the last by a ring or doubling, gather back."""

    def rounds(group: Sequence[int]) -> Iterator[Round]:
        sizes = []
        piece = size
        for axis in range(len(shape) - 1):
            piece /= shape[axis]
            sizes.append(piece)
            yield from _along(group, shape, axis, piece)
        n = shape[-1]
        outer = lines(group, shape, len(shape) - 1)
        if last == "ring":
            yield from together(lambda part: ring(part, piece / n, 2 * (n - 1)), outer)
        else:
            yield from together(lambda part: doubling(part, piece), outer)
        for axis in reversed(range(len(shape) - 1)):
            yield from _along(group, shape, axis, sizes[axis])

    return rounds


def _along(group: Sequence[int], shape: Sequence[int], axis: int, size: float) -> Iterator[Round]:
    return together(lambda part: ring(part, size, shape[axis] - 1), lines(group, shape, axis))


def all_gather(shape: Sequence[int], shard: float) -> Rounds:
    """Gather along the outermost axis, then with all that along the next."""

    def rounds(group: Sequence[int]) -> Iterator[Round]:
        size = shard
        for axis in reversed(range(len(shape))):
            yield from _along(group, shape, axis, size)
            size *= shape[axis]

    return rounds


def parallel_rings(each: int, size: float, times: int) -> Rounds:
    """As many rings as a unit has devices, each with a part of a message: ring r leaves units at their device r."""

    def rounds(group: Sequence[int]) -> Iterator[Round]:
        units = [group[i : i + each] for i in range(0, len(group), each)]
        for _ in range(times):
            messages: Round = []
            for r in range(each):
                order = [unit[(r + 1 + k) % each] for unit in units for k in range(each)]
                messages += next(ring(order, size / each, 1))
            yield messages

    return rounds


def all_to_all(shape: Sequence[int], size: float) -> Rounds:
    """Along each axis, from the innermost: to each other device of the line its part of everything."""

    def rounds(group: Sequence[int]) -> Iterator[Round]:
        for axis, n in enumerate(shape):
            yield from together(partial(pairwise, size=size / n), lines(group, shape, axis))

    return rounds


def tree_seconds(levels: Sequence[Level], groups: Sequence[Sequence[int]], own: int, size: float) -> float:
    """A tree of units at each level, twice: the depth of each level in latency, and all bytes over the slowest link."""
    latency, slowest = 0.0, 0.0
    inner = [[device] for device in groups[own]]
    for number, level in enumerate(levels):
        outer: dict[int, list[list[int]]] = defaultdict(list)
        for unit in inner:
            outer[0 if number == len(levels) - 1 else unit[0] // level.size].append(unit)
        depth = max(len(bin(len(units) - 1)) - 2 if len(units) > 1 else 0 for units in outer.values())
        if depth:
            latency += depth * level.latency
            slowest = max(slowest, size / level.bandwidth)
        if len(outer) > 1 and level.uplink:
            for unit_number in outer:
                crossing = 0
                for group in groups:
                    inside = [device // level.size == unit_number for device in group]
                    crossing += any(inside) and not all(inside)
                slowest = max(slowest, crossing * size / level.uplink)
        inner = [[device for unit in units for device in unit] for units in outer.values()]
    return 2 * (latency + slowest)


def shapes(levels: Sequence[Level], group: Sequence[int]) -> list[list[int]]:
    """The grids of a group: flat, and over each choice of levels that have several units with equally many members."""
    result = [[len(group)]]
    for level in levels[:-1]:
        units = [device // level.size for device in group]
        counts = {units.count(unit) for unit in units}
        if len(counts) > 1:
            continue
        count = counts.pop()
        for shape in list(result):
            within = 1
            for size in shape[:-1]:
                within *= size
            if within < count < len(group) and count % within == 0:
                new = [*shape[:-1], count // within, len(group) // count]
                if new not in result:
                    result.append(new)
    return result
