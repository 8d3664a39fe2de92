"""Every op under every combination of placements of its operands, sharded against whole.

    python tests/ops/validator.py [OP ...]        prints what is wrong, what is missing, and how many were run

All combinations on 2 and on 3 devices, and up to 4,000 of each sample, drawn, on 2x3 devices.

*Wrong*: the sharded program computes other numbers than the op run whole. *Missing*: running the op on the shards as
they lie would have been right, and the compiler communicated first. Operands are laid out as a user would: annotated
``S``, with uneven and empty shards, or pending sums with unlike terms, from a sum over a split dim.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from samples import SAMPLES, Sample, draw

from distir_relax.analysis import assemble, execute, interpret, scatter
from distir_relax.errors import DistIRError
from distir_relax.ir import (
    Cut,
    DeviceMesh,
    DTensorType,
    Module,
    Op,
    Placement,
    Shard,
    TensorType,
    Value,
    parse_placements,
    print_placements,
)
from distir_relax.lowering import ToDistIR
from distir_relax.ops import Builder, evaluate, infer, lookup
from distir_relax.sharding import DelayReductions, Propagate, bytes_sent
from distir_relax.sharding.cuts import balanced, chunked

MESHES = (DeviceMesh((2,), ("tp",)), DeviceMesh((3,), ("tp",)))
GRID = DeviceMesh((2, 3), ("dp", "tp"))
TAILS = ("ragged", "pad")

Layout = tuple[str, ...]
"""The placement of an operand along each mesh axis, as text."""


@dataclass(frozen=True)
class Finding:
    """A combination of placements that is wrong, or missing, and why."""

    op: str
    sample: int
    mesh: tuple[int, ...]
    layouts: tuple[Layout, ...]
    why: str

    def __str__(self) -> str:
        operands = "; ".join(", ".join(layout) for layout in self.layouts)
        return f"{self.op} #{self.sample} on {'x'.join(map(str, self.mesh))} with {operands}: {self.why}"


def combinations(sample: Sample, mesh: DeviceMesh) -> Iterator[tuple[Layout, ...]]:
    """Every combination of layouts of the operands; uneven cuts are balanced in one and ceil-sized in its twin."""
    kinds = [_kind(text) for text in sample.operands]
    for how in ("", ": chunk"):
        options = [_layouts(kind, mesh, how) for kind in kinds]
        for layouts in itertools.product(*options):
            if not how or any("chunk" in placement for layout in layouts for placement in layout):
                yield layouts


def validate(
    name: str, number: int, mesh: DeviceMesh, most: int | None = None, tails: Sequence[str] = TAILS
) -> tuple[list[Finding], list[Finding]]:
    """What is wrong and what is missing of one sample on one mesh; at most `most` combinations, drawn at random."""
    chosen = list(combinations(SAMPLES[name][number], mesh))
    if most is not None and len(chosen) > most:
        chosen = random.Random(f"{name} {number}").sample(chosen, most)
    wrong, missing = [], []
    for count, layouts in enumerate(chosen):
        case = Case(name, SAMPLES[name][number], mesh, layouts)
        if why := case.wrong(tails[count % len(tails)]):
            wrong.append(Finding(name, number, mesh.shape, layouts, why))
        elif len(mesh.shape) == 1 and case.communicates and (found := case.local()):
            missing.append(Finding(name, number, mesh.shape, layouts, f"the shards as they are give {found}"))
    return wrong, missing


class Case:
    """One op on operands that lie as `layouts` say."""

    def __init__(self, name: str, sample: Sample, mesh: DeviceMesh, layouts: tuple[Layout, ...]) -> None:
        self.entry, self.mesh, self.layouts, self.attrs = lookup(name), mesh, layouts, dict(sample.attrs)
        generator = torch.Generator().manual_seed(7)
        self.operands = [draw(text, generator) for text in sample.operands]
        self.types = [_type_of(x) for x in self.operands]
        self.data: dict[str, torch.Tensor] = {}
        builder = Builder()
        values = [self._operand(builder, i, generator) for i in range(len(self.operands))]
        found = builder.emit(name, *values, **self.attrs)
        self.results = found if isinstance(found, tuple) else (found,)
        outputs = [(f"y{i}", value) for i, value in enumerate(self.results)]
        self.module = Module("global", (builder.function("main", outputs),), (mesh,))
        self.communicates = False

    def _operand(self, g: Builder, number: int, generator: torch.Generator) -> Value:
        """An input as its layout says. A pending sum is summed over a dim of terms, split along the mesh axis."""
        x, layout = self.operands[number], self.layouts[number]
        pending = [axis for axis, placement in enumerate(layout) if placement.startswith("I")]
        for axis in pending:
            noise = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(self.mesh.shape[axis] - 1)]
            x = torch.stack([x - sum(noise, torch.zeros_like(x)), *noise])
        name = f"x{number}"
        value = g.input(name, _type_of(x))
        self.data[value.name] = x
        marks = [str(len(pending) - 1 - pending.index(a)) if a in pending else None for a in range(len(layout))]
        if pending:
            marked = [
                f"S[{mark}]" if mark is not None else _shifted(placement, len(pending))
                for mark, placement in zip(marks, layout, strict=True)
            ]
            value = g.emit("annotate_sharding", value, placements=", ".join(marked))
            return g.emit("sum", value, axis=tuple(range(len(pending))), keepdims=False)
        return g.emit("annotate_sharding", value, placements=", ".join(layout))

    def wrong(self, tail: str) -> str:
        """What is wrong with the sharded program, or nothing."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sharded = DelayReductions().run(Propagate().run(self.module).module)
            distributed = ToDistIR(tail).run(sharded)
            found = execute(sharded, distributed, self.data)
        except (DistIRError, ValueError, AssertionError, RuntimeError) as error:
            return f"{tail}: {type(error).__name__}: {error}"
        self.communicates = _communicates_before(sharded, self.entry.name)
        for name, whole in interpret(self.module.main, self.data).items():
            try:
                torch.testing.assert_close(found[name], whole, rtol=1e-9, atol=1e-9, equal_nan=True)
            except AssertionError as error:
                return f"{tail}: {str(error).splitlines()[0]}"
        return ""

    def local(self) -> str:
        """The placement of the results for which the op on the shards as they lie is right, if there is one."""
        kinds = [
            DTensorType(t.shape, t.dtype, tuple(self._placed(t, axis, text) for axis, text in enumerate(layout)))
            for t, layout in zip(self.types, self.layouts, strict=True)
        ]
        parts = [self._scattered(x, kind) for x, kind in zip(self.operands, kinds, strict=True)]
        wholes = self._run(self.operands, self.attrs)
        results = [_type_of(x) for x in wholes]
        for how in ("", ": chunk"):
            options = [[(p,) for p in ("R", "I[sum]", *_splits(t, how))] for t in results]
            for layouts in itertools.product(*options):
                targets = [
                    DTensorType(
                        t.shape, t.dtype, tuple(self._placed(t, axis, text) for axis, text in enumerate(layout))
                    )
                    for t, layout in zip(results, layouts, strict=True)
                ]
                if self._is_right(parts, targets, wholes):
                    return "; ".join(print_placements(kind.placements) for kind in targets)
        return ""

    def _scattered(self, tensor: torch.Tensor, kind: DTensorType) -> list[torch.Tensor]:
        held = scatter(tensor, kind, self.mesh)
        return [held[rank] for rank in range(self.mesh.size)]

    def _is_right(
        self, parts: list[list[torch.Tensor]], targets: list[DTensorType], wholes: Sequence[torch.Tensor]
    ) -> bool:
        rows = []
        try:
            expected = [[_type_of(x) for x in self._scattered(w, t)] for w, t in zip(wholes, targets, strict=True)]
            for rank in range(self.mesh.size):
                operands = [part[rank] for part in parts]
                types, mine = [_type_of(x) for x in operands], [column[rank] for column in expected]
                attrs = self.entry.localize(self.attrs, types, mine) if self.entry.localize else self.attrs
                if list(infer(self.entry.name, types, attrs)) != mine:
                    return False
                rows.append(self._run(operands, attrs))
            for number, (kind, whole) in enumerate(zip(targets, wholes, strict=True)):
                found = assemble({rank: _rounded(row[number]) for rank, row in enumerate(rows)}, kind, self.mesh)
                torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
        except (DistIRError, ValueError, AssertionError, RuntimeError, IndexError):
            return False
        return True

    def _run(self, operands: Sequence[torch.Tensor], attrs: object) -> tuple[torch.Tensor, ...]:
        values = tuple(Value(f"x{i}", _type_of(x)) for i, x in enumerate(operands))
        return evaluate(Op(self.entry.name, values, (), attrs), operands)  # type: ignore[arg-type]

    def _placed(self, kind: TensorType, axis: int, text: str) -> Placement:
        (placement,) = parse_placements(text)
        if not isinstance(placement, Shard):
            return placement
        cut = chunked if placement.chunk else balanced
        return Shard(placement.dim, Cut.of(*cut(kind.shape[placement.dim], self.mesh.shape[axis])))


