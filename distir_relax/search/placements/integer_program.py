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
from typing import Any

import numpy as np

from distir_relax.errors import DistIRError
from distir_relax.search.placements.graph import Edge, Graph, Use
from distir_relax.search.placements.memory import MemoryRows, Row
from distir_relax.search.placements.prices import Prices
from distir_relax.search.placements.space import Way
from distir_relax.sharding.choice import Placed
from distir_relax.units import size


@dataclass(frozen=True, slots=True)
class Solution:
    """The number of the way that each node takes, the `seconds` of a step, and a `bound`: no solution takes less.

    `bytes` is the most memory that a device needs.
    """

    chosen: tuple[int, ...]
    seconds: float
    bound: float
    bytes: float

    @property
    def gap(self) -> float:
        """How much of its time a better solution could save at most."""
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds else 0.0


def solve(graph: Graph, prices: Prices, memory: float = math.inf, limit: float = 60.0, gap: float = 1e-4) -> Solution:
    """The best ways with which no device needs more than `memory` bytes, found by HiGHS.

    It ends after `limit` seconds, or with a solution that is within `gap` of the bound. Raises `DistIRError` where
    there is none: it says how little memory would do, and what needs it.
    """
    program = IntegerProgram(graph, prices)
    rows = MemoryRows(graph, program).rows()
    found = _highs(program, rows, program.costs, memory, limit, gap)
    if found.x is None and math.isfinite(memory):
        raise _no_room(program, rows, memory, limit)
    if found.x is None:
        raise DistIRError("no placements were found", hint=f"the solver says: {found.message}")
    chosen = tuple(int(np.argmax(found.x[list(block)])) for block in program.ways)
    bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
    needs = max((_bytes(row, found.x) for row in rows), default=0.0)
    return Solution(chosen, seconds_of(graph, prices, chosen), max(0.0, float(bound)) / program.scale, needs)


def _highs(
    program: IntegerProgram, rows: Sequence[Row], costs: Sequence[float], memory: float, limit: float, gap: float
) -> Any:
    """What HiGHS finds. Where `costs` have one variable more than the program has, that is what multiplies `memory`."""
    # It takes a while to import, and few need it.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    values, numbers, columns = list(program.values), list(program.rows), list(program.columns)
    lower, upper = list(program.lower), list(program.upper)
    extra = len(costs) - len(program.costs)
    for row in rows if math.isfinite(memory) else ():
        values += [size / memory for size in row.terms.values()] + [-1.0] * extra
        numbers += [len(lower)] * (len(row.terms) + extra)
        columns += [*row.terms, *[len(program.costs)] * extra]
        lower.append(-np.inf)
        upper.append(0.0 if extra else 1.0)
    matrix = coo_array((values, (numbers, columns)), shape=(len(lower), len(costs))).tocsr()
    most = np.ones(len(costs))
    most[len(program.costs) :] = np.inf
    return milp(
        np.array(costs),
        integrality=np.array([*program.whole, *[0] * extra]),
        bounds=Bounds(0, most),
        constraints=LinearConstraint(matrix, np.array(lower), np.array(upper)),
        options={"time_limit": limit, "mip_rel_gap": gap},
    )


def _no_room(program: IntegerProgram, rows: Sequence[Row], memory: float, limit: float) -> DistIRError:
    """The error that says how little memory would do, and where it is needed."""
    least = _highs(program, rows, [*[0.0] * len(program.costs), 1.0], memory, limit, 1e-3)
    if least.x is None:
        return DistIRError("no placements were found", hint=f"the solver says: {least.message}")
    tightest = max(rows, key=lambda row: _bytes(row, least.x))
    needs, op = _bytes(tightest, least.x), tightest.op
    return DistIRError(
        f"no placements need {size(memory)} on each device or less: the least there is needs {size(needs)}, "
        f"while {op.name} makes %{op.results[0].name} of @{tightest.function}",
        op.location,
        f"give memory={math.ceil(needs)} or more, or a mesh of more devices",
    )


def _bytes(row: Row, x: Any) -> float:
    return float(sum(size * x[variable] for variable, size in row.terms.items()))


def seconds_of(graph: Graph, prices: Prices, chosen: Sequence[int]) -> float:
    """What a choice of ways takes: the sum of all ops and of all that is moved between them."""
    total = 0.0
    for number, node in enumerate(graph.nodes):
        total += node.count * way_seconds(graph, prices, number, node.ways[chosen[number]])
    for edge in graph.edges:
        source = graph.nodes[edge.source[0]].ways[chosen[edge.source[0]]].rests[edge.source[1]]
        targets = {needed(graph, user, graph.nodes[user[0]].ways[chosen[user[0]]]) for user in edge.users}
        kind = graph.type_of(edge.source)
        total += edge.count * sum(prices.of_move(kind, source, target) for target in targets)
    return total


def way_seconds(graph: Graph, prices: Prices, number: int, way: Way) -> float:
    """What a node takes in a way, with its pending sums made."""
    node = graph.nodes[number]
    if node.op is None or not graph.is_priced(node):
        return 0.0
    total = prices.of_op(node.op, way, graph.roles(number))
    for value, gives, rests in zip(node.op.results, way.gives, way.rests, strict=True):
        total += prices.of_move(value.tensor, gives, rests)
    return total


def needed(graph: Graph, user: tuple[int, int], way: Way) -> Placed:
    """How a user needs its operand: an input of a function as it takes it."""
    return way.rests[0] if graph.nodes[user[0]].op is None else way.needs[user[1]]


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
    copies: dict[Use, dict[tuple[Placed, Placed], int]] = field(default_factory=dict)
    """The variable that says whether a value is brought from one layout into another, for each edge."""
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
            pairs = [(s, t) for s in leaving for t in coming]
            costs = [self.prices.of_move(kind, s, t) * edge.count for s, t in pairs]
            moves = dict(zip(pairs, self._variables([0.0] * len(pairs) if several else costs, 0), strict=True))
            if not several:
                self.copies[edge.source, edge.users] = moves
            for s, ways in leaving.items():
                self._row([*((moves[s, t], 1.0) for t in coming), *((w, -1.0) for w in ways)], 0.0, 0.0)
            for t, ways in coming.items():
                self._row([*((moves[s, t], 1.0) for s in leaving), *((w, -1.0) for w in ways)], 0.0, 0.0)
            for pair, cost in zip(pairs, costs, strict=True):
                if several and cost:
                    shared.setdefault(pair, []).append(moves[pair])
        for (s, t), moved in shared.items():
            price = self.prices.of_move(kind, s, t) * edge.count
            (paid,) = self._variables([price], 0)
            self.copies.setdefault((edge.source, edge.users), {})[s, t] = paid
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
