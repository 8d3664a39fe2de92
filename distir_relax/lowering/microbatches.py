"""Microbatches: the samples of a batch worked through in parts, one after the other.

Microbatches are a mesh axis laid out in time. The program is split along it as along any other: propagation says what
is done for each part, where sums are pending, what is the same for all. Then, instead of devices that run side by side,
one device does the parts in turn; what would be an all-reduce is a sum. So a mean over parts of unlike size, a batch
norm over all samples, and a loss that couples them, come out as they are, whatever the model.

What is done for one microbatch comes before the next as far as it can: its forward and its backward (gradient
accumulation). What a microbatch needs of all of them (how many labels there are) comes before that, and nothing else
does. Functions stay functions, one for each distinct size.

For a simulation not all have to be written out: `chosen` says which stand for the others. The rest of the samples is
one more part, of which nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import (
    CALL,
    Attribute,
    BatchDim,
    Divided,
    DTensorType,
    Function,
    Input,
    Kinds,
    Module,
    Op,
    Output,
    PerRank,
    Repeated,
    Value,
    fresh_name,
    live_ops,
)
from distir_relax.layout import Collective, DeviceMesh, Shard, held_intervals
from distir_relax.layout.partition import balanced
from distir_relax.lowering.microbatch_order import one_by_one
from distir_relax.lowering.project import project, rank_kinds
from distir_relax.lowering.to_distir import ToDistIR
from distir_relax.ops import Builder, Trait, lookup
from distir_relax.ops.communication.serialized import stretches
from distir_relax.ops.table.type_checks import local_attrs
from distir_relax.sharding import DelayReductions, Hazards, Propagate
from distir_relax.sharding.factors import Factored, factoring_of
from distir_relax.sharding.named_annotations import Mark, mark_inputs

MARK, ASIDE = "annotate_sharding", "mark_aside"


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The pass: global stage in and out; the samples, of which `BatchDim` records say where they are, in `count` parts.

    Inputs and outputs with samples become one for each part: ``x.0``, ``x.1``, … (`Divided` records say so). Where
    `repeated`, as many are written out as do unlike things, which a `Repeated` record says. `samples` is how many
    samples there are, if they are fewer than the program has: for a simulation, too, since what is said of all of them
    is still said of those that the program has. `summed` is whether something is likely to be, as in training.
    `factored` keeps what does not depend on sizes, for a caller who runs the pass again on the same module.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    count: int
    hazards: Hazards = field(default=Hazards(), repr=False)
    repeated: bool = False
    samples: int | None = None
    summed: bool = True
    factored: Factored | None = field(default=None, repr=False, compare=False)

    def run(self, module: Module) -> Module:
        """The module that works through one part after the other. Raises what propagation raises."""
        if self.repeated and not self.summed:
            try:
                return self._written(module, False)
            except VerificationError:
                # Something is summed all the same.
                return self._written(module, True)
        return self._written(module, True)

    def _written(self, module: Module, summed: bool) -> Module:
        batch = [record for record in module.records if isinstance(record, BatchDim)]
        assert batch, "no record says where the samples are"
        total = batch[0].size
        samples = total if self.samples is None else self.samples
        firsts = chosen(samples, self.count, summed) if self.repeated else tuple(range(self.count))
        sizes = [balanced(samples, self.count)[number] for number in firsts]
        rest = total - sum(sizes)
        if self.count == 1 and not rest:
            return module
        mesh = DeviceMesh((len(sizes) + (rest > 0),), ("microbatch",))
        parts = (*sizes, rest) if rest else tuple(sizes)
        shapes = {i.value.name: i.value.tensor.shape for i in module.main.inputs}
        marks = {b.value: Mark("microbatches", _cut(b, shapes[b.value][b.dim] // b.size, parts)) for b in batch}
        aside = replace(module, functions=tuple(_renamed(f, MARK, ASIDE) for f in module.functions))
        marked = replace(aside, functions=(mark_inputs(aside.main, marks), *aside.functions[1:]), meshes=(mesh,))
        marked = replace(marked, records=())
        factoring = factoring_of(marked) if self.factored is None else self.factored.of(module, marked)
        # One device has no neighbours to exchange halos with: a window over samples takes all of them.
        spread = Propagate(mesh).run(marked, factoring.without_windows())
        sharded = DelayReductions(self.hazards, stages_apart=True).run(spread)
        placed = ToDistIR(in_time=True).run(sharded)
        writer = _Unrolled(placed, len(sizes), summed)
        unrolled, divided = writer.run(sharded.main)
        functions = tuple(_renamed(f, ASIDE, MARK) for f in unrolled)
        found = [writer.repeated(self.count, firsts)] if self.repeated else []
        return replace(module, functions=functions, records=(*module.records, *divided, *found))


def chosen(samples: int, count: int, summed: bool = True) -> tuple[int, ...]:
    """The microbatches that stand for all `count` of them: the first, the second, and each of another size.

    What is done once can be told from what is done for each by there being two. Where something is `summed` over them
    the first begins what the others go on with, and the last, which is chosen too, has behind it what is done once.
    """
    sizes = balanced(samples, count)
    ends = {0, 1, count - 1} if summed else {0, 1}
    return tuple(n for n in range(count) if n in ends or sizes[n] != sizes[n - 1])


def _cut(record: BatchDim, times: int, parts: Sequence[int]) -> str:
    """The placement of an input that has each sample `times` along its dim."""
    return f"S[{record.dim}: {'|'.join(str(size * times) for size in parts)}]"


def _renamed(function: Function, old: str, new: str) -> Function:
    ops = (replace(op, name=new) if op.name == old else op for op in function.ops)
    return replace(function, ops=tuple(ops))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What stands for a value: one for each microbatch, or one for all."""

    values: tuple[Value, ...]

    @property
    def same(self) -> bool:
        return len(self.values) == 1

    def at(self, index: int) -> Value:
        return self.values[0] if self.same else self.values[index]


