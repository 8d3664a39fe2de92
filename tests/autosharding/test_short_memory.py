"""Placements where memory is short, against all that there are: the best that fit, bounds, the least that would do."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from distir_relax.autosharding.autoshard import build_graph
from distir_relax.autosharding.constraints import Array, MemoryConstrainedProgram
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.integer_program import IntegerProgram, solution_seconds
from distir_relax.autosharding.memory import MemoryModel
from distir_relax.autosharding.optimize import compute_costs, cost_table_of, optimize
from distir_relax.autosharding.solver import InsufficientMemory
from distir_relax.layout import DeviceMesh
from tests.autosharding.random_graphs import random_module
from tests.autosharding.test_placements import MACHINE
from tests.machines import link

MESHES = ((3,), (5,), (7,), (2, 3))
GRAPHS = 8
# Whatever is sent takes so long that all is whole on every device where it has room.
SLOW = replace(MACHINE, levels=link(1e-5, 1e7))


@dataclass(frozen=True)
class Every:
    """All choices of ways of a graph that can be: the variables they use, what they take, what a device needs."""

    graph: Graph
    program: IntegerProgram
    choices: list[tuple[Array, float, float]]

    def rooms(self) -> Iterator[float]:
        """Amounts of memory that leave fewer and fewer of the choices, down to one byte too few for any."""
        needs = sorted({bytes_ for _, _, bytes_ in self.choices})
        (_, _, free) = min(self.choices, key=lambda choice: choice[1])
        yield from (free, 0.9 * free, needs[len(needs) // 2], needs[0], needs[0] - 1)


@cache
def every(shape: tuple[int, ...], seed: int) -> Every:
    """A random program of few choices."""
    draw = random.Random(seed)
    while True:
        graph = build_graph(random_module(draw, draw.randint(2, 4)), DeviceMesh(shape, ("a", "b")[: len(shape)]))
        if 30 < math.prod(len(node.strategies) for node in graph.nodes) <= 120:
            break
    costs = compute_costs(graph, SLOW)
    program = IntegerProgram(graph, costs)
    found = []
    for chosen in itertools.product(*(range(len(node.strategies)) for node in graph.nodes)):
        seconds = solution_seconds(graph, costs, chosen)
        if math.isfinite(seconds):
            allowed = np.ones(len(program.costs) + 2, dtype=bool)
            allowed[: program.choices[-1].stop] = False
            allowed[[block[way] for block, way in zip(program.choices, chosen, strict=True)]] = True
            alone = rows_of(program, math.inf).solve_integer(0.0, allowed)
            assert alone.x is not None
            assert alone.value == pytest.approx(seconds * program.scale)
            found.append((np.flatnonzero(alone.x > 0.5), seconds, alone.peak))
    return Every(graph, program, found)


def rows_of(program: IntegerProgram, memory: float) -> MemoryConstrainedProgram:
    needs = MemoryModel(program.graph, program)
    return MemoryConstrainedProgram(program, needs, memory, program.costs, time.monotonic() + 60)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("shape", MESHES)
def test_nothing_that_fits_is_better(shape: tuple[int, ...]) -> None:
    short = 0
    for seed in range(GRAPHS):
        all_ = every(shape, seed)
        for memory in all_.rooms():
            fits = [seconds for _, seconds, bytes_ in all_.choices if bytes_ <= memory]
            costs = cost_table_of(all_.graph, SLOW)
            if not fits:
                with pytest.raises(InsufficientMemory) as raised:
                    optimize(all_.graph, costs, memory)
                least = min(bytes_ for _, _, bytes_ in all_.choices)
                assert least <= raised.value.minimum <= 1.001 * least, seed
                continue
            found = optimize(all_.graph, costs, memory)
            assert found.seconds == pytest.approx(min(fits), rel=2e-4), (seed, memory)
            assert found.bytes <= memory * (1 + 1e-6)
            assert found.bound <= min(fits) * (1 + 1e-6)
            assert found.gap <= 1e-3
            short += min(fits) > 1.001 * min(seconds for _, seconds, _ in all_.choices)
    assert short >= 2, "memory makes a difference"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("shape", MESHES)
def test_of_what_takes_as_long_nothing_needs_less(shape: tuple[int, ...]) -> None:
    ties = 0
    for seed in range(GRAPHS):
        all_ = every(shape, seed)
        found = optimize(all_.graph, cost_table_of(all_.graph, SLOW))
        as_good = [bytes_ for _, seconds, bytes_ in all_.choices if seconds <= found.seconds * (1 + 1e-12)]
        assert min(as_good) <= found.bytes <= 1.001 * min(as_good), seed
        ties += max(as_good) > 1.01 * min(as_good)
    assert ties >= 2, "there is something to choose"


@pytest.mark.parametrize("shape", MESHES)
def test_nothing_that_is_ruled_out_is_in_what_fits(shape: tuple[int, ...]) -> None:
    """The relaxation is a bound of each choice that fits; with the reduced cost of any of its ways or moves, too."""
    ruled_out = 0
    for seed in range(GRAPHS):
        all_ = every(shape, seed)
        scale = all_.program.scale
        for memory in all_.rooms():
            relaxed = rows_of(all_.program, memory).solve_relaxation()
            fits = [choice for choice in all_.choices if choice[2] <= memory]
            if relaxed.x is None:
                assert not fits
                continue
            for used, seconds, _ in fits:
                bounds = relaxed.value + relaxed.reduced_costs[used]
                assert np.all(bounds <= seconds * scale * (1 + 1e-6) + 1e-6), (seed, memory)
            known = min((seconds for _, seconds, _ in fits), default=math.inf) * scale
            ruled_out += int(np.sum(relaxed.reduced_costs > known - relaxed.value + 1e-6))
    assert ruled_out > 40 * GRAPHS, "much is out"


@pytest.mark.sweep
def test_less_memory_never_takes_less_time() -> None:
    """Programs of more choices than can be tried, down to what nothing fits in; what is said to do then does."""
    for seed in range(4):
        draw = random.Random(3000 + seed)
        graph = build_graph(random_module(draw, 6), DeviceMesh((2, 3), ("a", "b")))
        costs = cost_table_of(graph, SLOW)
        found = optimize(graph, costs)
        memory, least = 0.9 * found.bytes, 0.0
        while not least:
            try:
                less = optimize(graph, costs, memory)
            except InsufficientMemory as error:
                least = error.minimum
                continue
            assert less.bytes <= memory * (1 + 1e-6)
            assert less.seconds >= found.bound * (1 - 1e-6)
            found, memory = less, 0.9 * less.bytes
        assert least > memory
        assert optimize(graph, costs, least).bytes <= least * (1 + 1e-6)
