"""What strategies are predicted to do: one model, compiled as few times as it takes.

Candidates share what they can. Up to the cut into stages, programs depend on the degrees alone. Behind it a program
depends on how large its microbatches are, and not on how many there are: that, and their order, is a record. Of the
sizes of microbatches the smallest and the largest are compiled, and those in between follow (`planner.scaled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from distir_relax.analysis.simulation import Simulation
from distir_relax.analysis.simulation_plan import Structure
from distir_relax.analysis.simulator import simulate_module
from distir_relax.compiler.pass_manager import run_passes
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import Module, Pass, Repeated, Scheduled
from distir_relax.layout.partition import balanced, proportional
from distir_relax.lowering import Microbatches
from distir_relax.lowering.gradient_accumulation import is_in_turn
from distir_relax.lowering.microbatches import chosen
from distir_relax.lowering.schedule_order import in_sequence
from distir_relax.schedules import Order, order_of, schedule_named
from distir_relax.sharding.factors import Factored
from distir_relax.strategies.heterogeneous import Shares
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.batch_interpolation import Unlike, alike, differ_by_rank, scaled, with_shared_types
from distir_relax.strategy_search.outcome import Lanes, Outcome
from distir_relax.strategy_search.search_space import Candidate

Draw = Callable[[Simulation], Lanes]


@dataclass(frozen=True, slots=True)
class _Form:
    """What programs have in common that differ in the size of their microbatches: how they are split, in what order
    stages run (so far as it matters), and how many microbatches are written out."""

    split: Strategy
    written: int
    in_turn: bool
    single: tuple[int, ...] = ()
    """The samples of each data-parallel rank, where one has a single one: a dim of one element is treated apart."""


class Evaluator:
    """Predicts steps of one model on one machine.

    `source` has a batch larger than any that is asked for. The programs of one form are kept, and those cut into stages
    that differ in their mesh alone: so candidates are best asked for in the order of `Space.candidates`. `draw` makes
    the time lines of outcomes.
    """

    def __init__(
        self, source: Source, profile: Profile, candidates: Iterable[Candidate] = (), draw: Draw | None = None
    ) -> None:
        self.source, self.profile, self.draw = source, profile, draw
        self._sizes: dict[_Form, set[int]] = {}
        for candidate in candidates:
            form = self._form(candidate)
            if form is not None:
                self._sizes.setdefault(form, set()).add(candidate.microbatch)
        self._cuts: dict[Strategy, Module] = {}
        self._begun: list[tuple[Pass, Module]] = []
        self._factored = Factored()
        self._divided: tuple[Microbatches, Module, Module] | None = None
        self._ends: dict[_Form, dict[int, Module]] = {}
        self._unlike: dict[_Form, bool] = {}
        self._structure: tuple[object, Structure] | None = None

    def outcome(self, candidate: Candidate) -> Outcome:
        """What a candidate is predicted to do; one that cannot be compiled says why in `refused`."""
        try:
            found = self.simulate(candidate)
            return Outcome.of(candidate, found, () if self.draw is None else self.draw(found))
        except DistIRError as error:
            return Outcome(str(candidate.strategy), candidate.samples, refused=error.message)

    def simulate(self, candidate: Candidate) -> Simulation:
        """The simulation of a candidate. Raises as `Source.simulate` does."""
        module = self._between(candidate)
        try:
            if module is None:
                found = simulate_module(self._compiled(candidate), self.profile)
            else:
                found = simulate_module(module, self.profile, self._structure_of(candidate, module))
        except VerificationError:
            # Microbatches of this model do not all do the same.
            found = self.source.under(candidate.strategy).simulate(self.profile, candidate.samples)
        found.samples, found.strategy = candidate.samples, str(candidate.strategy)
        return found

    def _form(self, candidate: Candidate) -> _Form | None:
        """The form of a candidate's program; None of one that is like no other."""
        strategy, samples = candidate.strategy, candidate.samples
        parts = self._parts(strategy, candidate.microbatch)
        unlike = len(set(parts)) > 1 and not self._shares(strategy)
        if samples % strategy.microbatches or unlike or min(parts) < 1 or strategy.placements == "auto":
            # Which placements are best depends on sizes.
            return None
        order = self._order(strategy)
        if strategy.pipeline > 1 and order is None:
            return None
        in_turn = order is None or is_in_turn(order)
        written = len(chosen(samples, strategy.microbatches, self.source.is_training))
        return _Form(replace(strategy, microbatches=1), written, in_turn, parts if min(parts) == 1 else ())

    def _shares(self, strategy: Strategy) -> tuple[float, ...]:
        """In what proportions the batch goes to data-parallel ranks; empty where they are alike."""
        given = self.source.options["profile"]
        return Shares.of(None if given is None else as_profile(given), strategy).data

    def _parts(self, strategy: Strategy, microbatch: int) -> tuple[int, ...]:
        """The samples of each data-parallel rank."""
        shares = self._shares(strategy)
        return proportional(microbatch, shares) if shares else balanced(microbatch, strategy.data)

    def _order(self, strategy: Strategy) -> Order | None:
        """The order of a pipeline, where it depends on nothing but its shape."""
        if strategy.pipeline == 1 or not schedule_named(strategy.schedule).by_shape:
            return None
        return order_of(strategy.schedule, strategy.pipeline, strategy.microbatches, strategy.chunks)

    def _between(self, candidate: Candidate) -> Module | None:
        """The candidate's program from those of its form with the smallest and the largest microbatches."""
        form, size = self._form(candidate), candidate.microbatch
        if form is None or size not in self._sizes.get(form, ()):
            return None
        if any(other.split != form.split for other in self._ends):
            self._ends = {}
        ends = self._ends.setdefault(form, {})
        found = []
        for end in (min(self._sizes[form]), max(self._sizes[form])):
            if end not in ends:
                count = candidate.strategy.microbatches
                ends[end] = self._compiled(Candidate(candidate.strategy, end * count))
            found.append((end, ends[end]))
        low, high = found
        cuts = [self._parts(candidate.strategy, n) for n in (low[0], size, high[0])]
        if any((b - a) * (high[0] - low[0]) != (c - a) * (size - low[0]) for a, b, c in zip(*cuts, strict=True)):
            return None
        try:
            module = scaled(low, high, size)
        except Unlike:
            return None
        return self._of_count(module, candidate)

    def _structure_of(self, candidate: Candidate, module: Module) -> Structure | None:
        """What is the same of as many microbatches of all sizes; None where programs of other sizes are unlike, or
        devices get unlike parts of them."""
        form = self._form(candidate)
        assert form is not None, "the module is of a form"
        if form not in self._unlike:
            ends = self._ends[form]
            low, high = ends[min(ends)], ends[max(ends)]
            self._unlike[form] = not alike(low, high) or differ_by_rank(low, high)
        if self._unlike[form]:
            return None
        key = form, candidate.strategy.microbatches
        if self._structure is None or self._structure[0] != key:
            self._structure = key, Structure(module, self.profile)
        return self._structure[1]

    def _of_count(self, module: Module, candidate: Candidate) -> Module:
        """The module for as many microbatches as the candidate has."""
        strategy, order = candidate.strategy, self._order(candidate.strategy)
        records = []
        for record in module.records:
            if isinstance(record, Repeated):
                firsts = chosen(candidate.samples, strategy.microbatches, bool(record.summed))
                record = replace(record, count=strategy.microbatches, firsts=" ".join(map(str, firsts)))
            elif isinstance(record, Scheduled):
                assert order is not None
                record = Scheduled(" ".join(in_sequence(order)))
            records.append(record)
        return replace(module, records=tuple(records))

    def _compiled(self, candidate: Candidate) -> Module:
        """The program of a candidate, from the cut into stages on where that is known, as it is of those before."""
        strategy = candidate.strategy
        source = self.source.under(strategy)
        steps = source.passes_of_all_ranks(repeated=True, samples=candidate.samples)
        first, parts = next((i, step) for i, step in enumerate(steps) if isinstance(step, Microbatches))
        # Where stages are cut depends on neither, unless there is one microbatch alone.
        schedule = "1f1b" if strategy.chunks == 1 else strategy.schedule
        key = replace(strategy, microbatches=min(strategy.microbatches, 2), schedule=schedule)
        if key not in self._cuts:
            # Those on other meshes may be wanted again: with placements=auto what follows is the same of all.
            self._cuts = {k: cut for k, cut in self._cuts.items() if _on_any_mesh(k) == _on_any_mesh(key)}
            self._cuts[key] = self._run_again(steps[:first], source)
        module = self._in_parts(self._cuts[key], replace(parts, factored=self._factored), source)
        return with_shared_types(run_passes(module, steps[first + 1 :], source.checks))

    def _in_parts(self, cut: Module, parts: Microbatches, source: Source) -> Module:
        """A program with its microbatches written out; of one that is the last one but for its mesh, that one's."""
        if self._divided is not None:
            last, before, found = self._divided
            if last == parts and before.functions == cut.functions and before.records == cut.records:
                return replace(found, meshes=cut.meshes)
        found = run_passes(cut, [parts], source.checks)
        self._divided = parts, cut, found
        return found

    def _run_again(self, passes: Sequence[Pass], source: Source) -> Module:
        """What passes give on the model; those that it was begun with the last time are not run again."""
        same = 0
        for step, (other, _) in zip(passes, self._begun, strict=False):
            if step != other:
                break
            same += 1
        del self._begun[same:]
        for step in passes[same:]:
            module = self._begun[-1][1] if self._begun else source.imported.module
            self._begun.append((step, run_passes(module, [step], source.checks)))
        return self._begun[-1][1] if passes else source.imported.module


def _on_any_mesh(strategy: Strategy) -> Strategy:
    return replace(strategy, data=1, tensor=1)
