"""What all of a program would have taken had a value lain otherwise: the integer program solved again, with it held so.

That is more than its own price: what is around it is laid out anew, as suits it best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from distir_relax.autosharding.apply_solution import lay_out
from distir_relax.autosharding.autoshard import PlaceBySearch
from distir_relax.autosharding.costs import Prices
from distir_relax.autosharding.edges import needed
from distir_relax.autosharding.graph import Graph, Source
from distir_relax.autosharding.integer_program import own_seconds
from distir_relax.autosharding.optimize import cheapest, prices_of
from distir_relax.autosharding.solver import NoRoom, NoWay
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op
from distir_relax.sharding import redistributions
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation
from distir_relax.support.units import size


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the best placements take with which something is as it is asked: seconds of a step, of which so many are of
    ops and the others of redistributions, and bytes of memory that a device needs.

    `sent` are the bytes that each device sends, `collectives` how often each is done, by its name and mesh axis.
    """

    seconds: float
    computing: float
    memory: float
    sent: float
    collectives: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def moving(self) -> float:
        """The seconds of redistributions."""
        return self.seconds - self.computing


@dataclass(frozen=True, slots=True)
class Alternative:
    """A `layout` of a value, and what the best program takes in which it lies so; or why it is `refused`."""

    layout: Placed
    outcome: Outcome | None
    refused: str = ""


@dataclass
class Alternatives:
    """A search for placements and the program that it laid out, to be asked what else there was.

    Values are named as in the program: a function, and a name there. What is alike lies alike: the weights of layers
    that are one function have one layout (`same`).
    """

    search: PlaceBySearch
    module: Module

    @cached_property
    def graph(self) -> Graph:
        """What there is to choose."""
        return self.search.graph(self.module)

    @cached_property
    def prices(self) -> Prices:
        """What each way takes, as far as it was asked for."""
        return prices_of(self.graph, self.search.profile, self.search.tail)

    def layouts(self, function: str, name: str) -> tuple[Placed, ...]:
        """All layouts that a value may be left in; with a sum pending among them, where what uses it can take that."""
        node, result = self._source(function, name)
        return tuple(dict.fromkeys(way.rests[result] for way in self.graph.nodes[node].ways))

    def best(self, function: str, name: str, layout: Placed) -> Alternative:
        """The best program in which a value lies so."""
        node, result = source = self._source(function, name)
        nodes = list(self.graph.nodes)
        ways = tuple(way for way in nodes[node].ways if way.rests[result] == layout)
        nodes[node] = replace(nodes[node], ways=ways)
        try:
            return Alternative(layout, self._solved(self.graph.narrowed(nodes), self.prices))
        except NoRoom as error:
            room = size(self.search.room)
            return Alternative(layout, None, f"does not fit: {size(error.least)} are needed at least, {room} are there")
        except NoWay:
            return Alternative(layout, None, self._obstacle(source, layout))

    def without(self, mark: Op) -> Outcome:
        """The best program without one of the user's marks."""
        number = next(number for number, op in self.graph.marks.items() if op is mark)
        graph = self.search.graph(self.module, frozenset({number}))
        return self._solved(graph, prices_of(graph, self.search.profile, self.search.tail))

    def marks(self, function: str, name: str) -> tuple[Op, ...]:
        """The user's marks on a value."""
        ops = self.module.function(function).ops
        return tuple(op for op in ops if not op.callee and is_annotation(op) and op.operands[0].name == name)

    def same(self, function: str, name: str) -> tuple[str, ...]:
        """The inputs, or values, of a function that lie as a value of it because they are alike, with itself."""
        source = self._source(function, name)
        return tuple(
            other for (where, other), made in self.graph.sources.items() if (where, made) == (function, source)
        )

    def _source(self, function: str, name: str) -> Source:
        found = self.graph.sources.get((function, name))
        if found is None:
            raise DistIRError(f"the program that was laid out has no value %{name}", f"@{function}")
        return found

    def _solved(self, graph: Graph, prices: Prices) -> Outcome:
        found = cheapest(graph, prices, self.search.room)
        return Outcome(
            found.seconds, _computing(graph, prices, found.chosen), found.bytes, *_sent(lay_out(graph, found.chosen))
        )

    def _obstacle(self, source: Source, layout: Placed) -> str:
        """Why there are no placements with which a value lies so, whatever memory there is."""
        for edge in self.graph.edges:
            for user in edge.users if edge.source == source else ():
                node = self.graph.nodes[user[0]]
                if any(edge.may_move(user, layout, needed(self.graph, user, way)) for way in node.ways):
                    continue
                if node.op is not None and is_annotation(node.op):
                    return f"contradicts the mark {node.op.attrs['placements']} at {node.op.location}"
                what = f"@{node.value.name}" if node.op is None else node.op.name
                where = f" at {node.op.location}" if node.op is not None and node.op.location else ""
                return f"{what}{where} cannot take it so"
        return "no placements of what is around it go with this"


def _computing(graph: Graph, prices: Prices, chosen: Sequence[int]) -> float:
    return sum(
        node.count * own_seconds(graph, prices, number, node.ways[way])
        for number, (node, way) in enumerate(zip(graph.nodes, chosen, strict=True))
    )


def _sent(module: Module) -> tuple[float, Mapping[tuple[str, str], int]]:
    """The bytes that each device sends in a program of the sharded stage, and how often each collective is done."""
    counts: Counter[tuple[str, str]] = Counter()
    sent = 0.0
    for moved in redistributions(module):
        sent += moved.bytes * moved.times
        for step in moved.collectives:
            counts[step] += moved.times
    return sent, counts
