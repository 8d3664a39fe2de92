"""Optimize the placements of a graph from coarse to fine.

First only strategies that treat all mesh axes alike are considered, then those that treat groups of neighboring axes
alike, then all. The coarse sets are small and seldom far from optimal; strategies and reshards that cannot be part of a
better solution (`pruning`) are removed before the next round, mostly before their costs are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from distir_relax.autosharding.costs import CostTable
from distir_relax.autosharding.edges import edge_layouts
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.op_strategies import OpStrategy
from distir_relax.autosharding.pruning import Pruner
from distir_relax.autosharding.solver import Solution, SolverTimeout, solve, solve_approximately
from distir_relax.cost.profile import Profile
from distir_relax.layout import Shard
from distir_relax.ops import lookup
from distir_relax.sharding.factor_selection import Placed

Axes = Sequence[int]
"""Numbers of mesh axes."""


def optimize(graph: Graph, costs: CostTable, memory: float = math.inf, limit: float = 60.0) -> Solution:
    """Return the best strategies of a graph with `memory` bytes per device; raise as `solve` does.

    Costs are computed on demand. Each of the programs that are solved may take `limit` seconds.
    """
    _compute_op_costs(graph, costs)
    # Created late: a mesh of one axis has no coarse rounds.
    pruner: Pruner | None = None
    best: Solution | None = None
    remaining = graph
    for groups in _axis_groupings(graph.space.mesh.shape):
        coarse = _restrict(remaining, groups)
        _compute_reshard_costs(coarse, costs)
        solution = solve_approximately(coarse, costs, memory, limit, best.seconds if best is not None else math.inf)
        if solution is not None and (best is None or solution.seconds < best.seconds):
            best = replace(solution, chosen=_renumber(graph, coarse, solution.chosen))
            pruner = pruner or Pruner.of(graph, costs)
            remaining = pruner.prune(best.seconds)
    _compute_reshard_costs(remaining, costs)
    try:
        solution = solve(remaining, costs, memory, limit, incumbent=best)
    except SolverTimeout as error:
        if best is None:
            raise
        return replace(best, bound=min(error.bound, best.seconds))
    if best is not None and best.seconds < solution.seconds:
        return replace(best, bound=min(solution.bound, best.seconds))
    return replace(solution, chosen=_renumber(graph, remaining, solution.chosen))


def cost_table_of(graph: Graph, profile: Profile, tail: str = "ragged") -> CostTable:
    """Return an empty cost table of a graph's program on a machine.

    `tail` is the treatment of short shards: ragged or pad.
    """
    updates_weights = any(lookup(op.name, op.location).updates for op in graph.inlined.ops)
    return CostTable(graph.space.mesh, profile, tail, updates_weights)


def compute_costs(graph: Graph, profile: Profile, tail: str = "ragged") -> CostTable:
    """Return the costs of all strategies of a graph, and of all allowed reshards.

    `tail` is the treatment of short shards: ragged or pad.
    """
    costs = cost_table_of(graph, profile, tail)
    _compute_op_costs(graph, costs)
    _compute_reshard_costs(graph, costs)
    return costs


def _compute_op_costs(graph: Graph, costs: CostTable) -> None:
    for number, node in enumerate(graph.nodes):
        if node.op is not None and graph.has_cost(node):
            for strategy in node.strategies:
                costs.request_op(node.op, strategy, graph.roles(number))
    costs.compute()


def _compute_reshard_costs(graph: Graph, costs: CostTable) -> None:
    for node in graph.nodes:
        if node.op is not None and graph.has_cost(node):
            for s in node.strategies:
                for value, out, final in zip(node.op.results, s.out_layouts, s.final_layouts, strict=True):
                    costs.request_reshards(value.tensor, (out,), (final,), np.ones((1, 1), dtype=bool))
    for layouts in edge_layouts(graph):
        for user, allowed in layouts.allowed.items():
            costs.request_reshards(layouts.tensor, layouts.sources, layouts.targets[user], allowed)
    costs.compute()


def _axis_groupings(mesh: Sequence[int]) -> Iterator[Sequence[Axes]]:
    """Yield groupings of axes: all axes, then those before and after each axis."""
    axes = [axis for axis, size in enumerate(mesh) if size > 1]
    if len(axes) > 1:
        yield (axes,)
    if len(axes) > 2:
        yield from ((axes[:i], axes[i:]) for i in range(1, len(axes)))


def _restrict(graph: Graph, groups: Sequence[Axes]) -> Graph:
    """Return the graph with the strategies that treat the axes of each group alike, or all of a node that has none."""
    return graph.restrict(
        [
            replace(node, strategies=tuple(s for s in node.strategies if _treats_alike(s, groups)) or node.strategies)
            for node in graph.nodes
        ]
    )


def _treats_alike(s: OpStrategy, groups: Sequence[Axes]) -> bool:
    return all(
        len({_placement_kind(layout, axis) for axis in group}) == 1
        for layout in (*s.in_layouts, *s.out_layouts, *s.final_layouts)
        for group in groups
    )


def _placement_kind(layout: Placed, axis: int) -> object:
    placement = layout[axis]
    return placement.dim if isinstance(placement, Shard) else placement


def _renumber(graph: Graph, few: Graph, chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the chosen strategies of a restricted graph by their numbers in the full one."""
    return tuple(
        node.strategies.index(small.strategies[i])
        for node, small, i in zip(graph.nodes, few.nodes, chosen, strict=True)
    )
