"""The best placements of a graph, from coarse to fine.

First those are looked for that treat all mesh axes alike, then those that treat neighbouring axes alike, and then all.
There are few of the coarse ones, and they are seldom far from the best: what cannot be as good as they are is left out
of the next round (`worth`), where most of it is never priced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from distir_relax.autosharding.costs import Prices
from distir_relax.autosharding.edges import transports
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.op_strategies import Way
from distir_relax.autosharding.pruning import Worth
from distir_relax.autosharding.solver import OutOfTime, Solution, solve, some
from distir_relax.cost.profile import Profile
from distir_relax.layout import Shard
from distir_relax.ops import lookup
from distir_relax.sharding.factor_selection import Placed

Axes = Sequence[int]
"""Numbers of mesh axes."""


def cheapest(graph: Graph, prices: Prices, memory: float = math.inf, limit: float = 60.0) -> Solution:
    """The best ways of a graph's nodes with `memory` bytes a device, as `solve` says; it raises the same.

    Those of `prices` that are needed are found. Each of the programs that are solved may take `limit` seconds.
    """
    _price_ops(graph, prices)
    # On one axis nothing is coarse, and nothing asked.
    worth: Worth | None = None
    best: Solution | None = None
    rest = graph
    for groups in _coarse(graph.space.mesh.shape):
        few = _alike(rest, groups)
        _price_moves(few, prices)
        found = some(few, prices, memory, limit, best.seconds if best is not None else math.inf)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = replace(found, chosen=_numbers(graph, few, found.chosen))
            worth = worth or Worth.of(graph, prices)
            rest = worth.a_look(best.seconds)
    _price_moves(rest, prices)
    try:
        found = solve(rest, prices, memory, limit, known=best)
    except OutOfTime as error:
        if best is None:
            raise
        return replace(best, bound=min(error.bound, best.seconds))
    if best is not None and best.seconds < found.seconds:
        return replace(best, bound=min(found.bound, best.seconds))
    return replace(found, chosen=_numbers(graph, rest, found.chosen))


def prices_of(graph: Graph, profile: Profile, tail: str = "ragged") -> Prices:
    """The prices of a graph's program on a machine, none of them found.

    `tail` says what devices with a short shard do.
    """
    changes = any(lookup(op.name, op.location).code.in_place for op in graph.whole.ops)
    return Prices(graph.space.mesh, profile, tail, changes)


def price(graph: Graph, profile: Profile, tail: str = "ragged") -> Prices:
    """The prices of all ways of the nodes of a graph, and of all that may be moved between them.

    `tail` says what devices with a short shard do.
    """
    prices = prices_of(graph, profile, tail)
    _price_ops(graph, prices)
    _price_moves(graph, prices)
    return prices


def _price_ops(graph: Graph, prices: Prices) -> None:
    for number, node in enumerate(graph.nodes):
        if node.op is not None and graph.is_priced(node):
            for way in node.ways:
                prices.ask_op(node.op, way, graph.roles(number))
    prices.find()


def _price_moves(graph: Graph, prices: Prices) -> None:
    for node in graph.nodes:
        if node.op is not None and graph.is_priced(node):
            for way in node.ways:
                for value, gives, rests in zip(node.op.results, way.gives, way.rests, strict=True):
                    prices.ask_moves(value.tensor, (gives,), (rests,), np.ones((1, 1), dtype=bool))
    for at in transports(graph):
        for user, may in at.may.items():
            prices.ask_moves(at.kind, at.left, at.taken[user], may)
    prices.find()


def _coarse(mesh: Sequence[int]) -> Iterator[Sequence[Axes]]:
    """How axes are treated alike: all of them, then those before and those behind each one."""
    axes = [axis for axis, size in enumerate(mesh) if size > 1]
    if len(axes) > 1:
        yield (axes,)
    if len(axes) > 2:
        yield from ((axes[:i], axes[i:]) for i in range(1, len(axes)))


def _alike(graph: Graph, groups: Sequence[Axes]) -> Graph:
    """The graph with ways that treat the axes of each group alike; with all ways of what has none."""
    return graph.narrowed(
        [
            replace(node, ways=tuple(way for way in node.ways if _is_alike(way, groups)) or node.ways)
            for node in graph.nodes
        ]
    )


def _is_alike(way: Way, groups: Sequence[Axes]) -> bool:
    return all(
        len({_how(lies, axis) for axis in group}) == 1
        for lies in (*way.needs, *way.gives, *way.rests)
        for group in groups
    )


def _how(lies: Placed, axis: int) -> object:
    placement = lies[axis]
    return placement.dim if isinstance(placement, Shard) else placement


def _numbers(graph: Graph, few: Graph, chosen: Sequence[int]) -> tuple[int, ...]:
    """The ways that are chosen of some of a graph, by their numbers in it."""
    return tuple(
        node.ways.index(fewer.ways[number]) for node, fewer, number in zip(graph.nodes, few.nodes, chosen, strict=True)
    )
