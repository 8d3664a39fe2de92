"""Placements by optimisation: as good as trying all, and costing what the simulator says of the compiled program."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from distir_relax.analysis.simulator import simulate_module
from distir_relax.autosharding.apply_solution import lay_out
from distir_relax.autosharding.autoshard import graph_of
from distir_relax.autosharding.comm_lower_bound import Lacking
from distir_relax.autosharding.edges import needed
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.integer_program import seconds_of
from distir_relax.autosharding.optimize import cheapest, price, prices_of
from distir_relax.autosharding.solver import NoRoom, solve
from distir_relax.cost.profile import Profile
from distir_relax.ir import Module, verify
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import ToDistIR
from distir_relax.ops import check
from tests.autosharding.random_graphs import random_module
from tests.machines import link, machine

MESHES = ((2,), (3,), (5,), (2, 3))
# What is sent counts as much as what is computed, on tensors as small as these.
MACHINE = replace(
    machine(8, link(1e-7, 2e8)), bandwidth=1e8, overhead=1e-7, vector={"float32": 3e7}, matrix=machine(8).matrix
)


def few_ways(seed: int, most: int) -> tuple[Graph, int]:
    """The graph of a random program that can be laid out in at most so many ways, and how many those are."""
    draw = random.Random(seed)
    while True:
        shape = draw.choice(MESHES)
        module = random_module(draw, draw.randint(1, 3))
        graph = graph_of(module, DeviceMesh(shape, ("a", "b")[: len(shape)]))
        ways = math.prod(len(node.ways) for node in graph.nodes)
        if 1 < ways <= most:
            return graph, ways


def simulated(graph: Graph, chosen: tuple[int, ...], profile: Profile = MACHINE) -> float:
    module: Module = lay_out(graph, chosen)
    verify(module, check)
    return simulate_module(ToDistIR().run(module), profile).makespan


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_nothing_is_better(first: int) -> None:
    for seed in range(first, first + 25):
        graph, _ = few_ways(seed, 4000)
        prices = price(graph, MACHINE)
        found = cheapest(graph, prices_of(graph, MACHINE))
        every = itertools.product(*(range(len(node.ways)) for node in graph.nodes))
        best = min(seconds_of(graph, prices, chosen) for chosen in every)
        assert found.seconds == pytest.approx(best, rel=1e-6), seed
        assert found.bound <= found.seconds * (1 + 1e-9)
        assert found.gap <= 1e-3
        assert simulated(graph, found.chosen) == pytest.approx(found.seconds, rel=1e-9), seed


def test_each_way_costs_what_the_simulator_says() -> None:
    """All ways of a few programs, not those alone that the solver picks."""
    for seed in range(500, 512):
        graph, _ = few_ways(seed, 250)
        prices = price(graph, MACHINE)
        for chosen in itertools.product(*(range(len(node.ways)) for node in graph.nodes)):
            assert simulated(graph, chosen) == pytest.approx(seconds_of(graph, prices, chosen), rel=1e-9), seed


def test_from_coarse_to_fine_is_as_good_as_all_at_once() -> None:
    """Programs that are too many to try, with less memory than they would like; meshes of one, two and three axes."""
    for seed in range(12):
        draw = random.Random(1000 + seed)
        shape = draw.choice(((3,), (2, 3), (3, 2), (2, 2, 2)))
        module = random_module(draw, draw.randint(2, 5))
        graph = graph_of(module, DeviceMesh(shape, ("a", "b", "c")[: len(shape)]))
        prices = price(graph, MACHINE)
        memory = math.inf
        for _ in range(2):
            whole, found = solve(graph, prices, memory), cheapest(graph, prices_of(graph, MACHINE), memory)
            assert found.seconds == pytest.approx(whole.seconds, rel=2e-4), seed
            assert found.bound <= whole.seconds * (1 + 1e-9)
            assert found.bytes <= memory * (1 + 1e-6)
            memory = 0.8 * whole.bytes
            try:
                solve(graph, prices, memory)
            except NoRoom as error:
                memory = error.least


@pytest.mark.parametrize("shape", [(3,), (7,), (2, 3), (2, 2, 2)])
def test_no_move_takes_less_than_what_is_lacking(shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh(shape, ("a", "b", "c")[: len(shape)])
    lacking = Lacking(mesh, MACHINE)
    tight = 0
    for seed in range(25):
        graph = graph_of(random_module(random.Random(seed), 4), mesh)
        prices = price(graph, MACHINE)
        for edge in graph.edges:
            kind = graph.type_of(edge.source)
            ways = graph.nodes[edge.source[0]].ways
            sources = list(dict.fromkeys(way.rests[edge.source[1]] for way in ways))
            for user in edge.users:
                ways = graph.nodes[user[0]].ways
                targets = list(dict.fromkeys(needed(graph, user, way) for way in ways))
                least = lacking.seconds(kind, sources, targets)
                for (s, source), (t, target) in itertools.product(enumerate(sources), enumerate(targets)):
                    if edge.may_move(user, source, target):
                        price_ = prices.of_move(kind, source, target)
                        assert least[s, t] <= price_ * (1 + 1e-9), (kind, source, target)
                        tight += price_ > 0 and least[s, t] > 0.2 * price_
    assert tight > 100
