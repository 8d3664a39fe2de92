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
import numpy.typing as npt

from distir_relax.autosharding.costs import Prices
from distir_relax.autosharding.edges import Transport, needed, transports
from distir_relax.autosharding.graph import Graph, Use, User
from distir_relax.autosharding.op_strategies import Way
from distir_relax.sharding.factor_selection import Placed

Array = npt.NDArray[Any]
_Terms = tuple[Array, Array, float]
"""Of rows: their numbers, the variables in them, and by what these are multiplied."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The `layouts` into which a value may be brought: the sum of `shares` of `variables` is 1 where it is.

    `numbers` says which of the layouts each of the variables is about.
    """

    layouts: Sequence[Placed]
    variables: Array
    shares: Array
    numbers: Array


@dataclass(slots=True)
class IntegerProgram:
    """Variables with their costs, and rows of constraints, as HiGHS takes them."""

    graph: Graph
    prices: Prices
    costs: Array = field(init=False)
    whole: Array = field(init=False)
    """1 for the variables that have to be whole."""
    ways: list[range] = field(default_factory=list)
    """The variables of each node's ways."""
    values: Array = field(init=False)
    rows: Array = field(init=False)
    columns: Array = field(init=False)
    lower: Array = field(init=False)
    upper: Array = field(init=False)
    copies: dict[Use, Copies] = field(default_factory=dict)
    """The layouts into which the value of each edge may be brought."""
    scale: float = 1.0
    """Costs are multiplied by it: HiGHS counts what is below 1e-7 as nothing."""
    _costs: list[Array] = field(default_factory=list)
    _terms: list[tuple[Array, Array, Array]] = field(default_factory=list)
    _bounds: list[tuple[int, float, float]] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=lambda: [0, 0])
    """How many variables and rows there are yet."""

    def __post_init__(self) -> None:
        for number, node in enumerate(self.graph.nodes):
            costs = [node.count * way_seconds(self.graph, self.prices, number, way) for way in node.ways]
            found = self._variables(np.array(costs))
            self.ways.append(range(found[0], found[-1] + 1))
            self._rows(1, 1.0, 1.0, (np.zeros_like(found), found, 1.0))
        choices = self._sizes[0]
        for at in transports(self.graph):
            self._edge(at)
        seconds = np.concatenate(self._costs)
        largest = seconds.max(initial=0.0)
        self.scale = 1e3 / largest if largest else 1.0
        self.costs = seconds * self.scale
        self.whole = (np.arange(len(seconds)) < choices).astype(np.int64)
        self.rows, self.columns, self.values = (np.concatenate(parts) for parts in zip(*self._terms, strict=True))
        counts, lower, upper = zip(*self._bounds, strict=True)
        self.lower, self.upper = np.repeat(lower, counts), np.repeat(upper, counts)

    def _edge(self, at: Transport) -> None:
        edge = at.edge
        costs = {
            user: edge.count * self.prices.of_moves(at.kind, at.left, at.taken[user], may)
            for user, may in at.may.items()
        }
        several = len(edge.users) > 1
        moves: dict[User, Array] = {}
        for user, may in at.may.items():
            number = moves[user] = np.full(may.shape, -1)
            number[may] = self._variables(np.zeros(may.sum()) if several else costs[user][may])
            for axis, node, which in ((0, edge.source[0], at.leaves), (1, user[0], at.takes[user])):
                terms = np.nonzero(may)[axis], number[may], 1.0
                self._rows(may.shape[axis], 0.0, 0.0, terms, (which, np.array(self.ways[node]), -1.0))
        if several:
            self._pay_once(at, moves, costs)
        else:
            (user,) = edge.users
            self._copy(at, user, moves[user])

    def _copy(self, at: Transport, user: User, moves: Array) -> None:
        """Note what comes to the one user in a layout and did not leave in it."""
        taken, ways = at.taken[user], np.array(self.ways[user[0]])
        kept = [(at.left.index(lies), t) for t, lies in enumerate(taken) if lies in at.left]
        still = np.array([(moves[s, t], t) for s, t in kept if moves[s, t] >= 0], dtype=np.int64).reshape(-1, 2)
        self.copies[at.edge.use] = Copies(
            taken,
            np.concatenate([ways, still[:, 0]]),
            np.concatenate([np.ones(len(ways)), -np.ones(len(still))]),
            np.concatenate([at.takes[user], still[:, 1]]),
        )

    def _pay_once(self, at: Transport, moves: dict[User, Array], costs: dict[User, Array]) -> None:
        """Pay for each layout that some of several users need."""
        numbers: dict[Placed, int] = {}
        for taken in at.taken.values():
            for lies in taken:
                numbers.setdefault(lies, len(numbers))
        price = np.zeros((len(at.left), len(numbers)))
        where = {user: np.array([numbers[lies] for lies in taken]) for user, taken in at.taken.items()}
        for user, may in at.may.items():
            s, t = np.nonzero(may)
            price[s, where[user][t]] = costs[user][s, t]
        paid = np.full(price.shape, -1)
        paid[price > 0] = self._variables(price[price > 0])
        for user in at.may:
            s, t = np.nonzero(costs[user])
            row = np.arange(len(s))
            self._rows(len(s), 0.0, np.inf, (row, paid[s, where[user][t]], 1.0), (row, moves[user][s, t], -1.0))
        _, which = np.nonzero(price)
        self.copies[at.edge.use] = Copies(list(numbers), paid[price > 0], np.ones(len(which)), which)

    def _variables(self, costs: Array) -> Array:
        """New variables with these costs: their numbers."""
        first = self._sizes[0]
        self._sizes[0] += len(costs)
        self._costs.append(costs)
        return np.arange(first, self._sizes[0])

    def _rows(self, count: int, low: float, high: float, *terms: _Terms) -> None:
        """New rows between `low` and `high`."""
        for rows, columns, values in terms:
            self._terms.append((rows + self._sizes[1], columns, np.full(len(columns), values)))
        self._bounds.append((count, low, high))
        self._sizes[1] += count


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
