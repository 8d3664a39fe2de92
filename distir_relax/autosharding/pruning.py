"""Which ways and moves can be part of placements as good as ones that are known: all others need not be looked at.

No placements take less than the fastest way of each op together. What a way takes more than that of its op, and what
is sent for it at least, has to fit between that floor and the time of placements that are known; so has each move. What
is sent at least is what devices lack of a value at the bandwidth of the fastest link. So most moves of large values are
out before any is priced, and the integer program is left with what may pay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.comm_lower_bound import Lacking
from distir_relax.autosharding.costs import Prices
from distir_relax.autosharding.edges import Transport, transports
from distir_relax.autosharding.graph import Graph, Moves, Use, User
from distir_relax.autosharding.integer_program import own_seconds

Array = npt.NDArray[Any]

_ROUNDS = 3
_SLACK = 1e-9
"""Times are rounded to femtoseconds; so much of them is let pass."""


@dataclass(slots=True)
class _Move(Transport):
    """A transport with the seconds from each layout left to each one taken, at least."""

    least: dict[User, Array] = field(default_factory=dict)
    """They are infinite where the value may not be moved."""

    def fits(self, more: Sequence[Array], spare: float) -> dict[User, Array]:
        """Which moves fit into the time to spare, beside what the ways at both ends take more than others."""
        source = self.edge.source[0]
        before = _by_layout(more[source], self.leaves, len(self.left))
        found = {}
        for user, least in self.least.items():
            after = _by_layout(more[user[0]], self.takes[user], len(self.taken[user]))
            # A node that uses what it makes pays for its way once.
            ends = np.maximum.outer(before, after) if user[0] == source else np.add.outer(before, after)
            found[user] = ends + least <= spare
        return found

    def sent(self, fits: Mapping[User, Array]) -> dict[int, Array]:
        """What has to be sent along the edge at least, by the ways of its ends."""
        source = self.edge.source[0]
        found = {source: np.zeros(len(self.leaves))}
        for user, mine in fits.items():
            least = np.where(mine, self.least[user], math.inf)
            found[user[0]] = np.maximum(found.get(user[0], 0.0), least.min(axis=0)[self.takes[user]])
            found[source] = np.maximum(found[source], least.min(axis=1)[self.leaves])
        return found

    def moves(self, fits: Mapping[User, Array]) -> Mapping[User, Moves]:
        """The moves that fit, of each user."""
        left = {lies: number for number, lies in enumerate(self.left)}
        return {
            user: Moves(left, {lies: number for number, lies in enumerate(self.taken[user])}, mine)
            for user, mine in fits.items()
        }


@dataclass(slots=True)
class Worth:
    """What the ways and moves of a graph take at least, beyond the `floor` that all placements take."""

    graph: Graph
    floor: float
    more: list[Array]
    """What each way of each node takes more than the fastest, in seconds."""
    _moves: list[_Move]

    @classmethod
    def of(cls, graph: Graph, prices: Prices) -> Worth:
        """Of a graph; the prices of all ops in all ways have to be there."""
        floor, more = 0.0, []
        for number, node in enumerate(graph.nodes):
            took = node.count * np.array([own_seconds(graph, prices, number, way) for way in node.ways])
            floor += took.min()
            more.append(took - took.min())
        lacking = Lacking(prices.mesh, prices.profile)
        return cls(graph, floor, more, [_least(at, lacking) for at in transports(graph)])

    def a_look(self, known: float) -> Graph:
        """The graph with those ways and moves that placements of `known` seconds, or less, can have."""
        spare = known * (1 + _SLACK) - self.floor
        more = [ways.copy() for ways in self.more]
        fits: dict[Use, dict[User, Array]] = {}
        for _ in range(_ROUNDS):
            sent = [np.zeros(len(ways)) for ways in more]
            for move in self._moves:
                fits[move.edge.use] = move.fits(more, spare)
                for node, least in move.sent(fits[move.edge.use]).items():
                    sent[node] += least
            for ways, least in zip(more, sent, strict=True):
                ways[ways + least > spare] = math.inf
        nodes = [
            replace(node, ways=tuple(node.ways[i] for i in np.flatnonzero(np.isfinite(ways))))
            for node, ways in zip(self.graph.nodes, more, strict=True)
        ]
        return self.graph.narrowed(nodes, {move.edge.use: move.moves(fits[move.edge.use]) for move in self._moves})


def _by_layout(more: Array, layouts: Array, count: int) -> Array:
    """The least of what the ways of each layout take more; infinite where it has none."""
    found = np.full(count, math.inf)
    np.minimum.at(found, layouts, more)
    return found


def _least(at: Transport, lacking: Lacking) -> _Move:
    least = {
        user: np.where(may, at.edge.count * lacking.seconds(at.kind, at.left, at.taken[user]), math.inf)
        for user, may in at.may.items()
    }
    return _Move(at.edge, at.kind, at.left, at.leaves, at.taken, at.takes, at.may, least)
