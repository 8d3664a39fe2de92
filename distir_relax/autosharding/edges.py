"""The layouts in which values are left and taken, numbered: what there is to choose of moves, as arrays have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.graph import Edge, Graph, User
from distir_relax.autosharding.op_strategies import Way
from distir_relax.ir import TensorType
from distir_relax.layout import Partial, Placement
from distir_relax.sharding.factor_selection import Placed

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Transport:
    """A value on its way to its users, in layouts that are `left` behind and, by each user, `taken`."""

    edge: Edge
    kind: TensorType
    left: list[Placed]
    leaves: Array
    """For each way of the source, the number of the layout that it leaves."""
    taken: dict[User, list[Placed]] = field(default_factory=dict)
    takes: dict[User, Array] = field(default_factory=dict)
    """For each way of a user, the number of the layout that it takes."""
    may: dict[User, Array] = field(default_factory=dict)
    """Whether the value may be moved from each layout left (row) to each one taken (column)."""

    @classmethod
    def of(cls, graph: Graph, edge: Edge) -> Transport:
        """That of an edge."""
        node, result = edge.source
        left, leaves = _numbered([way.rests[result] for way in graph.nodes[node].ways])
        found = cls(edge, graph.type_of(edge.source), left, leaves)
        for user in edge.users:
            taken, takes = _numbered([needed(graph, user, way) for way in graph.nodes[user[0]].ways])
            found.taken[user], found.takes[user] = taken, takes
            found.may[user] = _may_move(edge, user, left, taken)
        return found


def transports(graph: Graph) -> Sequence[Transport]:
    """Those of all edges of a graph."""
    return graph.once(_transports)


def _transports(graph: Graph) -> Sequence[Transport]:
    return [Transport.of(graph, edge) for edge in graph.edges]


def needed(graph: Graph, user: User, way: Way) -> Placed:
    """How a user needs its operand: an input of a function as it takes it."""
    return way.rests[0] if graph.nodes[user[0]].op is None else way.needs[user[1]]


def _numbered(ways: Sequence[Placed]) -> tuple[list[Placed], Array]:
    """The layouts that some ways have, and for each way which."""
    found: dict[Placed, int] = {}
    numbers = [found.setdefault(lies, len(found)) for lies in ways]
    return list(found), np.array(numbers, dtype=np.int64)


def _may_move(edge: Edge, user: User, left: Sequence[Placed], taken: Sequence[Placed]) -> Array:
    """What `Edge.may_move` says of each move."""
    may = np.ones((len(left), len(taken)), dtype=bool)
    if user in edge.in_place or any(isinstance(p, Partial) for lies in taken for p in lies):
        number: dict[Placement, int] = {}
        before, after = (
            np.array([[number.setdefault(p, len(number)) for p in lies] for lies in some], dtype=np.int64).reshape(
                len(some), -1
            )
            for some in (left, taken)
        )
        differs = before[:, None] != after[None]
        pends = np.array([isinstance(p, Partial) for p in number], dtype=bool)[after]
        may &= ~np.any(differs if user in edge.in_place else differs & pends, axis=2)
    if edge.moves is not None:
        may &= edge.moves[user].among(left, taken)
    return may
