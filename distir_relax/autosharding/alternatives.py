"""Cost of the alternative layouts of a value: solve the integer program again with the value fixed to each of them.

All other values are optimized anew, so the cost of a layout is that of the whole program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from distir_relax.autosharding.apply_solution import apply_solution
from distir_relax.autosharding.autoshard import PlaceBySearch
from distir_relax.autosharding.costs import CostTable
from distir_relax.autosharding.edges import operand_layout
from distir_relax.autosharding.graph import Graph, Source
from distir_relax.autosharding.integer_program import op_seconds
from distir_relax.autosharding.optimize import cost_table_of, optimize
from distir_relax.autosharding.solver import Infeasible, InsufficientMemory
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op
from distir_relax.layout import print_placements
from distir_relax.sharding import list_reshards
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation
from distir_relax.support.units import size


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fastest program under a condition: seconds of a step and of its ops alone, bytes of memory per device.

    `sent` is the bytes that each device sends; `collectives` counts the collectives by name and mesh axis.
    """

    seconds: float
    op_seconds: float
    memory: float
    sent: float
    collectives: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def reshard_seconds(self) -> float:
        """Return the seconds of redistributions."""
        return self.seconds - self.op_seconds


@dataclass(frozen=True, slots=True)
class Alternative:
    """A `layout` of a value, and the fastest program with it; or the reason why it is `refused`."""

    layout: Placed
    outcome: Outcome | None
    refused: str = ""


@dataclass
class Alternatives:
    """A completed search for placements and its program, to be queried for the cost of other layouts.

    Values are named by a function and a name there. Equivalent values share one layout (`same`): the weights of layers
    that are calls of one function, for example.
    """

    search: PlaceBySearch
    module: Module

    @cached_property
    def graph(self) -> Graph:
        """Return the strategy graph of the program."""
        return self.search.graph(self.module)

    @cached_property
    def costs(self) -> CostTable:
        """Return the cost table, filled on demand."""
        return cost_table_of(self.graph, self.search.profile, self.search.tail)

    def layouts(self, function: str, name: str) -> tuple[Placed, ...]:
        """Return all layouts in which a value may be left, with partial sums if its user accepts them."""
        node, result = self._source(function, name)
        return tuple(dict.fromkeys(s.final_layouts[result] for s in self.graph.nodes[node].strategies))

    def best(self, function: str, name: str, layout: Placed) -> Alternative:
        """Return the fastest program in which a value has this layout."""
        node, result = source = self._source(function, name)
        nodes = list(self.graph.nodes)
        strategies = tuple(s for s in nodes[node].strategies if s.final_layouts[result] == layout)
        nodes[node] = replace(nodes[node], strategies=strategies)
        try:
            return Alternative(layout, self._solve(self.graph.restrict(nodes), self.costs))
        except InsufficientMemory as error:
            memory = size(self.search.memory_limit)
            return Alternative(layout, None, f"does not fit: needs at least {size(error.minimum)} of {memory}")
        except Infeasible:
            return Alternative(layout, None, self._obstacle(source, layout))

    def without(self, annotation: Op) -> Outcome:
        """Return the fastest program without one of the user's annotations."""
        number = next(number for number, op in self.graph.annotations.items() if op is annotation)
        graph = self.search.graph(self.module, frozenset({number}))
        return self._solve(graph, cost_table_of(graph, self.search.profile, self.search.tail))

    def annotations(self, function: str, name: str) -> tuple[Op, ...]:
        """Return the user's annotations on a value."""
        ops = self.module.function(function).ops
        return tuple(op for op in ops if not op.callee and is_annotation(op) and op.operands[0].name == name)

    def same(self, function: str, name: str) -> tuple[str, ...]:
        """Return the inputs, or values, of a function that share the layout of a value, itself among them."""
        source = self._source(function, name)
        return tuple(
            other for (where, other), producer in self.graph.sources.items() if (where, producer) == (function, source)
        )

    def _source(self, function: str, name: str) -> Source:
        source = self.graph.sources.get((function, name))
        if source is None:
            raise DistIRError(f"the sharded program has no value %{name}", f"@{function}")
        return source

    def _solve(self, graph: Graph, costs: CostTable) -> Outcome:
        best = optimize(graph, costs, self.search.memory_limit)
        return Outcome(
            best.seconds, _op_time(graph, costs, best.chosen), best.bytes, *_traffic(apply_solution(graph, best.chosen))
        )

    def _obstacle(self, source: Source, layout: Placed) -> str:
        """Return why no placements give a value this layout, whatever the memory."""
        for edge in self.graph.edges:
            for user in edge.users if edge.source == source else ():
                node = self.graph.nodes[user[0]]
                if any(edge.allows_reshard(user, layout, operand_layout(self.graph, user, s)) for s in node.strategies):
                    continue
                if node.op is not None and is_annotation(node.op):
                    return f"contradicts annotation {print_placements(node.op.placements)} at {node.op.location}"
                name = f"@{node.value.name}" if node.op is None else node.op.name
                where = f" at {node.op.location}" if node.op is not None and node.op.location else ""
                return f"{name}{where} does not support this layout"
        return "no placements of the other values are compatible with it"


def _op_time(graph: Graph, costs: CostTable, chosen: Sequence[int]) -> float:
    return sum(
        node.count * op_seconds(graph, costs, number, node.strategies[choice])
        for number, (node, choice) in enumerate(zip(graph.nodes, chosen, strict=True))
    )


def _traffic(module: Module) -> tuple[float, Mapping[tuple[str, str], int]]:
    """Return the bytes that each device sends in a program of the sharded stage, and the number of each collective."""
    counts: Counter[tuple[str, str]] = Counter()
    sent = 0.0
    for reshard in list_reshards(module):
        sent += reshard.bytes * reshard.times
        for step in reshard.collectives:
            counts[step] += reshard.times
    return sent, counts
