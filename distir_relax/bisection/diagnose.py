"""Cause of a wrong value: the ops between it and right values run by their definition, on the rank's own operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from distir_relax.bisection.reference import typed
from distir_relax.bisection.rounding import difference, least_bound
from distir_relax.bisection.search import Findings, Search, Wrong
from distir_relax.bisection.taps import Recorded
from distir_relax.errors import RunError
from distir_relax.ir import Op
from distir_relax.ops import Trait, evaluate, lookup
from distir_relax.ops.table.dispatch import type_of
from distir_relax.runtime.backends.weights import load_weights
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.transports.threads import ThreadWorld

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Diagnosis:
    """The op that is to blame for a wrong value, on a rank, and the cause: one of `result.CAUSES`."""

    op: Op
    rank: int
    cause: str


def diagnose(search: Search, findings: Findings, wrong: Wrong) -> Diagnosis:
    """Return the cause of a wrong value whose operands are right, of the first of its ranks.

    The ranks run once more, and record all values between it and right ones. Each op in between is run by its
    definition on the operands that its rank has: the first one with another result is to blame.
    """
    value = wrong.values[0]
    last = search.layouts.op_of(value)
    found = _Trace(search, findings, wrong.rounding).explain(value.rank, last)
    return found or Diagnosis(last, value.rank, "definition")


@dataclass
class _Trace:
    search: Search
    findings: Findings
    rounding: float
    explained: set[tuple[int, str]] = field(default_factory=set)

    def explain(self, rank: int, last: Op) -> Diagnosis | None:
        """Return the op to blame for the results of `last` on a rank; None if all are as their operands say."""
        ops = self._between(rank, last)
        for op in ops:
            if _communicates(op):
                found = self._explain_communication(rank, op)
                if found is not None:
                    return found
        return self._run(rank, [op for op in ops if not _communicates(op)])

    def _explain_communication(self, rank: int, op: Op) -> Diagnosis | None:
        """Return the cause of the result of a communication: it, unless an operand of some rank is wrong.

        None if the result is not known to be wrong.
        """
        is_known = True
        for other, source in self._sources(op):
            for operand in source.operands:
                name = operand.name
                if (other, name) in self.findings.right or (other, name) in self.explained:
                    continue
                self.explained.add((other, name))
                producer = self._producers(other).get(name)
                if producer is None or Trait.STARTS in lookup(producer.name, producer.location).traits:
                    continue
                found = self.explain(other, producer)
                if found is not None:
                    return found
                is_known = is_known and name in self._recorded.get(other, {})
        is_wrong = any((rank, v.name) in self._wrong for v in op.results)
        return Diagnosis(op, rank, "communication" if is_known else "unknown") if is_wrong else None

    def _sources(self, op: Op) -> Iterator[tuple[int, Op]]:
        """Iterate over the parts of all ranks in a communication."""
        for rank, function in enumerate(self.search.layouts.programs):
            for other in function.ops:
                if other.attrs.get("step") == op.attrs["step"] and _communicates(other):
                    yield rank, other

    def _run(self, rank: int, ops: list[Op]) -> Diagnosis | None:
        """Run ops by their definition; return the first whose result differs from the recorded one."""
        values = {**self._inputs(rank), **self._recorded.get(rank, {})}
        comm = ThreadWorld(self.search.prepared.call.manifest.mesh).communicator(rank)
        for op in ops:
            if not all(v.name in values for v in op.operands):
                return Diagnosis(op, rank, "unknown")
            operands = [values[v.name] for v in op.operands]
            try:
                results = evaluate(typed(op, operands), operands, comm)
            except RunError:
                return Diagnosis(op, rank, "unknown")
            least = least_bound(op, [type_of(x) for x in operands], [type_of(x) for x in results])
            for result, tensor in zip(op.results, results, strict=True):
                found = values.setdefault(result.name, tensor)
                bound = self.search.tolerance * max(least, self.rounding if op is ops[-1] else 0.0)
                if type_of(found) != type_of(tensor) or difference(found, tensor).error > bound:
                    return Diagnosis(op, rank, "execution")
        return None

    def _between(self, rank: int, last: Op) -> list[Op]:
        """Return the ops from right values of a rank to `last`, in program order; a communication ends the search."""
        if _communicates(last):
            return [last]
        needed = {v.name for v in last.operands}
        chosen = [last]
        ops = self.search.layouts.programs[rank].ops
        for op in reversed(ops[: next(i for i, other in enumerate(ops) if other is last)]):
            names = {v.name for v in op.results}
            if names.isdisjoint(needed) or any((rank, name) in self.findings.right for name in names):
                continue
            chosen.append(op)
            if not _communicates(op):
                needed |= {v.name for v in op.operands}
        return chosen[::-1]

    @cached_property
    def _wrong(self) -> set[tuple[int, str]]:
        return {(value.rank, value.name) for wrong in self.findings.wrong for value in wrong.values}

    @cached_property
    def _recorded(self) -> Recorded:
        """All values of all ranks that are not known to be right, and the operands of their ops."""
        wanted: dict[int, set[str]] = {}
        for rank, function in enumerate(self.search.layouts.programs):
            wanted[rank] = set()
            for op in function.ops[: self._end(rank)]:
                if any((rank, v.name) not in self.findings.right for v in op.results):
                    wanted[rank].update(v.name for v in (*op.operands, *op.results))
        self.search.runs += 1
        return self.search.subject.run(wanted).taps

    def _end(self, rank: int) -> int:
        """Return the number of ops of a rank's program up to its first wrong value: later ones cannot be to blame."""
        ops = self.search.layouts.programs[rank].ops
        wrong = (i for i, op in enumerate(ops) if any((rank, v.name) in self._wrong for v in op.results))
        return next(wrong, len(ops) - 1) + 1

    def _producers(self, rank: int) -> dict[str, Op]:
        return {v.name: op for op in self.search.layouts.programs[rank].ops for v in op.results}

    def _inputs(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the weights and inputs of a rank's program, by name."""
        manifest = self.search.prepared.call.manifest
        names = [tensor.name for tensor in manifest.inputs if tensor.is_on(rank)]
        inputs = local_inputs(manifest, self.search.prepared.inputs, rank, "cpu")
        return {**dict(zip(names, inputs, strict=True)), **load_weights(self.search.subject.bundle, rank)}


def _communicates(op: Op) -> bool:
    return not lookup(op.name, op.location).traits.isdisjoint({Trait.COMMUNICATES, Trait.FINISHES})
