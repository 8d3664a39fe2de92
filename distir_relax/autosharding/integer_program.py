"""Integer program: one strategy per node, at the least time of ops and redistributions.

Variables:

    x[n,s] in {0,1}    node n uses strategy s
    y[e,u,a,b] >= 0    the value of edge e, left in layout a, is taken by user u in layout b; only for allowed
                       pairs (`Edge.allows_reshard`)
    z[e,a,b] >= 0      the value of edge e, which has several users, is resharded from a to b, for all of them

Minimize, with t the seconds of a strategy, r those of a redistribution, and the counts of nodes and edges:

    sum count[n] t[n,s] x[n,s]                                   (`__post_init__`, `strategy_seconds`)
    + sum count[e] r[a,b] y[e,u,a,b]   if e has one user         (`_add_edge`)
    + sum count[e] r[a,b] z[e,a,b]     if e has several          (`_add_shared_reshards`)

subject to

    sum_s x[n,s] = 1                                 each n      (`__post_init__`)
    sum_b y[e,u,a,b] = sum_{s leaves a} x[source,s]  each e,u,a  (`_add_edge`)
    sum_a y[e,u,a,b] = sum_{s takes b} x[u,s]        each e,u,b  (`_add_edge`)
    z[e,a,b] >= y[e,u,a,b]   if r[a,b] > 0           each e,u    (`_add_shared_reshards`)

and, in `MemoryConstrainedProgram` of `constraints`, with bytes B of live items over x, y and z, in units of the memory:

    p = sum_{persistent items} B                                 (`_matrix`, `MemoryModel.persistent_terms`)
    p + sum_{items live at op o} B <= peak           each o      (`_matrix`, `MemoryModel.op_terms`)
    peak <= 1, or peak_cost * peak in the objective              (`_upper_bounds`, `_all_costs`)
    time <= cost_limit                                           (`_matrix`)

With one user per value and a tree of nodes, the linear relaxation has integral solutions; so branching is rare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.costs import CostTable
from distir_relax.autosharding.edges import EdgeLayouts, edge_layouts, operand_layout
from distir_relax.autosharding.graph import EdgeKey, Graph, User
from distir_relax.autosharding.op_strategies import OpStrategy
from distir_relax.sharding.factor_selection import Placed

Array = npt.NDArray[Any]
_Terms = tuple[Array, Array, float]
"""Terms of rows: the row numbers, the variables in them, and the coefficient."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of a value in other `layouts`: a copy exists if the sum of `coefficients` of its `variables` is 1.

    `layout_numbers` is the layout of each variable.
    """

    layouts: Sequence[Placed]
    variables: Array
    coefficients: Array
    layout_numbers: Array


@dataclass(slots=True)
class IntegerProgram:
    """Variables with their costs, and rows of constraints, in the form of HiGHS."""

    graph: Graph
    table: CostTable
    costs: Array = field(init=False)
    integrality: Array = field(init=False)
    """1 for integer variables."""
    choices: list[range] = field(default_factory=list)
    """The variables of each node's strategies."""
    values: Array = field(init=False)
    rows: Array = field(init=False)
    columns: Array = field(init=False)
    lower: Array = field(init=False)
    upper: Array = field(init=False)
    copies: dict[EdgeKey, Copies] = field(default_factory=dict)
    """The copies of the value of each edge."""
    scale: float = 1.0
    """Factor of the costs: HiGHS treats values below 1e-7 as 0."""
    _costs: list[Array] = field(default_factory=list)
    _terms: list[tuple[Array, Array, Array]] = field(default_factory=list)
    _bounds: list[tuple[int, float, float]] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=lambda: [0, 0])
    """The number of variables and rows so far."""

    def __post_init__(self) -> None:
        for number, node in enumerate(self.graph.nodes):
            costs = [node.count * strategy_seconds(self.graph, self.table, number, s) for s in node.strategies]
            variables = self._add_variables(np.array(costs))
            self.choices.append(range(variables[0], variables[-1] + 1))
            self._add_rows(1, 1.0, 1.0, (np.zeros_like(variables), variables, 1.0))
        strategy_count = self._sizes[0]
        for layouts in edge_layouts(self.graph):
            self._add_edge(layouts)
        seconds = np.concatenate(self._costs)
        largest = seconds.max(initial=0.0)
        self.scale = 1e3 / largest if largest else 1.0
        self.costs = seconds * self.scale
        self.integrality = (np.arange(len(seconds)) < strategy_count).astype(np.int64)
        self.rows, self.columns, self.values = (np.concatenate(parts) for parts in zip(*self._terms, strict=True))
        counts, lower, upper = zip(*self._bounds, strict=True)
        self.lower, self.upper = np.repeat(lower, counts), np.repeat(upper, counts)

    def _add_edge(self, ends: EdgeLayouts) -> None:
        edge = ends.edge
        costs = {
            user: edge.count * self.table.reshard_matrix(ends.tensor, ends.sources, ends.targets[user], allowed)
            for user, allowed in ends.allowed.items()
        }
        is_shared = len(edge.users) > 1
        reshards: dict[User, Array] = {}
        for user, allowed in ends.allowed.items():
            variables = reshards[user] = np.full(allowed.shape, -1)
            variables[allowed] = self._add_variables(np.zeros(allowed.sum()) if is_shared else costs[user][allowed])
            for axis, node, which in (
                (0, edge.source[0], ends.source_numbers),
                (1, user[0], ends.target_numbers[user]),
            ):
                terms = np.nonzero(allowed)[axis], variables[allowed], 1.0
                self._add_rows(allowed.shape[axis], 0.0, 0.0, terms, (which, np.array(self.choices[node]), -1.0))
        if is_shared:
            self._add_shared_reshards(ends, reshards, costs)
        else:
            (user,) = edge.users
            self._record_copies(ends, user, reshards[user])

    def _record_copies(self, ends: EdgeLayouts, user: User, reshards: Array) -> None:
        """Record the copies for a single user: its layout, unless the value was left in it."""
        targets, strategies = ends.targets[user], np.array(self.choices[user[0]])
        shared = [(ends.sources.index(layout), t) for t, layout in enumerate(targets) if layout in ends.sources]
        same = np.array([(reshards[s, t], t) for s, t in shared if reshards[s, t] >= 0], dtype=np.int64).reshape(-1, 2)
        self.copies[ends.edge.key] = Copies(
            targets,
            np.concatenate([strategies, same[:, 0]]),
            np.concatenate([np.ones(len(strategies)), -np.ones(len(same))]),
            np.concatenate([ends.target_numbers[user], same[:, 1]]),
        )

    def _add_shared_reshards(self, ends: EdgeLayouts, moves: dict[User, Array], costs: dict[User, Array]) -> None:
        """Add a shared reshard variable for each pair of layouts of several users."""
        numbers: dict[Placed, int] = {}
        for targets in ends.targets.values():
            for layout in targets:
                numbers.setdefault(layout, len(numbers))
        cost = np.zeros((len(ends.sources), len(numbers)))
        column = {user: np.array([numbers[layout] for layout in targets]) for user, targets in ends.targets.items()}
        for user, allowed in ends.allowed.items():
            s, t = np.nonzero(allowed)
            cost[s, column[user][t]] = costs[user][s, t]
        shared = np.full(cost.shape, -1)
        shared[cost > 0] = self._add_variables(cost[cost > 0])
        for user in ends.allowed:
            s, t = np.nonzero(costs[user])
            row = np.arange(len(s))
            self._add_rows(len(s), 0.0, np.inf, (row, shared[s, column[user][t]], 1.0), (row, moves[user][s, t], -1.0))
        _, copied = np.nonzero(cost)
        self.copies[ends.edge.key] = Copies(list(numbers), shared[cost > 0], np.ones(len(copied)), copied)

    def _add_variables(self, costs: Array) -> Array:
        """Add variables with these costs; return their numbers."""
        first = self._sizes[0]
        self._sizes[0] += len(costs)
        self._costs.append(costs)
        return np.arange(first, self._sizes[0])

    def _add_rows(self, count: int, low: float, high: float, *terms: _Terms) -> None:
        """Add rows between `low` and `high`."""
        for rows, columns, values in terms:
            self._terms.append((rows + self._sizes[1], columns, np.full(len(columns), values)))
        self._bounds.append((count, low, high))
        self._sizes[1] += count


