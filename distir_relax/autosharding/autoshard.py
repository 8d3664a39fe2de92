"""The pass that lays a program out by optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.autosharding.apply_solution import lay_out
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.heterogeneous import Unlike
from distir_relax.autosharding.op_strategies import Space
from distir_relax.autosharding.optimize import cheapest, prices_of
from distir_relax.autosharding.partial_sums import may_pend
from distir_relax.autosharding.solver import NoRoom
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op, Searched, lately, whole_of
from distir_relax.layout import DeviceMesh
from distir_relax.sharding.annotation_propagation import spread
from distir_relax.sharding.factors import Factoring, factoring_of
from distir_relax.sharding.nonfinite import Hazards
from distir_relax.sharding.nonfinite import spread as spread_hazards
from distir_relax.support.units import size


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
            solution = cheapest(graph, prices_of(graph, self.profile, self.tail), self.room)
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
                cheapest(some, prices_of(some, self.profile, self.tail), memory)
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
    whole, read = whole_of(module), _read(module, hazards)
    wanted = spread(whole.function, read.factoring, mesh)
    graph = Graph(module, Space(read.factoring, wanted, mesh, read.hazards, read.pending, free, unlike), whole.function)
    graph.build(whole.instance)
    return graph


@dataclass(frozen=True, slots=True)
class _Read:
    """What there is to know of a program written out, whatever the mesh."""

    factoring: Factoring
    hazards: Hazards
    pending: frozenset[str]
    """What may be left pending."""


@lately(8)
def _read(module: Module, given: Hazards) -> _Read:
    """What there is to know of a program of whose constants `given` is known: a search lays out each on several
    meshes."""
    whole, factoring = whole_of(module).function, factoring_of(module)
    known = spread_hazards(Module("global", (whole,)), given)[whole.name]
    return _Read(factoring, known, may_pend(whole, factoring, known))
