"""The pass that lays a program out by optimisation."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op, Searched, written_out
from distir_relax.layout import DeviceMesh
from distir_relax.ops import lookup
from distir_relax.placements.graph import Graph
from distir_relax.placements.highs import NoRoom, solve
from distir_relax.placements.integer_program import needed
from distir_relax.placements.lay_out import lay_out
from distir_relax.placements.pending import may_pend
from distir_relax.placements.prices import Prices
from distir_relax.placements.space import Space
from distir_relax.placements.unlike import Unlike
from distir_relax.sharding.factors import factorize
from distir_relax.sharding.hazards import Hazards
from distir_relax.sharding.hazards import spread as spread_hazards
from distir_relax.sharding.spread import spread
from distir_relax.units import size


@dataclass(frozen=True, slots=True)
class PlaceBySearch:
    """The pass: global stage in, sharded stage out, in the layout that takes least time on the machine of `profile`.

    No device needs more than `memory` bytes, by default what it has. Annotations stay as they are: what they mark lies
    so. Raises `DistIRError` where there is no such layout: it names a smallest set of marks that leave no room, or says
    what needs the least memory that there is.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "sharded"
    mesh: DeviceMesh
    profile: Profile
    tail: str = "ragged"
    memory: float | None = None
    hazards: Hazards = field(default=Hazards(), repr=False)

    @property
    def room(self) -> float:
        """The bytes that a device may need; of devices with unlike memory, the one that has most."""
        if self.memory is not None:
            return self.memory
        return max(memory for _, memory in self.profile.kinds(self.mesh.size))

    def run(self, module: Module) -> Module:
        """The module laid out."""
        graph = self.graph(module)
        try:
            solution = solve(graph, price(graph, self.profile, self.tail), self.room)
        except NoRoom as error:
            raise self._conflict(module, graph, error, self.room) from None
        module = lay_out(graph, solution.chosen)
        times = (round(solution.seconds * 1e12), round(solution.bound * 1e12))
        return replace(module, records=(*module.records, Searched(self.profile.name, *times, round(solution.bytes))))

    def graph(self, module: Module, free: frozenset[int] = frozenset()) -> Graph:
        """What there is to choose; marks of the numbers `free`, in the program written out, are left out."""
        unlike = Unlike.of(self.profile, self.mesh, self.memory is not None)
        return graph_of(module, self.mesh, self.hazards, free, unlike)

    def _conflict(self, module: Module, graph: Graph, error: NoRoom, memory: float) -> DistIRError:
        """The error that names the marks that no placements fit with; the given one where there are none that fit.

        The set is smallest: without any of its marks, and with all others, something fits.
        """

        def fits(free: frozenset[int]) -> bool:
            some = self.graph(module, free)
            try:
                solve(some, price(some, self.profile, self.tail), memory)
            except NoRoom:
                return False
            return True

        free = frozenset(graph.marks)
        if not graph.marks or not fits(free):
            return error
        for number in graph.marks:
            if fits(free - {number}):
                free -= {number}
        # Marks that are left in are not what it is about, those that have to go are.
        named = [_shown(graph.marks[number]) for number in sorted(free)]
        return DistIRError(
            f"with {' and '.join(named)} no placements need {size(memory)} on each device or less: the least there is "
            f"needs {size(error.least)}",
            graph.marks[min(free)].location,
            f"leave {'it' if len(named) == 1 else 'them'} out, or give memory={math.ceil(error.least)} or more",
        )


def _shown(mark: Op) -> str:
    return f"the mark {mark.attrs['placements']} on %{mark.operands[0].name}"


def graph_of(
    module: Module, mesh: DeviceMesh, hazards: Hazards = Hazards(), free: frozenset[int] = frozenset(),  # noqa: B008
    unlike: Unlike = Unlike(),  # noqa: B008
) -> Graph:  # fmt: skip
    """What there is to choose in a module of the global stage on a mesh; `hazards` are known of its constants.

    Marks of the numbers `free`, in the program written out, are left out. Where devices are `unlike`, classes of dims
    are cut by their speed.
    """
    whole = written_out(module, module.main)
    factoring = factorize(whole.function)
    known = spread_hazards(Module("global", (whole.function,)), hazards)[whole.function.name]
    pending = may_pend(whole.function, factoring, known)
    wanted = spread(whole.function, factoring, mesh)
    graph = Graph(module, Space(factoring, wanted, mesh, known, pending, free, unlike), whole.function)
    graph.build(whole.instance)
    return graph


def price(graph: Graph, profile: Profile, tail: str = "ragged") -> Prices:
    """The prices of all ways of the nodes of a graph, and of all that may be moved between them.

    `tail` says what devices with a short shard do.
    """
    changes = any(lookup(op.name, op.location).code.in_place for op in graph.whole.ops)
    prices = Prices(graph.space.mesh, profile, tail, changes)
    for number, node in enumerate(graph.nodes):
        if node.op is None or not graph.is_priced(node):
            continue
        for way in node.ways:
            prices.ask_op(node.op, way, graph.roles(number))
            for value, gives, rests in zip(node.op.results, way.gives, way.rests, strict=True):
                prices.ask_move(value.tensor, gives, rests)
    for edge in graph.edges:
        kind = graph.type_of(edge.source)
        sources = {way.rests[edge.source[1]] for way in graph.nodes[edge.source[0]].ways}
        targets = {(user, needed(graph, user, way)) for user in edge.users for way in graph.nodes[user[0]].ways}
        for source, (user, target) in itertools.product(sources, targets):
            if edge.may_move(user, source, target):
                prices.ask_move(kind, source, target)
    prices.find()
    return prices
