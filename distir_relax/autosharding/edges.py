"""Layouts at both ends of each edge, numbered, with the allowed reshards as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.graph import Edge, Graph, User
from distir_relax.autosharding.op_strategies import OpStrategy
from distir_relax.ir import TensorType
from distir_relax.layout import Partial, Placement
from distir_relax.sharding.factor_selection import Placed

Array = npt.NDArray[Any]


@dataclass(slots=True)
class EdgeLayouts:
    """The layouts of a value: its `sources`, as the producer leaves it, and for each user the `targets`."""

    edge: Edge
    tensor: TensorType
    sources: list[Placed]
    source_numbers: Array
    """For each strategy of the producer: the number of its layout in `sources`."""
    targets: dict[User, list[Placed]] = field(default_factory=dict)
    target_numbers: dict[User, Array] = field(default_factory=dict)
    """For each strategy of a user: the number of its layout in `targets`."""
    allowed: dict[User, Array] = field(default_factory=dict)
    """Whether the value may be resharded from each source (row) to each target (column)."""

    @classmethod
    def of(cls, graph: Graph, edge: Edge) -> EdgeLayouts:
        """Return the layouts of an edge."""
        node, result = edge.source
        sources, source_numbers = _numbered([s.final_layouts[result] for s in graph.nodes[node].strategies])
        layouts = cls(edge, graph.type_of(edge.source), sources, source_numbers)
        for user in edge.users:
            targets, numbers = _numbered([operand_layout(graph, user, s) for s in graph.nodes[user[0]].strategies])
            layouts.targets[user], layouts.target_numbers[user] = targets, numbers
            layouts.allowed[user] = _allowed_pairs(edge, user, sources, targets)
        return layouts


def edge_layouts(graph: Graph) -> Sequence[EdgeLayouts]:
    """Return the layouts of all edges of a graph."""
    return graph.cached(_transports)


def _transports(graph: Graph) -> Sequence[EdgeLayouts]:
    return [EdgeLayouts.of(graph, edge) for edge in graph.edges]


def operand_layout(graph: Graph, user: User, strategy: OpStrategy) -> Placed:
    """Return the layout in which a user needs its operand; an input of a function needs its own."""
    return strategy.final_layouts[0] if graph.nodes[user[0]].op is None else strategy.in_layouts[user[1]]


def _numbered(layouts: Sequence[Placed]) -> tuple[list[Placed], Array]:
    """Return the distinct layouts, and for each strategy the number of its own."""
    number: dict[Placed, int] = {}
    indices = [number.setdefault(layout, len(number)) for layout in layouts]
    return list(number), np.array(indices, dtype=np.int64)


def _allowed_pairs(edge: Edge, user: User, sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
    """Return `Edge.allows_reshard` for all pairs as a matrix."""
    allowed = np.ones((len(sources), len(targets)), dtype=bool)
    if user in edge.in_place or any(isinstance(p, Partial) for layout in targets for p in layout):
        number: dict[Placement, int] = {}
        before, after = (
            np.array([[number.setdefault(p, len(number)) for p in layout] for layout in side], dtype=np.int64).reshape(
                len(side), -1
            )
            for side in (sources, targets)
        )
        differs = before[:, None] != after[None]
        is_partial = np.array([isinstance(p, Partial) for p in number], dtype=bool)[after]
        allowed &= ~np.any(differs if user in edge.in_place else differs & is_partial, axis=2)
    if edge.reshards is not None:
        allowed &= edge.reshards[user].submatrix(sources, targets)
    return allowed
