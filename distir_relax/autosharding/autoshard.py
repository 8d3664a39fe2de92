"""Autosharding pass: choose the fastest placements of a program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.autosharding.apply_solution import apply_solution
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.heterogeneous import Heterogeneity
from distir_relax.autosharding.op_strategies import StrategySpace
from distir_relax.autosharding.optimize import cost_table_of, optimize
from distir_relax.autosharding.partial_sums import deferrable_sums
from distir_relax.autosharding.solver import InsufficientMemory
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.executable.lasting_values import computed_once
from distir_relax.ir import Autosharding, Module, Op, inlined_main, memoize
from distir_relax.layout import DeviceMesh, print_placements
from distir_relax.sharding.annotation_propagation import propagate_annotations
from distir_relax.sharding.factors import Factoring, factoring_of
from distir_relax.sharding.nonfinite import NonfiniteValues, propagate_nonfinite
from distir_relax.support.units import size


@dataclass(frozen=True, slots=True)
class PlaceBySearch:
    """Pass from the global to the sharded stage, in the layout that takes least time on the machine of `profile`.

    No device needs more than `memory` bytes, by default all that it has. Annotated values keep their layouts. Raises
    `DistIRError` if there is no such layout: it names a smallest set of conflicting annotations, or the op that sets
    the least memory possible.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "sharded"
    mesh: DeviceMesh
    profile: Profile
    tail: str = "ragged"
    memory: float | None = None
    hazards: NonfiniteValues = field(default=NonfiniteValues(), repr=False)

    @property
    def memory_limit(self) -> float:
        """Return the memory limit of a device in bytes; on heterogeneous devices, of the largest."""
        if self.memory is not None:
            return self.memory
        return max(memory for _, memory in self.profile.device_specs(self.mesh.size))

    def run(self, module: Module) -> Module:
        """Return the sharded module."""
        graph = self.graph(module)
        try:
            best = optimize(graph, cost_table_of(graph, self.profile, self.tail), self.memory_limit)
        except InsufficientMemory as error:
            raise self._conflict(module, graph, error, self.memory_limit) from None
        module = apply_solution(graph, best.chosen)
        times = (round(best.seconds * 1e12), round(best.bound * 1e12))
        return replace(module, records=(*module.records, Autosharding(self.profile.name, *times, round(best.bytes))))

    def graph(self, module: Module, ignored: frozenset[int] = frozenset()) -> Graph:
        """Return the strategy graph; annotations of the numbers `free` in the inlined program are ignored."""
        heterogeneity = Heterogeneity.of(self.profile, self.mesh, self.memory is not None)
        return build_graph(module, self.mesh, self.hazards, ignored, heterogeneity, self.profile.folds)

    def _conflict(self, module: Module, graph: Graph, error: InsufficientMemory, limit: float) -> DistIRError:
        """Return the error that names the annotations that no placements fit with; `error` if there are none.

        The set is minimal: without any one of its annotations, and with all others, something fits.
        """

        def fits(ignored: frozenset[int]) -> bool:
            relaxed = self.graph(module, ignored)
            try:
                optimize(relaxed, cost_table_of(relaxed, self.profile, self.tail), limit)
            except InsufficientMemory:
                return False
            return True

        ignored = frozenset(graph.annotations)
        if not graph.annotations or not fits(ignored):
            return error
        for number in graph.annotations:
            if fits(ignored - {number}):
                ignored -= {number}
        # Annotations that are kept do not conflict; those that must be removed do.
        texts = [_annotation_text(graph.annotations[number]) for number in sorted(ignored)]
        return DistIRError(
            f"no placements with {' and '.join(texts)} fit in {size(limit)} per device: at least {size(error.minimum)} "
            "needed",
            graph.annotations[min(ignored)].location,
            f"remove {'it' if len(texts) == 1 else 'them'}, or give memory={math.ceil(error.minimum)} or more",
        )


def _annotation_text(annotation: Op) -> str:
    return f"annotation {print_placements(annotation.placements)} on %{annotation.operands[0].name}"


def build_graph(
    module: Module, mesh: DeviceMesh, hazards: NonfiniteValues = NonfiniteValues(),  # noqa: B008
    ignored: frozenset[int] = frozenset(), heterogeneity: Heterogeneity = Heterogeneity(),  # noqa: B008
    folds: bool = True,
) -> Graph:  # fmt: skip
    """Return the strategy graph of a module of the global stage on a mesh; `hazards` are those of its constants.

    Annotations of the numbers `free` in the inlined program are ignored. Classes of dims are cut by device speed if
    `heterogeneity` has any. With `folds`, values that depend on weights alone cost nothing: they are computed once.
    """
    inlined, facts = inlined_main(module), _analyze(module, hazards)
    targets = propagate_annotations(inlined.function, facts.factoring, mesh)
    graph = Graph(
        module,
        StrategySpace(facts.factoring, targets, mesh, facts.hazards, facts.deferrable, ignored, heterogeneity),
        inlined.function,
        facts.once if folds else {},
    )
    graph.build(inlined.instance)
    return graph


@dataclass(frozen=True, slots=True)
class _ProgramFacts:
    """Analysis results of an inlined program that do not depend on the mesh."""

    factoring: Factoring
    hazards: NonfiniteValues
    deferrable: frozenset[str]
    """The values that may be left as partial sums."""
    once: Mapping[str, set[str]]
    """The values of each function that are computed once."""


@memoize(8)
def _analyze(module: Module, constant_hazards: NonfiniteValues) -> _ProgramFacts:
    """Analyze a program, whatever the mesh; `constant_hazards` are those of its constants."""
    inlined, factoring = inlined_main(module).function, factoring_of(module)
    hazards = propagate_nonfinite(Module("global", (inlined,)), constant_hazards)[inlined.name]
    return _ProgramFacts(factoring, hazards, deferrable_sums(inlined, factoring, hazards), computed_once(module))
