"""Microbatches: process the samples of a batch in parts, one after the other.

Microbatches are a mesh axis in time. The program is sharded along it as along any other axis: propagation determines
what is computed per part, where partial sums arise, and what all parts share. Then, instead of devices in parallel, one
device processes the parts in turn; an all-reduce becomes a sum. So means over parts of different sizes, batch norms
over all samples, and losses that couple samples are exact for any model.

As far as dependences allow, the forward and backward of one microbatch precede the next (gradient accumulation).
Values that microbatches need of all others (the number of labels) are computed before, and nothing else is. Functions
stay functions, one variant per distinct size.

A simulation needs only some microbatches, each representing a range of equal ones (`representative_microbatches`). The
samples of all others form one more part, for which no ops are emitted.
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
    DeviceEquivalence,
    DTensorType,
    Function,
    Input,
    MicrobatchParts,
    MicrobatchProgram,
    Module,
    Op,
    Output,
    PerRank,
    RepeatedMicrobatches,
    Value,
    fresh_name,
    live_ops,
    print_module,
)
from distir_relax.layout import Collective, Cut, DeviceMesh, Placement, Shard, local_intervals
from distir_relax.layout.partition import balanced
from distir_relax.lowering.microbatch_order import order_microbatches
from distir_relax.lowering.project import classify_ranks, project
from distir_relax.lowering.to_distir import ToDistIR
from distir_relax.ops import Builder, Trait, lookup, update_after_reads
from distir_relax.ops.communication.serialized import slices
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.sharding import DelayReductions, NonfiniteValues, Propagate
from distir_relax.sharding.factors import FactoringCache, factoring_of, with_annotations
from distir_relax.sharding.named_annotations import Mark, mark_inputs


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Pass: global stage in and out; split the samples (dims given by `BatchDim` records) into `count` microbatches.

    Inputs and outputs with samples become one per microbatch: ``x.0``, ``x.1``, ... (`MicrobatchParts` records). With
    `repeated`, only representative microbatches are emitted, see the `RepeatedMicrobatches` record. `samples` is the
    number of samples if less than that of the program; the records still refer to the program's. `summed` tells whether
    sums over microbatches are likely, as in training. `factored` caches size-independent results for further runs on
    the same module. If `ordered`, a sum over microbatches is one op, of all terms in order, right where they arise.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    count: int
    hazards: NonfiniteValues = field(default=NonfiniteValues(), repr=False)
    repeated: bool = False
    samples: int | None = None
    summed: bool = True
    factored: FactoringCache | None = field(default=None, repr=False, compare=False)
    ordered: bool = False

    def run(self, module: Module) -> Module:
        """Build the module that processes one part after the other. Raises the errors of propagation."""
        if self.repeated and not self.summed:
            try:
                return self._unroll(module, False)
            except VerificationError:
                # There is a sum after all.
                return self._unroll(module, True)
        return self._unroll(module, True)

    def _unroll(self, module: Module, summed: bool) -> Module:
        batch = [record for record in module.records if isinstance(record, BatchDim)]
        assert batch, "no record has the dim of the samples"
        total = batch[0].size
        samples = total if self.samples is None else self.samples
        firsts = representative_microbatches(samples, self.count, summed) if self.repeated else tuple(range(self.count))
        sizes = [balanced(samples, self.count)[number] for number in firsts]
        rest = total - sum(sizes)
        if self.count == 1 and rest == 0:
            return module
        mesh = DeviceMesh((len(sizes) + (rest != 0),), ("microbatch",))
        parts = (*sizes, rest) if rest != 0 else tuple(sizes)
        shapes = {i.value.name: i.value.tensor.shape for i in module.main.inputs}
        marks = {b.value: Mark("microbatches", _cut(b, shapes[b.value][b.dim] // b.size, parts)) for b in batch}
        hidden = replace(module, functions=tuple(with_annotations(f, active=False) for f in module.functions))
        annotated = replace(hidden, functions=(mark_inputs(hidden.main, marks), *hidden.functions[1:]), meshes=(mesh,))
        annotated = replace(annotated, records=())
        factoring = factoring_of(annotated) if self.factored is None else self.factored.of(module, annotated)
        # One device cannot exchange halos with others: windows over samples keep all of them.
        propagated = Propagate(mesh, reasons=False).run(annotated, factoring.without_windows())
        sharded = propagated if self.ordered else DelayReductions(self.hazards, stages_apart=True).run(propagated)
        placed = ToDistIR(in_time=True).run(sharded)
        unroller = _Unroller(placed, len(sizes), summed, self.ordered)
        unrolled, records = unroller.run(sharded.main)
        functions = tuple(with_annotations(f, active=True) for f in unrolled)
        repetition = [unroller.repeated(self.count, firsts)] if self.repeated else []
        # A program for simulation has not all of them.
        whole = [] if self.repeated or rest else [MicrobatchProgram(print_module(sharded), print_module(placed))]
        return replace(module, functions=functions, records=(*module.records, *records, *repetition, *whole))


def representative_microbatches(samples: int, count: int, summed: bool = True) -> tuple[int, ...]:
    """Return the microbatches that represent all `count`: the first, the second, and each of a new size.

    There are two so that one-time work can be distinguished from work per microbatch. With sums (`summed`) the first
    starts them, and the last, also included, is followed by one-time work.
    """
    sizes = balanced(samples, count)
    ends = {0, 1, count - 1} if summed else {0, 1}
    return tuple(n for n in range(count) if n in ends or sizes[n] != sizes[n - 1])


def _cut(record: BatchDim, times: int, parts: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placement of an input with `times` elements per sample along its dim."""
    return (Shard(record.dim, Cut.of(*(size * times for size in parts))),)


