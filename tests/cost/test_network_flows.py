"""Collectives over random topologies, against a network of explicit links (`tests.cost.network_flows`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from distir_relax.cost.network import collective_seconds, min_seconds_per_byte
from distir_relax.cost.profile import Level
from distir_relax.layout import DeviceMesh
from distir_relax.simulation.device_classes import axis_groups
from tests.cost import network_flows as flows
from tests.machines import machine

SEEDS = range(40)
Timed = Callable[[flows.Rounds], float]


def topology(draw: random.Random) -> tuple[Level, ...]:
    """Two to four levels of odd sizes, of which all but the outermost may have an uplink."""
    levels, size, bandwidth = [], 1, 1e9
    for number in range(draw.choice([1, 2, 3])):
        size *= draw.choice([2, 3, 4, 5])
        uplink = draw.choice([0.0, bandwidth / 7, bandwidth / 2, bandwidth * size / 3])
        levels.append(Level(f"level {number}", size, draw.uniform(1e-6, 9e-6), bandwidth, uplink=uplink))
        bandwidth /= draw.choice([2, 3, 8])
    return (*levels, Level("outermost", 1 << 20, draw.uniform(5e-6, 2e-5), bandwidth))


def placement(draw: random.Random) -> list[list[int]]:
    """The groups along an axis of a mesh, on all of its devices or the first or last few along another axis."""
    shape = draw.choice([(2, 3), (3, 2, 5), (4, 2), (2, 7), (3, 5), (8,), (2, 2, 4), (6, 4), (15,), (3, 8)])
    mesh = DeviceMesh(shape, tuple("abc"[: len(shape)]))
    axis = draw.randrange(len(shape))
    groups = axis_groups(mesh, mesh.axes[axis], tuple(range(mesh.size))).tolist()
    first = draw.choice([0, 0, len(groups) // 2])
    return [list(map(int, group)) for group in groups[first:]]


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_take_as_long_as_their_messages(seed: int) -> None:
    draw = random.Random(seed)
    levels, groups = topology(draw), placement(draw)
    profile = machine(64, levels)
    for size in (8.0, 12345.0, 7e5, 3e8):
        for own in sorted({0, len(groups) // 2, len(groups) - 1}):
            group, n = groups[own], len(groups[own])

            def timed(rounds: flows.Rounds, own: int = own) -> float:
                return flows.seconds(levels, groups, own, rounds)

            grids = flows.shapes(levels, group)

            def rings(size: float, times: int, grids: list[list[int]] = grids, timed: Timed = timed) -> list[float]:
                return [timed(flows.parallel_rings(grid[0], size, times)) for grid in grids if len(grid) == 2]

            def gathers(shard: float, grids: list[list[int]] = grids, timed: Timed = timed, n: int = n) -> list[float]:
                return [*(timed(flows.all_gather(shape, shard)) for shape in grids), *rings(shard, n - 1)]

            expected = {
                "all_to_all": [timed(flows.all_to_all(shape, size)) for shape in grids],
                "all_gather": [*(timed(flows.all_gather(shape, size)) for shape in grids), *rings(size, n - 1)],
                "reduce_scatter": [
                    *(timed(flows.all_gather(shape, size / n)) for shape in grids),
                    *rings(size / n, n - 1),
                ],
                "all_reduce": [
                    flows.tree_seconds(levels, groups, own, size),
                    *(timed(flows.all_reduce(shape, size, last)) for shape in grids for last in ("ring", "doubling")),
                    *rings(size / n, 2 * (n - 1)),
                ],
            }
            for name, times in expected.items():
                found = collective_seconds(profile, name, group, [size] * n, np.array(groups))
                assert found == pytest.approx(min(times), rel=1e-9), (name, levels, groups, own, size)


@pytest.mark.parametrize("seed", SEEDS)
def test_sends_of_one_op_share_uplinks(seed: int) -> None:
    draw = random.Random(1000 + seed)
    levels = topology(draw)
    count = draw.choice([1, 3, 7, 12])
    devices = draw.sample(range(64), 2 * count)
    pairs = [devices[i : i + 2] for i in range(0, 2 * count, 2)]
    for own, pair in enumerate(pairs):
        expected = flows.seconds(levels, pairs, own, lambda pair: iter([[(pair[0], pair[1], 4567.0)]]))
        found = collective_seconds(machine(64, levels), "send", pair, [4567.0], np.array(pairs))
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_collective_is_faster_than_the_links_of_a_device(seed: int) -> None:
    draw = random.Random(2000 + seed)
    levels, group = topology(draw), placement(draw)[0]
    # Levels of equal bandwidth, without latency, are the best case for algorithms that use two at once.
    levels = tuple(replace(level, latency=0.0, bandwidth=1e9 if seed % 2 else level.bandwidth) for level in levels)
    profile, n, size = machine(64, levels), len(group), 1e6
    received = {
        "all_gather": (n - 1) * size, "reduce_scatter": (n - 1) / n * size,
        "all_to_all": (n - 1) / n * size, "all_reduce": 2 * (n - 1) / n * size,
    }  # fmt: skip
    for name, count in received.items():
        # Doubling moves the whole tensor of two devices once.
        least = size if name == "all_reduce" and n == 2 else count
        found = collective_seconds(profile, name, group, [size] * n)
        assert found >= least * min_seconds_per_byte(profile) * (1 - 1e-12), name