@dataclass(slots=True)
class _Unrolled:
    """Writes the program of all microbatches from that of as many devices."""

    module: Module
    count: int
    summed: bool = True
    g: Builder = field(default_factory=Builder)
    functions: dict[str, list[Function]] = field(default_factory=dict)
    """The distinct functions that microbatches have of each function."""
    own: dict[tuple[str, int], str] = field(default_factory=dict)
    kinds: dict[str, Kinds] = field(default_factory=dict)
    names: set[str] = field(init=False)
    parts: dict[str, int] = field(default_factory=dict)
    """The microbatch of each value: -1 for what is the same for all."""
    totals: dict[str, None] = field(default_factory=dict)
    """What is made of all microbatches, by the last of them."""
    places: dict[str, int] = field(default_factory=dict)
    """Where in the program each value stands: a sum right behind its last term, which nothing else may need."""
    couples: dict[str, bool] = field(default_factory=dict)
    """The functions in which microbatches meet: they are written out."""

    def __post_init__(self) -> None:
        self.names = {f.name for f in self.module.functions}

    def run(self, laid_out: Function) -> tuple[tuple[Function, ...], list[Divided]]:
        """All functions, the entry first; `laid_out` is the entry function of the sharded stage."""
        main, divided = self.module.main, list[Divided]()
        env: dict[str, _Parts] = {}
        # What stays whole keeps its name, whatever is called so before it comes.
        self.g.reserve(item.value.name for item in main.inputs)
        for item, before in zip(main.inputs, laid_out.inputs, strict=True):
            env[item.value.name] = self._input(item, before.value, divided)
        self._body(main, env, "")
        outputs: list[Output] = []
        for output, before_ in zip(main.outputs, laid_out.outputs, strict=True):
            outputs += self._outputs(output, before_, env[output.value.name], divided)
        whole = Function(
            main.name,
            tuple(self.g.inputs),
            tuple(one_by_one(self.g.ops, self.parts, self.totals, self.places)),
            tuple(outputs),
        )
        whole = replace(whole, ops=live_ops(whole))
        return (whole, *self._called(whole)), divided

    def repeated(self, count: int, firsts: Sequence[int]) -> Repeated:
        """The record of what was written, of `count` microbatches those of the numbers `firsts`."""
        parts = (f"{name}:{part}" for name, part in self.parts.items() if part >= 0)
        return Repeated(count, " ".join(map(str, firsts)), " ".join(parts), " ".join(self.totals), int(self.summed))

    def _input(self, item: Input, before: Value, divided: list[Divided]) -> _Parts:
        name, (placement,) = item.value.name, before.dtensor.placements
        kind = before.dtensor
        if not isinstance(placement, Shard):
            return _Parts((self._whole(item, kind),))
        if item.role != "input":
            return self._sliced(item, kind, placement)
        values = []
        for index in range(self.count):
            local = item.value.placed.local(index)
            values.append(self.g.input(f"{name}.{index}", local, item.role, item.location))
            self.parts[values[-1].name] = index
        divided.append(_divided("input", name, placement, [v.name for v in values], kind.shape))
        return _Parts(tuple(values))

    def _whole(self, item: Input, kind: DTensorType) -> Value:
        value = Value(item.value.name, kind.tensor)
        self.g.inputs.append(Input(value, item.role, item.location))
        self.parts[value.name] = -1
        return value

    def _sliced(self, item: Input, kind: DTensorType, placement: Shard) -> _Parts:
        """What is known for all samples, a mask for each, from which each microbatch takes its own."""
        whole = self._whole(item, kind)
        self.g.location, self.g.hint = item.location, item.value.name
        values = []
        for index in range(self.count):
            pieces = held_intervals([placement], placement.dim, kind.shape[placement.dim], [index])
            rows = [{"dim": placement.dim, "intervals": tuple(pieces) or ((0, 0),)}]
            values += stretches(self.g, [whole], rows)
            if values[-1] is not whole:
                self._note(self.g.ops[-1], index)
        return _Parts(tuple(values))

    def _outputs(self, output: Output, before: Output, parts: _Parts, divided: list[Divided]) -> list[Output]:
        (placement,) = before.value.dtensor.placements
        if not isinstance(placement, Shard):
            return [Output(output.name, parts.at(0))]
        names = [f"{output.name}.{index}" for index in range(self.count)]
        divided.append(_divided("output", output.name, placement, names, before.value.dtensor.shape))
        return [Output(name, parts.at(index)) for index, name in enumerate(names)]

    def _body(self, function: Function, env: dict[str, _Parts], prefix: str) -> None:
        for op in function.ops:
            operands = [env[v.name] for v in op.operands]
            if op.callee and self._couples(op.callee):
                self._write_out(op, operands, env, prefix)
                continue
            results = self._call(op, operands, prefix) if op.callee else self._op(op, operands, prefix)
            env.update(zip((v.name for v in op.results), results, strict=True))

    def _write_out(self, op: Op, operands: Sequence[_Parts], env: dict[str, _Parts], prefix: str) -> None:
        callee = self.module.function(op.callee)
        inner = {i.value.name: parts for i, parts in zip(callee.inputs, operands, strict=True)}
        self._body(callee, inner, f"{prefix}{op.results[0].name}.")
        env.update((v.name, inner[o.value.name]) for v, o in zip(op.results, callee.outputs, strict=True))

    def _op(self, op: Op, operands: Sequence[_Parts], prefix: str) -> list[_Parts]:
        entry = lookup(op.name, op.location)
        semantics = entry.semantics
        self.g.location, self.g.hint = op.location, prefix + op.results[0].name
        rows = [local_attrs(op.attrs, index) for index in range(self.count)]
        if semantics.in_turn is not None:
            is_sum = self.summed and entry.cost.collective is Collective.ALL_REDUCE
            if self.module.meshes[0].size > self.count and not is_sum:
                raise VerificationError(f"{op.name} takes all samples, of which not all are written out", op.location)
            first = len(self.g.ops)
            given = [operands[0].at(i) for i in range(self.count)] if operands else []
            found = semantics.in_turn(self.g, given, rows)
            for written in self.g.ops[first:]:
                index = max((self.parts[v.name] for v in written.operands if v.name not in self.totals), default=-1)
                self._note(written, index, max((self.places.get(v.name, 0) for v in written.operands), default=0))
            if all(v is found[0] for v in found):
                if self.parts[found[0].name] == self.count - 1 > 0:
                    self.totals[found[0].name] = None
                return [_Parts(tuple(found[:1]))]
            made = {v.name for written in self.g.ops[first:] for v in written.results}
            self.parts.update((v.name, index) for index, v in enumerate(found) if v.name in made)
            return [_Parts(tuple(found))]
        if self._is_same(op, operands, rows):
            return [_Parts((v,)) for v in self._emit(op, [x.values[0] for x in operands], rows[0], prefix, -1)]
        columns = [
            self._emit(op, [x.at(index) for x in operands], row, prefix, index) for index, row in enumerate(rows)
        ]
        return [_Parts(values) for values in zip(*columns, strict=True)]

    def _emit(
        self, op: Op, operands: Sequence[Value], attrs: Mapping[str, Attribute], prefix: str, index: int
    ) -> list[Value]:
        self.g.hint = prefix + op.results[0].name + (f".{index}" if index >= 0 else "")
        self.g.emit(op.name, *operands, **attrs)
        self._note(self.g.ops[-1], index)
        return list(self.g.ops[-1].results)

    def _call(self, op: Op, operands: Sequence[_Parts], prefix: str) -> list[_Parts]:
        names = [self._own(op.callee, index) for index in range(self.count)]
        if self._are_same(operands) and len(set(names)) == 1:
            found = self._call_one(op, names[0], [x.values[0] for x in operands], prefix, -1)
            return [_Parts((v,)) for v in found]
        columns = [
            self._call_one(op, name, [x.at(index) for x in operands], prefix, index) for index, name in enumerate(names)
        ]
        return [_Parts(values) for values in zip(*columns, strict=True)]

    def _call_one(self, op: Op, callee: str, operands: Sequence[Value], prefix: str, index: int) -> list[Value]:
        function = next(f for found in self.functions.values() for f in found if f.name == callee)
        end = f".{index}" if index >= 0 else ""
        results = tuple(
            Value(self.g.fresh(prefix + v.name + end), o.value.type)
            for v, o in zip(op.results, function.outputs, strict=True)
        )
        turn: dict[str, Attribute] = {"microbatch": max(index, 0)} if op.task else {}
        call = Op(CALL, tuple(operands), results, {"callee": callee, **op.task, **turn}, op.location)
        self.g.ops.append(call)
        self._note(call, index)
        return list(results)

    def _note(self, op: Op, index: int, place: int | None = None) -> None:
        self.parts.update((v.name, index) for v in op.results)
        self.places.update((v.name, len(self.g.ops) if place is None else place) for v in op.results)

    def _is_same(self, op: Op, operands: Sequence[_Parts], rows: Sequence[Mapping[str, Attribute]]) -> bool:
        """Whether an op does the same for all microbatches. (The rest of the samples is none of them.)"""
        if not self._are_same(operands) or any(row != rows[0] for row in rows[1:]):
            return False
        sizes = (d.values[: self.count] for v in op.results for d in v.placed.shape if isinstance(d, PerRank))
        return all(len(set(values)) == 1 for values in sizes)

    def _are_same(self, operands: Sequence[_Parts]) -> bool:
        """Whether all are the same for all microbatches; where one alone is written out, what is of it is not."""
        return all(x.same and (self.count > 1 or self.parts[x.values[0].name] < 0) for x in operands)

    def _own(self, name: str, index: int) -> str:
        """The function that microbatch number `index` has of the one called `name`."""
        kinds = self._kinds(name)
        index = kinds.firsts[kinds.of[index]]
        if (name, index) not in self.own:
            function = self.module.function(name)
            callees = {op.callee: self._own(op.callee, index) for op in function.ops if op.callee}
            mine = project(function, index, callees=callees)
            found = self.functions.setdefault(name, [])
            known = next((f.name for f in found if replace(mine, name=f.name) == f), None)
            if known is None:
                known = name if not found else fresh_name(name, self.names)
                found.append(replace(mine, name=known))
            self.own[name, index] = known
        return self.own[name, index]

    def _kinds(self, name: str) -> Kinds:
        """Which microbatches do the same in a function."""
        if name not in self.kinds:
            function = self.module.function(name)
            called = dict.fromkeys(op.callee for op in function.ops if op.callee)
            columns = [self._kinds(callee).of for callee in called]
            self.kinds[name] = rank_kinds(function, tuple(range(self.count)), columns)
        return self.kinds[name]

    def _couples(self, name: str) -> bool:
        if name not in self.couples:
            ops = self.module.function(name).ops
            self.couples[name] = any(self._couples(op.callee) if op.callee else _is_coupling(op) for op in ops)
        return self.couples[name]

    def _called(self, main: Function) -> list[Function]:
        """The functions that are called still."""
        known = {f.name: f for found in self.functions.values() for f in found}
        used: dict[str, Function] = {}
        waiting = [main]
        while waiting:
            for op in waiting.pop().ops:
                if op.callee and op.callee not in used:
                    used[op.callee] = known[op.callee]
                    waiting.append(known[op.callee])
        return [f for name, f in known.items() if name in used]


def _is_coupling(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    if Trait.COMMUNICATES in entry.traits and entry.semantics.in_turn is None:
        raise DistIRError(
            f"microbatches would have to exchange what {op.name} sends", op.location, "take one microbatch"
        )
    return entry.semantics.in_turn is not None


def _divided(kind: str, name: str, placement: Shard, names: Sequence[str], shape: tuple[int, ...]) -> Divided:
    ends = [held_intervals([placement], placement.dim, shape[placement.dim], [i]) for i in range(len(names))]
    if any(len(pieces) > 1 for pieces in ends):
        raise DistIRError(
            f"the samples of the {kind} {name!r} are not one behind the other in its dim {placement.dim}",
            hint="make them its first dim, or take one microbatch",
        )
    return Divided(kind, name, placement.dim, " ".join(names))
