"""Search for the first wrong value of a plan: compare all values that the ranks' programs share with the model.

A run of the ranks records values in chunks of bounded memory; each is compared, piece by piece, with the reference. Of
the wrong pieces the first in the schedule has only right operands, since the schedule is a topological order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distir_relax.bisection.layouts import Layouts, LocalValue
from distir_relax.bisection.reference import Reference, ReferenceValue
from distir_relax.bisection.rounding import DEFAULT_TOLERANCE, Difference, difference, rms
from distir_relax.bisection.subject import Subject
from distir_relax.bisection.taps import Recorded
from distir_relax.bundle import Bundle
from distir_relax.ir import inline
from distir_relax.ir.symbols import specialize
from distir_relax.runtime.microbatch_io import joined
from distir_relax.runtime.sequence_calls import PreparedCall
from distir_relax.runtime.verification import read_stage

if TYPE_CHECKING:
    import torch

DEFAULT_MEMORY = 4 << 30
"""Bytes of recorded values of all ranks that are kept at once."""

Expect = Callable[[ReferenceValue], "torch.Tensor | None"]
"""The tensor that is expected of a value; None leaves it out."""


@dataclass(frozen=True)
class Wrong:
    """A wrong piece of the model's value `name`: the values of ranks, the largest difference, at a global index."""

    name: str
    values: tuple[LocalValue, ...]
    difference: Difference
    index: tuple[int, ...]
    bound: float
    rounding: float
    disagrees: bool
    """Whether the piece differs from the reference, too, if another run is expected."""

    @property
    def order(self) -> int:
        """The position in the schedule."""
        return self.values[0].order


