"""Predict the steps of many strategies of a model with few compilations.

Candidates share passes. Up to the cut into stages, programs depend on the degrees alone. Afterwards a program depends
on the size of its microbatches, but not on their number: the number and the order are records. Of the sizes of
microbatches the smallest and the largest are compiled, and those in between are interpolated
(`batch_interpolation.interpolate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from distir_relax.compiler.pass_manager import run_passes
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import Module, Pass, RepeatedMicrobatches, TaskOrder, gc_disabled
from distir_relax.layout.partition import balanced, proportional
from distir_relax.lowering import Microbatches
from distir_relax.lowering.gradient_accumulation import is_microbatch_order
from distir_relax.lowering.microbatches import representative_microbatches
from distir_relax.lowering.schedule_order import task_sequence
from distir_relax.schedules import Order, order_of, schedule_named
from distir_relax.sharding.factors import FactoringCache
from distir_relax.simulation.kept_values import as_executed
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulation_plan import SimulationPlan
from distir_relax.simulation.simulator import SimulatedCalls, simulate_module
from distir_relax.strategies.heterogeneous import Shares
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.batch_interpolation import (
    StructureMismatch,
    differ_by_rank,
    interpolate,
    same_structure,
    with_shared_types,
)
from distir_relax.strategy_search.outcome import Lanes, Outcome
from distir_relax.strategy_search.search_space import Candidate

Draw = Callable[[Simulation], Lanes]


@dataclass(frozen=True, slots=True)
class _Form:
    """Common structure of programs of different microbatch sizes: splits, relevant order, distinct microbatches."""

    split: Strategy
    distinct: int
    is_serialized: bool
    single: tuple[int, ...] = ()
    """The samples of each data-parallel rank, if one has a single sample: a dim of one element is special."""


class Evaluator:
    """Predict steps of one model on one machine.

    `source` has a batch larger than any candidate's. Programs of one form are cached, and stage cuts that differ in
    their mesh alone: so candidates are best evaluated in the order of `Space.candidates`. `draw` makes the timelines of
    outcomes.
    """

    def __init__(
        self, source: Source, profile: Profile, candidates: Iterable[Candidate] = (), draw: Draw | None = None
    ) -> None:
        self.source = source.with_shape_ops() if profile.shape_op else source
        self.profile, self.draw = profile, draw
        self._sizes: dict[_Form, set[int]] = {}
        for candidate in candidates:
            form = self._form(candidate)
            if form is not None:
                self._sizes.setdefault(form, set()).add(candidate.microbatch)
        self._stage_cuts: dict[Strategy, Module] = {}
        self._prefix: list[tuple[Pass, Module]] = []
        self._factored = FactoringCache()
        self._expanded: tuple[Microbatches, Module, Module] | None = None
        self._compiled_ends: dict[_Form, dict[int, Module]] = {}
        self._differs: dict[_Form, bool] = {}
        self._programs: dict[tuple[_Form, int], tuple[Module, SimulatedCalls]] = {}
        """Programs by size of microbatch, whatever their number, and the calls that were simulated."""
        self._plans: dict[_Form, tuple[int, SimulationPlan]] = {}
        """For each form the last number of microbatches, and the plan for it."""

    def outcome(self, candidate: Candidate) -> Outcome:
        """Return the predicted step of a candidate, with `refused` if it cannot be compiled."""
        # Collection resumes when the simulation is freed: before, it would traverse all of it.
        with gc_disabled():
            return self._outcome(candidate)

    def simulate(self, candidate: Candidate) -> Simulation:
        """Return the simulation of a candidate. Raises as `Source.simulate` does."""
        # Once for all passes: each end would traverse all that the pass has allocated.
        with gc_disabled():
            simulation = self._simulate(candidate)
        simulation.samples, simulation.strategy = candidate.samples, str(candidate.strategy)
        return simulation

    def _outcome(self, candidate: Candidate) -> Outcome:
        try:
            simulation = self.simulate(candidate)
            return Outcome.of(candidate, simulation, () if self.draw is None else self.draw(simulation))
        except DistIRError as error:
            return Outcome(str(candidate.strategy), candidate.samples, refused=error.message)

    def _simulate(self, candidate: Candidate) -> Simulation:
        program = self._interpolate(candidate)
        try:
            if program is None:
                return simulate_module(self._compile(candidate), self.profile)
            module, calls = program
            plan = self._plan_of(candidate, module)
            return simulate_module(module, self.profile, plan, calls=None if plan is None else calls)
        except VerificationError:
            # The microbatches of this model are not all equal.
            return self.source.with_strategy(candidate.strategy).simulate(self.profile, candidate.samples)

    def _form(self, candidate: Candidate) -> _Form | None:
        """Return the form of a candidate's program; None if it shares none."""
        strategy, samples = candidate.strategy, candidate.samples
        parts = self._parts(strategy, candidate.microbatch)
        is_uneven = len(set(parts)) > 1 and not self._shares(strategy)
        if samples % strategy.microbatches or is_uneven or min(parts) < 1 or strategy.placements == "auto":
            # The optimal placements depend on sizes.
            return None
        order = self._order(strategy)
        if strategy.pipeline > 1 and order is None:
            return None
        is_serialized = order is None or is_microbatch_order(order)
        distinct = len(representative_microbatches(samples, strategy.microbatches, self.source.is_training))
        return _Form(strategy.replace(microbatches=1), distinct, is_serialized, parts if min(parts) == 1 else ())

    def _shares(self, strategy: Strategy) -> tuple[float, ...]:
        """Return the batch shares of data-parallel ranks; empty if equal."""
        profile = self.source.options["profile"]
        return Shares.of(None if profile is None else as_profile(profile), strategy).along("data")

    def _parts(self, strategy: Strategy, microbatch: int) -> tuple[int, ...]:
        """Return the samples of each data-parallel rank."""
        shares = self._shares(strategy)
        return proportional(microbatch, shares) if shares else balanced(microbatch, strategy.data)

    def _order(self, strategy: Strategy) -> Order | None:
        """Return the order of a pipeline, if it depends on its shape alone."""
        if strategy.pipeline == 1 or not schedule_named(strategy.schedule).by_shape:
            return None
        return order_of(strategy.schedule, strategy.pipeline, strategy.microbatches, strategy.chunks)

    def _interpolate(self, candidate: Candidate) -> tuple[Module, SimulatedCalls] | None:
        """Interpolate the candidate's program between the smallest and the largest microbatch of its form.

        With it come the calls of simulations of as large microbatches, whatever their number.
        """
        form, size = self._form(candidate), candidate.microbatch
        if form is None or size not in self._sizes.get(form, ()):
            return None
        if any(other.split != form.split for other in self._compiled_ends):
            self._compiled_ends, self._programs, self._plans = {}, {}, {}
        if (form, size) not in self._programs:
            module = self._between_ends(candidate, form, size)
            if module is None:
                return None
            self._programs[form, size] = module, SimulatedCalls()
        module, calls = self._programs[form, size]
        return self._with_count(module, candidate), calls

    def _between_ends(self, candidate: Candidate, form: _Form, size: int) -> Module | None:
        """Interpolate the program of a size of microbatch; None if the ends of its form do not allow that."""
        ends = self._compiled_ends.setdefault(form, {})
        programs = []
        for bound in (min(self._sizes[form]), max(self._sizes[form])):
            if bound not in ends:
                count = candidate.strategy.microbatches
                ends[bound] = self._compile(Candidate(candidate.strategy, bound * count))
            programs.append((bound, ends[bound]))
        low, high = programs
        cuts = [self._parts(candidate.strategy, n) for n in (low[0], size, high[0])]
        if any((b - a) * (high[0] - low[0]) != (c - a) * (size - low[0]) for a, b, c in zip(*cuts, strict=True)):
            return None
        try:
            return interpolate(low, high, size)
        except StructureMismatch:
            return None

    def _plan_of(self, candidate: Candidate, module: Module) -> SimulationPlan | None:
        """Return the simulation plan for all sizes of as many microbatches; None if programs or device classes
        differ."""
        form = self._form(candidate)
        assert form is not None, "the module is of a form"
        if form not in self._differs:
            ends = self._compiled_ends[form]
            first, last = ends[min(ends)], ends[max(ends)]
            self._differs[form] = not same_structure(first, last) or differ_by_rank(first, last)
        if self._differs[form]:
            return None
        count, (previous, plan) = candidate.strategy.microbatches, self._plans.get(form, (0, None))
        if plan is None:
            plan = SimulationPlan(module, self.profile)
        elif count != previous:
            plan = plan.with_records(module)
        self._plans[form] = count, plan
        return plan

    def _with_count(self, module: Module, candidate: Candidate) -> Module:
        """Return the module for the candidate's number of microbatches."""
        strategy, order = candidate.strategy, self._order(candidate.strategy)
        records = []
        for record in module.records:
            if isinstance(record, RepeatedMicrobatches):
                firsts = representative_microbatches(candidate.samples, strategy.microbatches, record.summed)
                record = replace(record, count=strategy.microbatches, firsts=firsts)
            elif isinstance(record, TaskOrder):
                assert order is not None
                record = TaskOrder(task_sequence(order))
            records.append(record)
        return replace(module, records=tuple(records))

    def _compile(self, candidate: Candidate) -> Module:
        """Compile a candidate, reusing the cut into stages and the passes before it."""
        strategy = candidate.strategy
        source = self.source.with_strategy(strategy)
        steps = source.distributed_passes(repeated=True, samples=candidate.samples)
        first, parts = next((i, step) for i, step in enumerate(steps) if isinstance(step, Microbatches))
        # The cut does not depend on the schedule and the number of microbatches, except if there is one.
        schedule = "1f1b" if strategy.chunks == 1 else strategy.schedule
        key = strategy.replace(microbatches=min(strategy.microbatches, 2), schedule=schedule)
        if key not in self._stage_cuts:
            # Keep cuts for other meshes: with placements=auto the following passes are the same for all.
            self._stage_cuts = {k: cut for k, cut in self._stage_cuts.items() if _on_any_mesh(k) == _on_any_mesh(key)}
            self._stage_cuts[key] = self._run_passes(steps[:first], source)
        module = self._expand(self._stage_cuts[key], replace(parts, factored=self._factored), source)
        distributed = run_passes(module, steps[first + 1 :], source.checks)
        return with_shared_types(as_executed(distributed, self.profile))

    def _expand(self, cut: Module, parts: Microbatches, source: Source) -> Module:
        """Return a program with its microbatches expanded, reusing the last one if only the mesh differs."""
        if self._expanded is not None:
            last, last_cut, expanded = self._expanded
            if last == parts and last_cut.functions == cut.functions and last_cut.records == cut.records:
                return replace(expanded, meshes=cut.meshes)
        expanded = run_passes(cut, [parts], source.checks)
        self._expanded = parts, cut, expanded
        return expanded

    def _run_passes(self, passes: Sequence[Pass], source: Source) -> Module:
        """Run passes on the model, reusing those that the last run began with."""
        reused = 0
        for step, (other, _) in zip(passes, self._prefix, strict=False):
            if step != other:
                break
            reused += 1
        del self._prefix[reused:]
        for step in passes[reused:]:
            module = self._prefix[-1][1] if self._prefix else source.imported.module
            self._prefix.append((step, run_passes(module, [step], source.checks)))
        return self._prefix[-1][1] if passes else source.imported.module


def _on_any_mesh(strategy: Strategy) -> Strategy:
    return strategy.replace(data=1, tensor=1)