def _layouts(kind: TensorType, mesh: DeviceMesh, how: str) -> list[Layout]:
    single = ["R", *_splits(kind, how)]
    if kind.dtype.startswith("float"):
        single.append("I[sum]")
    return list(itertools.product(single, repeat=len(mesh.shape)))


def _splits(kind: TensorType, how: str) -> list[str]:
    return [f"S[{dim}{how}]" for dim, size in enumerate(kind.shape) if size > 1]


def _shifted(text: str, by: int) -> str:
    (placement,) = parse_placements(text)
    return f"S[{placement.dim + by}{': chunk' if placement.chunk else ''}]" if isinstance(placement, Shard) else text


def _communicates_before(sharded: Module, name: str) -> bool:
    """Whether something is sent before the op."""
    mesh = sharded.meshes[0]
    for op in sharded.main.ops:
        if op.name == name:
            return False
        if lookup(op.name).role == "redistribution":
            source, target = op.operands[0].type, op.results[0].type
            assert isinstance(source, DTensorType)
            assert isinstance(target, DTensorType)
            if bytes_sent(source, target, mesh):
                return True
    return False


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Replicas that differ in the last bits only are equal."""
    return (x * 1e8).round() / 1e8 if x.dtype == torch.float64 else x


def _kind(text: str) -> TensorType:
    return _type_of(draw(text, torch.Generator()))


def _type_of(x: torch.Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def validated() -> list[tuple[str, int]]:
    """The samples that a model may contain: (op, number of the sample)."""
    found = []
    for name, samples in SAMPLES.items():
        entry = lookup(name)
        for number, sample in enumerate(samples):
            types = [_kind(text) for text in sample.operands]
            try:
                entry.rule_for(types, sample.attrs, infer(name, types, sample.attrs))
            except NotImplementedError:
                continue
            if entry.role in ("compute", "scalar") and sample.operands and not entry.pattern:
                found.append((name, number))
    return found


def main(names: Sequence[str]) -> int:
    """Validate ops, all of them by default; the exit code says whether any is wrong."""
    chosen = [(name, number) for name, number in validated() if not names or name in names]
    totals = {"combinations": 0, "wrong": 0, "missing": 0}
    for (name, number), (mesh, most) in itertools.product(chosen, [*((mesh, None) for mesh in MESHES), (GRID, 4000)]):
        wrong, missing = validate(name, number, mesh, most)
        count = sum(1 for _ in combinations(SAMPLES[name][number], mesh))
        totals["combinations"] += count if most is None else min(most, count)
        for label, findings in (("wrong", wrong), ("missing", missing)):
            totals[label] += len(findings)
            for finding in findings:
                print(f"{label}: {finding}", flush=True)
    ops = len({name for name, _ in chosen})
    print(f"{ops} ops, {len(chosen)} samples, " + ", ".join(f"{count:,} {what}" for what, count in totals.items()))
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
