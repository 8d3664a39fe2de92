"""Prune strategies and reshards that cannot be part of a solution as good as a known one.

The sum of the fastest strategy of each op is a floor of all solutions. A strategy costs at least its excess over the
fastest one of its op, plus the cheapest reshards on each of its edges; a reshard costs at least its lower bound
(`comm_lower_bound`) plus the excess of the cheapest strategies at both ends. Whatever exceeds the difference between
the known solution and the floor is removed, in a few rounds, since each removal raises the bounds of neighbors. Most
reshards of large values are removed before their costs are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.comm_lower_bound import CommLowerBound
from distir_relax.autosharding.costs import CostTable
from distir_relax.autosharding.edges import EdgeLayouts, edge_layouts
from distir_relax.autosharding.graph import EdgeKey, Graph, Reshards, User
from distir_relax.autosharding.integer_program import op_seconds

Array = npt.NDArray[Any]

_ROUNDS = 3
_SLACK = 1e-9
"""Relative tolerance, since times are rounded to femtoseconds."""


@dataclass(slots=True)
class _EdgeBounds(EdgeLayouts):
    """The layouts of an edge, with a lower bound of the seconds of each reshard."""

    reshard_bounds: dict[User, Array] = field(default_factory=dict)
    """By user: seconds from each source (row) to each target (column); infinite if not allowed."""

    def fitting(self, excess: Sequence[Array], slack: float) -> dict[User, Array]:
        """Return the reshards that fit in `slack` together with the excess of the strategies at both ends."""
        source = self.edge.source[0]
        before = _by_layout(excess[source], self.source_numbers, len(self.sources))
        fitting = {}
        for user, bound in self.reshard_bounds.items():
            after = _by_layout(excess[user[0]], self.target_numbers[user], len(self.targets[user]))
            # A node that uses its own result counts its strategy once.
            ends = np.maximum.outer(before, after) if user[0] == source else np.add.outer(before, after)
            fitting[user] = ends + bound <= slack
        return fitting

    def node_bounds(self, fitting: Mapping[User, Array]) -> dict[int, Array]:
        """Return the least reshard cost of the edge, by strategy of each of its nodes."""
        source = self.edge.source[0]
        total = {source: np.zeros(len(self.source_numbers))}
        for user, fit in fitting.items():
            bounds = np.where(fit, self.reshard_bounds[user], math.inf)
            total[user[0]] = np.maximum(total.get(user[0], 0.0), bounds.min(axis=0)[self.target_numbers[user]])
            total[source] = np.maximum(total[source], bounds.min(axis=1)[self.source_numbers])
        return total

    def reshards(self, fitting: Mapping[User, Array]) -> Mapping[User, Reshards]:
        """Return the reshards that fit, by user."""
        sources = {layout: number for number, layout in enumerate(self.sources)}
        return {
            user: Reshards(sources, {layout: number for number, layout in enumerate(self.targets[user])}, fit)
            for user, fit in fitting.items()
        }


@dataclass(slots=True)
class Pruner:
    """Lower bounds of the strategies and reshards of a graph, beyond the `floor` of all solutions."""

    graph: Graph
    floor: float
    excess: list[Array]
    """The seconds of each strategy of each node beyond the fastest one."""
    _edges: list[_EdgeBounds]

    @classmethod
    def of(cls, graph: Graph, costs: CostTable) -> Pruner:
        """Return the bounds of a graph; the costs of all ops must be computed."""
        floor, excess = 0.0, []
        for number, node in enumerate(graph.nodes):
            seconds = node.count * np.array([op_seconds(graph, costs, number, s) for s in node.strategies])
            floor += seconds.min()
            excess.append(seconds - seconds.min())
        lower_bound = CommLowerBound(costs.mesh, costs.profile)
        return cls(graph, floor, excess, [_bound_edge(layouts, lower_bound) for layouts in edge_layouts(graph)])

    def prune(self, cutoff: float) -> Graph:
        """Return the graph with the strategies and reshards that solutions of at most `cutoff` seconds can have."""
        slack = cutoff * (1 + _SLACK) - self.floor
        excess = [row.copy() for row in self.excess]
        fits: dict[EdgeKey, dict[User, Array]] = {}
        for _ in range(_ROUNDS):
            node_bounds = [np.zeros(len(row)) for row in excess]
            for edge in self._edges:
                fits[edge.edge.key] = edge.fitting(excess, slack)
                for node, bound in edge.node_bounds(fits[edge.edge.key]).items():
                    node_bounds[node] += bound
            for row, bound in zip(excess, node_bounds, strict=True):
                row[row + bound > slack] = math.inf
        nodes = [
            replace(node, strategies=tuple(node.strategies[i] for i in np.flatnonzero(np.isfinite(row))))
            for node, row in zip(self.graph.nodes, excess, strict=True)
        ]
        return self.graph.restrict(nodes, {edge.edge.key: edge.reshards(fits[edge.edge.key]) for edge in self._edges})


def _by_layout(excess: Array, layouts: Array, count: int) -> Array:
    """Return the least excess of the strategies of each layout; infinite if it has none."""
    minimum = np.full(count, math.inf)
    np.minimum.at(minimum, layouts, excess)
    return minimum


def _bound_edge(e: EdgeLayouts, lower: CommLowerBound) -> _EdgeBounds:
    seconds = {
        user: np.where(allowed, e.edge.count * lower.seconds(e.tensor, e.sources, e.targets[user]), math.inf)
        for user, allowed in e.allowed.items()
    }
    return _EdgeBounds(e.edge, e.tensor, e.sources, e.source_numbers, e.targets, e.target_numbers, e.allowed, seconds)