def solution_seconds(graph: Graph, costs: CostTable, chosen: Sequence[int]) -> float:
    """Return the seconds of a solution: all ops and all redistributions.

    It is infinite if a value that is updated in place would have to be resharded.
    """
    total = 0.0
    for number, node in enumerate(graph.nodes):
        total += node.count * strategy_seconds(graph, costs, number, node.strategies[chosen[number]])
    for edge in graph.edges:
        source = graph.nodes[edge.source[0]].strategies[chosen[edge.source[0]]].final_layouts[edge.source[1]]
        targets = {u: operand_layout(graph, u, graph.nodes[u[0]].strategies[chosen[u[0]]]) for u in edge.users}
        if not all(edge.allows_reshard(u, source, target) for u, target in targets.items()):
            return math.inf
        distinct = set(targets.values())
        type_ = graph.type_of(edge.source)
        total += edge.count * sum(costs.reshard_seconds(type_, source, target) for target in distinct)
    return total


def strategy_seconds(graph: Graph, costs: CostTable, number: int, strategy: OpStrategy) -> float:
    """Return the seconds of a node with a strategy, reductions included."""
    node = graph.nodes[number]
    total = op_seconds(graph, costs, number, strategy)
    if node.op is not None and graph.has_cost(node):
        for value, out, final in zip(node.op.results, strategy.out_layouts, strategy.final_layouts, strict=True):
            total += costs.reshard_seconds(value.tensor, out, final)
    return total


def op_seconds(graph: Graph, costs: CostTable, number: int, strategy: OpStrategy) -> float:
    """Return the seconds of a node's op alone with a strategy; 0 for inputs and annotations."""
    node = graph.nodes[number]
    if node.op is None or not graph.has_cost(node):
        return 0.0
    return costs.op_seconds(node.op, strategy, graph.roles(number))
