"""Every op under every combination of placements of its operands, sharded against whole.

    python tests/ops/validator.py [OP ...]        prints what is wrong, what is missing, and how many were run

All combinations on 2 and on 3 devices, each as a whole program. All combinations on 2x3 devices, which are millions,
piece by piece (`pieces.py`); and as whole programs up to 300 of each sample, drawn, which checks that way of counting.

*Wrong*: the sharded program computes other numbers than the op run whole. *Missing*: running the op on the shards as
they lie would have been right, and the compiler communicated first. Operands are laid out as a user would: annotated
``S``, with uneven and empty shards, or pending sums with unlike terms, from a sum over a split dim.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))

import torch
from pieces import Pieces
from samples import SAMPLES, Sample, draw

from distir_relax.errors import DistIRError
from distir_relax.interpret import assemble, execute, interpret, scatter
from distir_relax.ir import DTensorType, Function, Input, Module, Op, Output, TensorType, Value
from distir_relax.layout import Cut, DeviceMesh, Placement, Shard, parse_placements, print_placements
from distir_relax.layout.partition import balanced, chunked
from distir_relax.lowering import ToDistIR
from distir_relax.ops import Builder, Trait, evaluate, infer, lookup
from distir_relax.sharding import DelayReductions, Propagate, bytes_sent

MESHES = (DeviceMesh((2,), ("tp",)), DeviceMesh((3,), ("tp",)))
GRID = DeviceMesh((2, 3), ("dp", "tp"))
TAILS = ("ragged", "pad")

DRAWN = 300
BLOCK = 10_000

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
    for options, uncut in _choices(sample, mesh):
        for layouts in itertools.product(*options):
            # Of millions of combinations each is looked at as a whole.
            if not uncut or not uncut.issuperset(layouts):
                yield layouts


def draw_combinations(sample: Sample, mesh: DeviceMesh, most: int, random: Random) -> list[tuple[Layout, ...]]:
    """At most `most` of the combinations, of which only the drawn ones are made if there are many."""
    choices = _choices(sample, mesh)
    if math.prod(map(len, choices[0][0])) <= max(most, BLOCK):
        found = list(combinations(sample, mesh))
        return random.sample(found, most) if len(found) > most else found
    drawn: dict[tuple[Layout, ...], None] = {}
    while len(drawn) < most:
        options, uncut = random.choice(choices)
        layouts = tuple(map(random.choice, options))
        if not uncut or not uncut.issuperset(layouts):
            drawn[layouts] = None
    return list(drawn)


def _choices(sample: Sample, mesh: DeviceMesh) -> list[tuple[list[list[Layout]], set[Layout]]]:
    """The layouts of each operand, with balanced cuts, and then with ceil-sized ones; of these also which are uncut."""
    kinds = [_kind(text) for text in sample.operands]
    first, second = ([_layouts(kind, mesh, how) for kind in kinds] for how in ("", ": chunk"))
    uncut = {layout for option in second for layout in option if not any("chunk" in p for p in layout)}
    return [(first, set()), (second, uncut)]


def validate(
    name: str, number: int, mesh: DeviceMesh, most: int | None = None, tails: Sequence[str] = TAILS
) -> tuple[list[Finding], list[Finding]]:
    """What is wrong and what is missing of one sample on one mesh; at most `most` combinations, drawn at random."""
    sample = SAMPLES[name][number]
    if most is None:
        chosen = list(combinations(sample, mesh))
    else:
        chosen = draw_combinations(sample, mesh, most, Random(f"{name} {number}"))
    setting = Setting(name, SAMPLES[name][number], mesh)
    wrong, missing = [], []
    for count, layouts in enumerate(chosen):
        case = Case(setting, layouts)
        if why := case.wrong(tails[count % len(tails)]):
            wrong.append(Finding(name, number, mesh.shape, layouts, why))
        elif len(mesh.shape) == 1 and case.communicates and (found := case.local()):
            missing.append(Finding(name, number, mesh.shape, layouts, f"the shards as they are give {found}"))
    return wrong, missing


@dataclass(frozen=True)
class Lead:
    """How an operand comes to lie as its layout says: an input with its data, and the ops that follow it."""

    source: Input
    ops: tuple[Op, ...]
    data: torch.Tensor


class Setting:
    """One sample of an op on one mesh. What combinations have in common is made once: numbers, types, leads."""

    def __init__(self, name: str, sample: Sample, mesh: DeviceMesh) -> None:
        self.entry, self.mesh, self.attrs = lookup(name), mesh, dict(sample.attrs)
        generator = torch.Generator().manual_seed(7)
        self.operands = [draw(text, generator) for text in sample.operands]
        self.types = [_type_of(x) for x in self.operands]
        laid = tuple(Value(f"x{i}.laid", kind) for i, kind in enumerate(self.types))
        results = tuple(Value(f"y{i}", kind) for i, kind in enumerate(infer(name, self.types, self.attrs)))
        self.op = Op(name, laid, results, self.attrs)
        self._leads: dict[tuple[int, Layout], Lead] = {}

    def lead(self, number: int, layout: Layout) -> Lead:
        """How operand `number` comes to lie as `layout`."""
        if (number, layout) not in self._leads:
            self._leads[number, layout] = self._make_lead(number, layout)
        return self._leads[number, layout]

    def leads(self, layouts: Sequence[Layout]) -> list[Lead]:
        """How each operand comes to lie as its layout says."""
        return [self.lead(number, layout) for number, layout in enumerate(layouts)]

    def module(self, layouts: Sequence[Layout]) -> Module:
        """The global program: the operands laid out, then the op."""
        leads = self.leads(layouts)
        ops = (*(op for lead in leads for op in lead.ops), self.op)
        outputs = tuple(Output(value.name, value) for value in self.op.results)
        return Module("global", (Function("main", tuple(lead.source for lead in leads), ops, outputs),), (self.mesh,))

    def data(self, layouts: Sequence[Layout]) -> dict[str, torch.Tensor]:
        """The numbers of the program's inputs, by name."""
        return {lead.source.value.name: lead.data for lead in self.leads(layouts)}

    def _make_lead(self, number: int, layout: Layout) -> Lead:
        """A pending sum is summed over a dim of terms, which is split along the mesh axis."""
        x = self.operands[number]
        generator = torch.Generator().manual_seed(100 + number)
        pending = [axis for axis, placement in enumerate(layout) if placement.startswith("I")]
        for axis in pending:
            noise = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(self.mesh.shape[axis] - 1)]
            x = torch.stack([x - sum(noise, torch.zeros_like(x)), *noise])
        g = Builder()
        value = g.input(f"x{number}", _type_of(x))
        marks = [
            f"S[{len(pending) - 1 - pending.index(axis)}]" if axis in pending else _shifted(placement, len(pending))
            for axis, placement in enumerate(layout)
        ]
        g.hint = f"x{number}.terms" if pending else f"x{number}.laid"
        value = g.emit("annotate_sharding", value, placements=", ".join(marks))
        g.hint = f"x{number}.laid"
        if pending:
            g.emit("sum", value, axis=tuple(range(len(pending))), keepdims=False)
        return Lead(g.inputs[0], tuple(g.ops), x)


