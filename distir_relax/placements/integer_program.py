"""The integer program: a way for each node, at the least time of ops and of what is sent between them.

There is a variable for each way of each node. For each value on its way to a user there is one for each pair of
layouts, as in a transport problem: it leaves its source in the layout of that one's way, and comes to its user in the
layout of that one's. What several users need in one layout is paid for once. With one user a value this is a program
over a tree, whose linear relaxation has whole solutions; that is why few have to be branched on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distir_relax.placements.graph import Edge, Graph, Use
from distir_relax.placements.prices import Prices
from distir_relax.placements.space import Way
from distir_relax.sharding.choice import Placed


@dataclass(slots=True)
class IntegerProgram:
    """Variables with their costs, and rows of constraints, as HiGHS takes them."""

    graph: Graph
    prices: Prices
    costs: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    ways: list[range] = field(default_factory=list)
    """The variables of each node's ways."""
    values: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    copies: dict[Use, list[tuple[Placed, dict[int, float]]]] = field(default_factory=dict)
    """For each edge the layouts into which its value may be brought, each with the sum that is 1 where it is."""
    scale: float = 1.0
    """Costs are multiplied by it: HiGHS counts what is below 1e-7 as nothing."""

    def __post_init__(self) -> None:
        for number, node in enumerate(self.graph.nodes):
            costs = [node.count * way_seconds(self.graph, self.prices, number, way) for way in node.ways]
            self.ways.append(self._variables(costs, 1))
            self._row([(v, 1.0) for v in self.ways[-1]], 1.0, 1.0)
        for edge in self.graph.edges:
            self._edge(edge)
        largest = max(self.costs, default=0.0)
        self.scale = 1e3 / largest if largest else 1.0
        self.costs = [cost * self.scale for cost in self.costs]

    def _edge(self, edge: Edge) -> None:
        node = edge.source[0]
        leaving: dict[Placed, list[int]] = {}
        for variable, way in zip(self.ways[node], self.graph.nodes[node].ways, strict=True):
            leaving.setdefault(way.rests[edge.source[1]], []).append(variable)
        kind = self.graph.type_of(edge.source)
        shared: dict[tuple[Placed, Placed], list[int]] = {}
        several = len(edge.users) > 1
        for user in edge.users:
            coming: dict[Placed, list[int]] = {}
            for variable, way in zip(self.ways[user[0]], self.graph.nodes[user[0]].ways, strict=True):
                coming.setdefault(needed(self.graph, user, way), []).append(variable)
            pairs = [(s, t) for s in leaving for t in coming if edge.may_move(user, s, t)]
            costs = [self.prices.of_move(kind, s, t) * edge.count for s, t in pairs]
            moves = dict(zip(pairs, self._variables([0.0] * len(pairs) if several else costs, 0), strict=True))
            if not several:
                # What comes in a layout and did not leave in it.
                self.copies[edge.source, edge.users] = [
                    (t, {**dict.fromkeys(ways, 1.0), **({moves[t, t]: -1.0} if (t, t) in moves else {})})
                    for t, ways in coming.items()
                ]
            for end, ends in enumerate((leaving, coming)):
                met: dict[Placed, list[int]] = {lies: [] for lies in ends}
                for pair, move in moves.items():
                    met[pair[end]].append(move)
                for lies, ways in ends.items():
                    self._row([*((m, 1.0) for m in met[lies]), *((w, -1.0) for w in ways)], 0.0, 0.0)
            for pair, cost in zip(pairs, costs, strict=True):
                if several and cost:
                    shared.setdefault(pair, []).append(moves[pair])
        for (s, t), moved in shared.items():
            price = self.prices.of_move(kind, s, t) * edge.count
            (paid,) = self._variables([price], 0)
            self.copies.setdefault((edge.source, edge.users), []).append((t, {paid: 1.0}))
            for variable in moved:
                self._row([(paid, 1.0), (variable, -1.0)], 0.0, np.inf)

    def _variables(self, costs: Sequence[float], whole: int) -> range:
        first = len(self.costs)
        self.costs += costs
        self.whole += [whole] * len(costs)
        return range(first, len(self.costs))

    def _row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        row = len(self.lower)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.lower.append(low)
        self.upper.append(high)


def seconds_of(graph: Graph, prices: Prices, chosen: Sequence[int]) -> float:
    """What a choice of ways takes: the sum of all ops and of all that is moved between them.

    It is infinite where what is updated in place would have to be moved.
    """
    total = 0.0
    for number, node in enumerate(graph.nodes):
        total += node.count * way_seconds(graph, prices, number, node.ways[chosen[number]])
    for edge in graph.edges:
        source = graph.nodes[edge.source[0]].ways[chosen[edge.source[0]]].rests[edge.source[1]]
        needs = {user: needed(graph, user, graph.nodes[user[0]].ways[chosen[user[0]]]) for user in edge.users}
        if not all(edge.may_move(user, source, target) for user, target in needs.items()):
            return math.inf
        targets = set(needs.values())
        kind = graph.type_of(edge.source)
        total += edge.count * sum(prices.of_move(kind, source, target) for target in targets)
    return total


def way_seconds(graph: Graph, prices: Prices, number: int, way: Way) -> float:
    """What a node takes in a way, with its pending sums made."""
    node = graph.nodes[number]
    total = own_seconds(graph, prices, number, way)
    if node.op is not None and graph.is_priced(node):
        for value, gives, rests in zip(node.op.results, way.gives, way.rests, strict=True):
            total += prices.of_move(value.tensor, gives, rests)
    return total


def own_seconds(graph: Graph, prices: Prices, number: int, way: Way) -> float:
    """What the op of a node takes in a way by itself: 0 for what does nothing."""
    node = graph.nodes[number]
    if node.op is None or not graph.is_priced(node):
        return 0.0
    return prices.of_op(node.op, way, graph.roles(number))


def needed(graph: Graph, user: tuple[int, int], way: Way) -> Placed:
    """How a user needs its operand: an input of a function as it takes it."""
    return way.rests[0] if graph.nodes[user[0]].op is None else way.needs[user[1]]