@dataclass(frozen=True, slots=True)
class _Versions:
    """The versions of a value: one per microbatch, or one shared by all."""

    values: tuple[Value, ...]

    @property
    def is_shared(self) -> bool:
        return len(self.values) == 1

    def at(self, index: int) -> Value:
        return self.values[0] if self.is_shared else self.values[index]


@dataclass(slots=True)
class _Unroller:
    """Builds the program of all microbatches from that of as many devices."""

    module: Module
    count: int
    summed: bool = True
    ordered: bool = False
    g: Builder = field(default_factory=Builder)
    functions: dict[str, list[Function]] = field(default_factory=dict)
    """The variants of each function, by size of microbatch."""
    function_names: dict[tuple[str, int], str] = field(default_factory=dict)
    classes: dict[str, DeviceEquivalence] = field(default_factory=dict)
    names: set[str] = field(init=False)
    parts: dict[str, int] = field(default_factory=dict)
    """The microbatch of each value; -1 if shared by all."""
    totals: dict[str, None] = field(default_factory=dict)
    """Sums over all microbatches, emitted with the last of them; an ordered set."""
    position_of: dict[str, int] = field(default_factory=dict)
    """The position of each value in the program; that of a sum is right after its last term."""
    coupled: dict[str, bool] = field(default_factory=dict)
    """Whether microbatches interact in a function: its calls are inlined."""

    def __post_init__(self) -> None:
        self.names = {f.name for f in self.module.functions}

    def run(self, sharded_main: Function) -> tuple[tuple[Function, ...], list[MicrobatchParts]]:
        """Return all functions, the entry first; `sharded_main` is the entry function of the sharded stage."""
        main, records = self.module.main, list[MicrobatchParts]()
        env: dict[str, _Versions] = {}
        # Shared inputs keep their names: reserve these first.
        self.g.reserve(item.value.name for item in main.inputs)
        for item, sharded in zip(main.inputs, sharded_main.inputs, strict=True):
            env[item.value.name] = self._input(item, sharded.value, records)
        self._body(main, env, "")
        outputs: list[Output] = []
        for output, sharded_output in zip(main.outputs, sharded_main.outputs, strict=True):
            outputs += self._outputs(output, sharded_output, env[output.value.name], records)
        unrolled = Function(
            main.name,
            tuple(self.g.inputs),
            update_after_reads(order_microbatches(self.g.ops, self.parts, self.totals, self.position_of)),
            tuple(outputs),
        )
        unrolled = replace(unrolled, ops=live_ops(unrolled))
        return (unrolled, *self._called_functions(unrolled)), records

    def repeated(self, count: int, firsts: Sequence[int]) -> RepeatedMicrobatches:
        """Return the record of the emitted microbatches, numbers `firsts` of `count`."""
        parts = {name: part for name, part in self.parts.items() if part >= 0}
        return RepeatedMicrobatches(count, tuple(firsts), parts, tuple(self.totals), self.summed)

    def _input(self, item: Input, sharded: Value, records: list[MicrobatchParts]) -> _Versions:
        name, (placement,) = item.value.name, sharded.dtensor.placements
        layout = sharded.dtensor
        if not isinstance(placement, Shard):
            return _Versions((self._whole(item, layout),))
        if item.role != "input":
            return self._sliced(item, layout, placement)
        values = []
        for index in range(self.count):
            local = item.value.placed.local(index)
            values.append(self.g.input(f"{name}.{index}", local, item.role, item.location))
            self.parts[values[-1].name] = index
        records.append(_parts_of("input", name, placement, [v.name for v in values], layout.shape))
        return _Versions(tuple(values))

    def _whole(self, item: Input, layout: DTensorType) -> Value:
        value = Value(item.value.name, layout.tensor)
        self.g.inputs.append(Input(value, item.role, item.location))
        self.parts[value.name] = -1
        return value

    def _sliced(self, item: Input, layout: DTensorType, placement: Shard) -> _Versions:
        """Slice a constant with a dim of samples, such as a mask, into one part per microbatch."""
        whole = self._whole(item, layout)
        self.g.location, self.g.hint = item.location, item.value.name
        values = []
        for index in range(self.count):
            pieces = local_intervals([placement], placement.dim, layout.shape[placement.dim], [index])
            rows = [{"dim": placement.dim, "intervals": tuple(pieces) or ((0, 0),)}]
            values += slices(self.g, [whole], rows)
            if values[-1] is not whole:
                self._record(self.g.ops[-1], index)
        return _Versions(tuple(values))

    def _outputs(
        self, output: Output, sharded: Output, parts: _Versions, records: list[MicrobatchParts]
    ) -> list[Output]:
        (placement,) = sharded.value.dtensor.placements
        if not isinstance(placement, Shard):
            return [replace(output, value=parts.at(0), layout=None)]
        names = [f"{output.name}.{index}" for index in range(self.count)]
        records.append(_parts_of("output", output.name, placement, names, sharded.value.dtensor.shape))
        return [Output(name, parts.at(index)) for index, name in enumerate(names)]

    def _body(self, function: Function, env: dict[str, _Versions], prefix: str) -> None:
        for op in function.ops:
            operands = [env[v.name] for v in op.operands]
            if op.callee and self._is_coupled(op.callee):
                self._inline_call(op, operands, env, prefix)
                continue
            results = self._call(op, operands, prefix) if op.callee else self._op(op, operands, prefix)
            env.update(zip((v.name for v in op.results), results, strict=True))

    def _inline_call(self, op: Op, operands: Sequence[_Versions], env: dict[str, _Versions], prefix: str) -> None:
        callee = self.module.function(op.callee)
        inner = {i.value.name: parts for i, parts in zip(callee.inputs, operands, strict=True)}
        self._body(callee, inner, f"{prefix}{op.results[0].name}.")
        env.update((v.name, inner[o.value.name]) for v, o in zip(op.results, callee.outputs, strict=True))

    def _op(self, op: Op, operands: Sequence[_Versions], prefix: str) -> list[_Versions]:
        entry = lookup(op.name, op.location)
        semantics = entry.semantics
        self.g.location, self.g.hint = op.location, prefix + op.results[0].name
        rows = [local_attrs(op.attrs, index) for index in range(self.count)]
        if semantics.serialized is not None:
            is_sum = self.summed and entry.cost.collective is Collective.ALL_REDUCE
            # A part of a shared value, such as the positions of a microbatch's samples, does not need the others.
            is_local = entry.cost.collective is None
            if self.module.meshes[0].size > self.count and not is_sum and not is_local:
                raise VerificationError(f"{op.name} needs all samples, but only some are expanded", op.location)
            first = len(self.g.ops)
            inputs = [operands[0].at(i) for i in range(self.count)] if operands else []
            if self.ordered and is_sum and rows[0]["op"] == "sum":
                results = [self.g.emit("ordered_sum", *inputs)] * len(rows)
            else:
                results = semantics.serialized(self.g, inputs, rows)
            for new in self.g.ops[first:]:
                index = max((self.parts[v.name] for v in new.operands if v.name not in self.totals), default=-1)
                self._record(new, index, max((self.position_of.get(v.name, 0) for v in new.operands), default=0))
            if all(v is results[0] for v in results):
                if self.parts[results[0].name] == self.count - 1 > 0:
                    self.totals[results[0].name] = None
                return [_Versions(tuple(results[:1]))]
            emitted_names = {v.name for new in self.g.ops[first:] for v in new.results}
            self.parts.update((v.name, index) for index, v in enumerate(results) if v.name in emitted_names)
            return [_Versions(tuple(results))]
        if self._is_shared(op, operands, rows):
            return [_Versions((v,)) for v in self._emit(op, [x.values[0] for x in operands], rows[0], prefix, -1)]
        columns = [
            self._emit(op, [x.at(index) for x in operands], row, prefix, index) for index, row in enumerate(rows)
        ]
        return [_Versions(values) for values in zip(*columns, strict=True)]

    def _emit(
        self, op: Op, operands: Sequence[Value], attrs: Mapping[str, Attribute], prefix: str, index: int
    ) -> list[Value]:
        self.g.hint = prefix + op.results[0].name + (f".{index}" if index >= 0 else "")
        self.g.emit(op.name, *operands, **attrs)
        self._record(self.g.ops[-1], index)
        return list(self.g.ops[-1].results)

    def _call(self, op: Op, operands: Sequence[_Versions], prefix: str) -> list[_Versions]:
        names = [self._function_name(op.callee, index) for index in range(self.count)]
        if self._are_shared(operands) and len(set(names)) == 1:
            results = self._new_call(op, names[0], [x.values[0] for x in operands], prefix, -1)
            return [_Versions((v,)) for v in results]
        columns = [
            self._new_call(op, name, [x.at(index) for x in operands], prefix, index) for index, name in enumerate(names)
        ]
        return [_Versions(values) for values in zip(*columns, strict=True)]

    def _new_call(self, op: Op, callee: str, operands: Sequence[Value], prefix: str, index: int) -> list[Value]:
        function = next(f for variants in self.functions.values() for f in variants if f.name == callee)
        suffix = f".{index}" if index >= 0 else ""
        results = tuple(
            Value(self.g.fresh(prefix + v.name + suffix), o.value.type)
            for v, o in zip(op.results, function.outputs, strict=True)
        )
        microbatch_attr: dict[str, Attribute] = {"microbatch": max(index, 0)} if op.task else {}
        call = Op(CALL, tuple(operands), results, {"callee": callee, **op.task, **microbatch_attr}, op.location)
        self.g.ops.append(call)
        self._record(call, index)
        return list(results)

    def _record(self, op: Op, index: int, place: int | None = None) -> None:
        self.parts.update((v.name, index) for v in op.results)
        self.position_of.update((v.name, len(self.g.ops) if place is None else place) for v in op.results)

    def _is_shared(self, op: Op, operands: Sequence[_Versions], rows: Sequence[Mapping[str, Attribute]]) -> bool:
        """Whether an op does the same for all microbatches, the rest of the samples excepted."""
        if not self._are_shared(operands) or any(row != rows[0] for row in rows[1:]):
            return False
        sizes = (d.values[: self.count] for v in op.results for d in v.placed.shape if isinstance(d, PerRank))
        return all(len(set(values)) == 1 for values in sizes)

    def _are_shared(self, operands: Sequence[_Versions]) -> bool:
        """Whether all operands are shared by all microbatches; if there is only one, its own values are not shared."""
        return all(x.is_shared and (self.count > 1 or self.parts[x.values[0].name] < 0) for x in operands)

    def _function_name(self, name: str, index: int) -> str:
        """Return the name of the variant of a function for microbatch number `index`."""
        classes = self._classes(name)
        index = classes.firsts[classes.of[index]]
        if (name, index) not in self.function_names:
            function = self.module.function(name)
            callees = {op.callee: self._function_name(op.callee, index) for op in function.ops if op.callee}
            projected = project(function, index, callees=callees)
            variants = self.functions.setdefault(name, [])
            variant_name = next((f.name for f in variants if replace(projected, name=f.name) == f), None)
            if variant_name is None:
                variant_name = name if not variants else fresh_name(name, self.names)
                variants.append(replace(projected, name=variant_name))
            self.function_names[name, index] = variant_name
        return self.function_names[name, index]

    def _classes(self, name: str) -> DeviceEquivalence:
        """Classify microbatches by their ops in a function."""
        if name not in self.classes:
            function = self.module.function(name)
            called = dict.fromkeys(op.callee for op in function.ops if op.callee)
            columns = [self._classes(callee).of for callee in called]
            self.classes[name] = classify_ranks(function, tuple(range(self.count)), columns)
        return self.classes[name]

    def _is_coupled(self, name: str) -> bool:
        if name not in self.coupled:
            ops = self.module.function(name).ops
            self.coupled[name] = any(self._is_coupled(op.callee) if op.callee else _is_coupling(op) for op in ops)
        return self.coupled[name]

    def _called_functions(self, main: Function) -> list[Function]:
        """Return the variants that are still called."""
        variants = {f.name: f for functions in self.functions.values() for f in functions}
        reached: dict[str, Function] = {}
        worklist = [main]
        while worklist:
            for op in worklist.pop().ops:
                if op.callee and op.callee not in reached:
                    reached[op.callee] = variants[op.callee]
                    worklist.append(variants[op.callee])
        return [f for name, f in variants.items() if name in reached]


def _is_coupling(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    if Trait.COMMUNICATES in entry.traits and entry.semantics.serialized is None:
        raise DistIRError(
            f"microbatches cannot exchange the values that {op.name} sends", op.location, "use one microbatch"
        )
    return entry.semantics.serialized is not None


def _parts_of(kind: str, name: str, placement: Shard, names: Sequence[str], shape: tuple[int, ...]) -> MicrobatchParts:
    ends = [local_intervals([placement], placement.dim, shape[placement.dim], [i]) for i in range(len(names))]
    if any(len(pieces) > 1 for pieces in ends):
        raise DistIRError(
            f"the samples of the {kind} {name!r} are not consecutive in its dim {placement.dim}",
            hint="make them its first dim, or use one microbatch",
        )
    return MicrobatchParts(kind, name, placement.dim, tuple(names))