class Case:
    """One op on operands that lie as `layouts` say."""

    def __init__(self, setting: Setting, layouts: tuple[Layout, ...]) -> None:
        self.setting, self.layouts = setting, layouts
        self.entry, self.mesh, self.attrs = setting.entry, setting.mesh, setting.attrs
        self.operands, self.types = setting.operands, setting.types
        self.module, self.data = setting.module(layouts), setting.data(layouts)
        self.communicates = False

    def wrong(self, tail: str) -> str:
        """What is wrong with the sharded program, or nothing."""
        try:
            sharded = DelayReductions().run(Propagate().run(self.module))
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
                attrs = self.entry.split.localize(self.attrs, types, mine) if self.entry.split.localize else self.attrs
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
        if Trait.REDISTRIBUTION in lookup(op.name).traits:
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
            if entry.computes and sample.operands:
                found.append((name, number))
    return found


@dataclass(frozen=True)
class Task:
    """A part of the work: one sample on one mesh, as whole programs or, from `start` to `stop`, piece by piece."""

    name: str
    number: int
    mesh: DeviceMesh
    most: int | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Outcome:
    """What was found. `combinations` is how many were run that no other task counts; `pieces` are names of pieces."""

    wrong: list[Finding]
    missing: list[Finding]
    combinations: int = 0
    drawn: int = 0
    pieces: frozenset[bytes] = frozenset()


def tasks(names: Sequence[str]) -> list[Task]:
    """All the work for some ops, or all of them."""
    chosen = [(name, number) for name, number in validated() if not names or name in names]
    found = [Task(name, number, mesh) for name, number in chosen for mesh in MESHES]
    found += [Task(name, number, GRID, DRAWN) for name, number in chosen]
    for name, number in chosen:
        count = sum(1 for _ in combinations(SAMPLES[name][number], GRID))
        found += [Task(name, number, GRID, None, i, min(i + BLOCK, count)) for i in range(0, count, BLOCK)]
    return found


def run(task: Task) -> Outcome:
    """Do a part of the work."""
    torch.set_num_threads(1)
    if task.stop:
        pieces = _pieces(task.name, task.number)
        wrong, known = [], pieces.digests()
        chosen = itertools.islice(combinations(SAMPLES[task.name][task.number], task.mesh), task.start, task.stop)
        for layouts in chosen:
            if why := pieces.wrong(layouts):
                wrong.append(Finding(task.name, task.number, task.mesh.shape, layouts, why))
        return Outcome(wrong, [], task.stop - task.start, 0, pieces.digests() - known)
    count = sum(1 for _ in combinations(SAMPLES[task.name][task.number], task.mesh))
    found = validate(task.name, task.number, task.mesh, task.most)
    return Outcome(*found, count) if task.most is None else Outcome(*found, 0, min(task.most, count))


@lru_cache(maxsize=1)
def _pieces(name: str, number: int) -> Pieces:
    return Pieces(Setting(name, SAMPLES[name][number], GRID))


def main(names: Sequence[str]) -> int:
    """Validate ops, all of them by default, on all cores; the exit code says whether any is wrong."""
    todo = tasks(names)
    ops, samples = len({task.name for task in todo}), len({(task.name, task.number) for task in todo})
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        outcomes = list(map(_printed, pool.map(run, todo)))
    count = {
        "combinations": sum(o.combinations for o in outcomes),
        "of them drawn and run whole on 2x3 too": sum(o.drawn for o in outcomes),
        "distinct pieces run": len(frozenset().union(*(o.pieces for o in outcomes))),
        "wrong": sum(len(o.wrong) for o in outcomes),
        "missing": sum(len(o.missing) for o in outcomes),
    }
    print(f"{ops} ops, {samples} samples, " + ", ".join(f"{number:,} {what}" for what, number in count.items()))
    return int(count["wrong"] > 0)


def _printed(outcome: Outcome) -> Outcome:
    for label, findings in (("wrong", outcome.wrong), ("missing", outcome.missing)):
        for finding in findings:
            print(f"{label}: {finding}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