@dataclass
class Findings:
    """Results of a comparison so far."""

    names: set[str] = field(default_factory=set)
    """The model's values that were compared."""
    right: set[tuple[int, str]] = field(default_factory=set)
    """Ranks and values that are right."""
    wrong: list[Wrong] = field(default_factory=list)
    headroom: float = 0.0
    rounding: dict[str, float] = field(default_factory=dict)
    """The rounding error of each value."""
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The outputs of the reference."""

    def first(self) -> list[Wrong]:
        """Return the wrong pieces that come first in the schedule, of one op; the largest error first."""
        start = min((wrong.order for wrong in self.wrong), default=0)
        found = [wrong for wrong in self.wrong if wrong.order == start]
        return sorted(found, key=lambda wrong: -wrong.difference.error)


@dataclass
class Search:
    """The search in one call of a bundle. `tolerance` is the multiple of the rounding error that a value may have.

    If `exact`, values are compared with those of the reference in float64.
    """

    subject: Subject
    reference: Reference
    layouts: Layouts
    prepared: PreparedCall
    tolerance: float = DEFAULT_TOLERANCE
    exact: bool = False
    memory: int = DEFAULT_MEMORY
    runs: int = 0
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The outputs of the last run that recorded values."""

    def record(self, names: Sequence[str]) -> Recorded:
        """Run the ranks, and return their parts of the model's values called `names`."""
        wanted: dict[int, set[str]] = {}
        for name in names:
            for value in self.layouts.local.get(name, ()):
                wanted.setdefault(value.rank, set()).add(value.name)
        self.runs += 1
        run = self.subject.run(wanted)
        self.outputs = run.outputs
        return run.taps

    def chunks(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Divide names of the model's values into chunks whose pieces fit into the memory."""
        chunk: list[str] = []
        used = 0
        for name in names:
            locals_ = self.layouts.local.get(name, ())
            if not locals_:
                continue
            size = sum(self.layouts.types[v.rank, v.name].bytes for v in locals_)
            if chunk and used + size > self.memory:
                yield chunk
                chunk, used = [], 0
            chunk.append(name)
            used += size
        if chunk:
            yield chunk

    def compare(self, expected_of: Callable[[Sequence[str]], Expect] | None = None) -> Findings:
        """Compare all values with the reference, or with another run: `expected_of` gives what a chunk expects."""
        findings = Findings()
        for chunk in self.chunks(self.layouts.layouts):
            taps = self.record(chunk)
            expect = self.expected if expected_of is None else expected_of(chunk)
            self.check(chunk, taps, findings, expect)
        if not findings.outputs:
            self.check((), {}, findings, self.expected)
        return findings

    def probe(self, findings: Findings) -> Findings:
        """Find the first wrong value where recording all of them hides the fault: record one at a time, by bisection.

        A value that is recorded by itself leaves the code before it as it is, except that it is not fused with what
        follows. Returns findings without a wrong value if there is none.
        """
        names = sorted((n for n in findings.names), key=lambda name: self.layouts.local[name][0].order)
        low, high, found = 0, len(names), findings
        while low < high:
            middle = (low + high) // 2
            probed = Findings(names=findings.names, right=set(findings.right))
            self.check([names[middle]], self.record([names[middle]]), probed, self.expected)
            if probed.wrong:
                found, high = probed, middle
            else:
                low = middle + 1
        return found

    def expected(self, value: ReferenceValue) -> torch.Tensor:
        """Return the reference's tensor of a value."""
        return value.exact if self.exact else value.tensor

    def check(self, names: Sequence[str], taps: Recorded, findings: Findings, expect: Expect) -> None:
        """Compare recorded pieces of the values called `names`."""
        chosen = set(names)

        def visit(value: ReferenceValue) -> None:
            findings.rounding[value.name] = value.rounding
            if value.name in chosen:
                expected = expect(value)
                if expected is not None:
                    self._check_value(value, expected, taps, findings)

        findings.outputs = self.reference.run(visit)

    def check_outputs(self, outputs: Mapping[str, torch.Tensor], findings: Findings) -> dict[str, Difference]:
        """Return the differences of a run's outputs from those of the reference, by name."""
        expected = joined(self.prepared.call.manifest, dict(findings.outputs))
        return {
            name: difference(outputs[name], x.to(outputs[name].dtype))
            for name, x in expected.items()
            if name in outputs
        }

    def output_bound(self, name: str, findings: Findings) -> float:
        """Return the error that rounding explains of an output."""
        manifest = self.prepared.call.manifest
        parts = next((d.parts for d in manifest.divided_outputs if d.name == name), (name,))
        values = {o.name: o.value.name for o in self.reference.module.main.outputs}
        return self.tolerance * max((findings.rounding.get(values[part], 0.0) for part in parts), default=0.0)

    def _check_value(
        self, value: ReferenceValue, expected: torch.Tensor, taps: Recorded, findings: Findings
    ) -> None:  # fmt: skip
        bound = self.tolerance * value.rounding
        scale = rms(expected) if expected.is_floating_point() else 0.0
        for piece in self.layouts.pieces(value.name, taps):
            part = piece.of(expected).to(piece.found.dtype)
            found = difference(piece.found, part, max(scale, piece.scale))
            findings.names.add(value.name)
            if found.error <= bound:
                findings.right.update((v.rank, v.name) for v in piece.values)
                if bound and math.isfinite(bound):
                    findings.headroom = max(findings.headroom, found.error / bound)
                continue
            own = difference(piece.found, piece.of(self.expected(value)).to(piece.found.dtype), max(scale, piece.scale))
            index = piece.position(found.index)
            findings.wrong.append(
                Wrong(value.name, piece.values, found, index, bound, value.rounding, own.error > bound)
            )


def layouts_of(bundle: Bundle, prepared: PreparedCall) -> Layouts:
    """Return the correspondence of the ranks' values of a bundle to those of the model, in a call."""
    sharded, distributed, ranked = (
        inline(specialize(read_stage(bundle, stage, verified=True), prepared.call.sizes))
        for stage in ("sharded", "distributed", "ranked")
    )
    return Layouts(sharded, distributed, ranked, padded=bundle.manifest.tail == "pad")
