"""Placements by optimisation: as good as trying all, and costing what the simulator says of the compiled program."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from distir_relax.autosharding.apply_solution import apply_solution
from distir_relax.autosharding.autoshard import build_graph
from distir_relax.autosharding.comm_lower_bound import CommLowerBound
from distir_relax.autosharding.edges import operand_layout
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.integer_program import solution_seconds
from distir_relax.autosharding.optimize import compute_costs, cost_table_of, optimize
from distir_relax.autosharding.solver import InsufficientMemory, solve
from distir_relax.cost.profile import Profile
from distir_relax.ir import Module, verify
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import ToDistIR
from distir_relax.ops import check
from distir_relax.simulation.simulator import simulate_module
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
        graph = build_graph(module, DeviceMesh(shape, ("a", "b")[: len(shape)]))
        ways = math.prod(len(node.strategies) for node in graph.nodes)
        if 1 < ways <= most:
            return graph, ways


def simulated(graph: Graph, chosen: tuple[int, ...], profile: Profile = MACHINE) -> float:
    module: Module = apply_solution(graph, chosen)
    verify(module, check)
    return simulate_module(ToDistIR().run(module), profile).makespan


@pytest.mark.drawn(2)
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_nothing_is_better(first: int) -> None:
    for seed in range(first, first + 25):
        graph, _ = few_ways(seed, 4000)
        costs = compute_costs(graph, MACHINE)
        found = optimize(graph, cost_table_of(graph, MACHINE))
        every = itertools.product(*(range(len(node.strategies)) for node in graph.nodes))
        best = min(solution_seconds(graph, costs, chosen) for chosen in every)
        assert found.seconds == pytest.approx(best, rel=1e-6), seed
        assert found.bound <= found.seconds * (1 + 1e-9)
        assert found.gap <= 1e-3
        assert simulated(graph, found.chosen) == pytest.approx(found.seconds, rel=1e-9), seed


def test_each_way_costs_what_the_simulator_says() -> None:
    """All ways of a few programs, not those alone that the solver picks."""
    for seed in range(500, 512):
        graph, _ = few_ways(seed, 250)
        costs = compute_costs(graph, MACHINE)
        for chosen in itertools.product(*(range(len(node.strategies)) for node in graph.nodes)):
            assert simulated(graph, chosen) == pytest.approx(solution_seconds(graph, costs, chosen), rel=1e-9), seed


@pytest.mark.sweep
def test_from_coarse_to_fine_is_as_good_as_all_at_once() -> None:
    """Programs that are too many to try, with less memory than they would like; meshes of one, two and three axes."""
    for seed in range(12):
        draw = random.Random(1000 + seed)
        shape = draw.choice(((3,), (2, 3), (3, 2), (2, 2, 2)))
        module = random_module(draw, draw.randint(2, 5))
        graph = build_graph(module, DeviceMesh(shape, ("a", "b", "c")[: len(shape)]))
        costs = compute_costs(graph, MACHINE)
        memory = math.inf
        for _ in range(2):
            whole, found = solve(graph, costs, memory), optimize(graph, cost_table_of(graph, MACHINE), memory)
            assert found.seconds == pytest.approx(whole.seconds, rel=2e-4), seed
            assert found.bound <= whole.seconds * (1 + 1e-9)
            assert found.bytes <= memory * (1 + 1e-6)
            memory = 0.8 * whole.bytes
            try:
                solve(graph, costs, memory)
            except InsufficientMemory as error:
                memory = error.minimum


@pytest.mark.drawn(2)
@pytest.mark.parametrize("shape", [(3,), (7,), (2, 3), (2, 2, 2)])
def test_no_move_takes_less_than_what_is_lacking(shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh(shape, ("a", "b", "c")[: len(shape)])
    lacking = CommLowerBound(mesh, MACHINE)
    tight = 0
    for seed in range(25):
        graph = build_graph(random_module(random.Random(seed), 4), mesh)
        costs = compute_costs(graph, MACHINE)
        for edge in graph.edges:
            kind = graph.type_of(edge.source)
            ways = graph.nodes[edge.source[0]].strategies
            sources = list(dict.fromkeys(way.final_layouts[edge.source[1]] for way in ways))
            for user in edge.users:
                ways = graph.nodes[user[0]].strategies
                targets = list(dict.fromkeys(operand_layout(graph, user, way) for way in ways))
                least = lacking.seconds(kind, sources, targets)
                for (s, source), (t, target) in itertools.product(enumerate(sources), enumerate(targets)):
                    if edge.allows_reshard(user, source, target):
                        price_ = costs.reshard_seconds(kind, source, target)
                        assert least[s, t] <= price_ * (1 + 1e-9), (kind, source, target)
                        tight += price_ > 0 and least[s, t] > 0.2 * price_
    assert tight > 100
