"""From the sharded stage to the distributed one: DistIR, the explicit schedule of all devices.

Every op becomes the op that each device runs on its shard; every `redistribute` becomes collectives. Program order is
kept: it is the schedule. One op instance stands for all devices, so the size of the program does not depend on how
many there are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import (
    CALL,
    Attribute,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    PerRank,
    PlacedType,
    Size,
    Type,
    Value,
    fresh_name,
    held_size,
    kinds_of,
    mesh_kinds,
)
from distir_relax.layout import DeviceMesh, Partial, Shard, held_intervals
from distir_relax.lowering.distributed_builder import PlacedEmitter, merge_attrs
from distir_relax.lowering.expert_dispatch import group_axes, lower_rows, packs
from distir_relax.lowering.halos import SplitWindow, fetch, parts, split_windows
from distir_relax.lowering.output_assembly import collected_outputs
from distir_relax.lowering.padding import MODES, NEUTRAL, Tails, is_padded, is_pending
from distir_relax.lowering.redistribute import lower_redistribute
from distir_relax.ops import PARALLEL, Expansion, Trait, lookup


@dataclass(frozen=True, slots=True)
class ToDistIR:
    """The pass: sharded stage in, distributed stage out. `tail` is ``ragged`` or ``pad`` (see `lowering.tails`).

    Calls run on all devices. A function is lowered once for each way in which what it takes is filled up: short shards
    pass to and from it as they are. Where the mesh is laid out `in_time`, a dispatch of rows stays one.
    """

    takes: ClassVar[tuple[str, ...]] = ("sharded",)
    gives: ClassVar[str] = "distributed"
    tail: str = "ragged"
    in_time: bool = False

    def run(self, module: Module) -> Module:
        """Lower every function; raises `DistIRError` for an unknown tail mode."""
        if self.tail not in MODES:
            raise DistIRError(f"tail is one of {', '.join(MODES)}, found {self.tail!r}")
        program = _Program(module, self.tail, {module.main.name}, self.in_time, self.tail == "ragged" and packs(module))
        main = _Lowering(program, module.main, module.main.name).main()
        functions = (main, *(lowered.function for lowered in program.callees.values()))
        collected = () if self.in_time else collected_outputs(module.main, main, module.meshes[0])
        return Module("distributed", functions, module.meshes, records=(*module.records, *collected))


Fillings = tuple[float | None, ...]
"""What is known of the filling of a value along each mesh axis."""


@dataclass(frozen=True, slots=True)
class _Callee:
    """A function as it is called, and the fillings of what it gives."""

    function: Function
    fillings: tuple[Fillings, ...]


@dataclass(slots=True)
class _Program:
    module: Module
    tail: str
    names: set[str]
    in_time: bool = False
    packed: bool = False
    """Whether what lies with its group may take as much room as it needs (`routing.packs`)."""
    callees: dict[object, _Callee] = field(default_factory=dict)
    numbers: dict[Type, int] = field(default_factory=dict)
    """Equal types have the same number."""
    known: dict[int, tuple[Type, int]] = field(default_factory=dict)
    """The numbers of types that were looked up already, with the types, by identity: values share them."""

    def number(self, kind: Type) -> int:
        found = self.known.get(id(kind))
        if found is None:
            found = self.known[id(kind)] = kind, self.numbers.setdefault(kind, len(self.numbers))
        return found[1]

    def callee(self, name: str, operands: list[Value], fillings: list[Fillings]) -> _Callee:
        """A function as it is lowered for these operands."""
        key = (name, tuple([self.number(v.type) for v in operands]), tuple(fillings))
        if key not in self.callees:
            lowering = _Lowering(self, self.module.function(name), fresh_name(name, self.names))
            self.callees[key] = lowering.callee(operands, fillings)
        return self.callees[key]


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor that is split: its name, and the first operand or result where it is, and the dim there."""

    name: str
    tensor: int
    dim: int


@dataclass(slots=True)
class _Lowering:
    program: _Program
    function: Function
    name: str
    mesh: DeviceMesh = field(init=False)
    tails: Tails = field(init=False)
    emitter: PlacedEmitter = field(init=False)
    values: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh, self.tails = self.program.module.meshes[0], Tails(self.program.tail)
        self.emitter = PlacedEmitter(self.mesh, {i.value.name for i in self.function.inputs})

    def main(self) -> Function:
        inputs = [self._input(item) for item in self.function.inputs]
        self._body()
        outputs = tuple(Output(o.name, self._output(o)) for o in self.function.outputs)
        return Function(self.name, tuple(inputs), tuple(self.emitter.ops), outputs)

    def callee(self, operands: list[Value], fillings: list[Fillings]) -> _Callee:
        """The function on operands that are filled up as they are; so is what it gives."""
        inputs = []
        for item, operand, filling in zip(self.function.inputs, operands, fillings, strict=True):
            value = self.values[item.value.name] = Value(item.value.name, operand.type)
            self._fill(value, filling)
            inputs.append(replace(item, value=value))
        self._body()
        results = [self.values[o.value.name] for o in self.function.outputs]
        outputs = tuple(Output(o.name, v) for o, v in zip(self.function.outputs, results, strict=True))
        function = Function(self.name, tuple(inputs), tuple(self.emitter.ops), outputs)
        return _Callee(function, tuple(map(self._fillings, results)))

    def _body(self) -> None:
        for op in self.function.ops:
            self.emitter.location, self.emitter.hint = op.location, op.results[0].name
            if op.callee:
                results = self._call(op)
            else:
                results = self._redistribute(op) if Trait.REDISTRIBUTION in lookup(op.name).traits else self._op(op)
            for value, local in zip(op.results, results, strict=True):
                self.values[value.name] = local
        self.emitter.location = ""

    def _call(self, op: Op) -> list[Value]:
        operands = [self.values[v.name] for v in op.operands]
        callee = self.program.callee(op.callee, operands, [self._fillings(v) for v in operands])
        given = callee.function.outputs
        results = [Value(self.emitter.fresh(v.name), o.value.type) for v, o in zip(op.results, given, strict=True)]
        for value, filling in zip(results, callee.fillings, strict=True):
            self._fill(value, filling)
        attrs: dict[str, Attribute] = {"callee": callee.function.name, "devices": self.emitter.devices, **op.task}
        self.emitter.ops.append(Op(CALL, tuple(operands), tuple(results), attrs, op.location))
        return results

    def _fillings(self, value: Value) -> Fillings:
        if not self.tails.filling:
            return (None,) * len(self.mesh.shape)
        return tuple(self.tails.filling.get((value.name, axis)) for axis in range(len(self.mesh.shape)))

    def _fill(self, value: Value, fillings: Fillings) -> None:
        known = ((axis, number) for axis, number in enumerate(fillings) if number is not None)
        self.tails.filling.update(((value.name, axis), number) for axis, number in known)

    def _input(self, item: Input) -> Input:
        kind = item.value.dtensor
        local = Value(item.value.name, self._local_type(kind, range(len(self.mesh.shape))))
        value = local
        self.emitter.hint = f"{local.name}.padded"
        for axis, placement in enumerate(kind.placements):
            if isinstance(placement, Shard) and is_padded(kind.placements, axis):
                value = self.tails.pad(self.emitter, value, axis, placement)
                # A shard that needs no filling has one of any value.
                self.tails.filling.setdefault((value.name, axis), 0.0)
        self.values[item.value.name] = value
        return replace(item, value=local)

    def _output(self, output: Output) -> Value:
        value = self.values[output.value.name]
        self.emitter.hint = f"{output.value.name}.trimmed"
        placements = output.value.dtensor.placements
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard) and is_padded(placements, axis):
                value = self.tails.trim(self.emitter, value, axis, placement)
        return value

    def _redistribute(self, op: Op) -> list[Value]:
        source, target = op.operands[0].dtensor, op.results[0].dtensor
        value = lower_redistribute(self.emitter, self.tails, self.values[op.operands[0].name], source, target)
        return [value]

    def _op(self, op: Op) -> list[Value]:
        axes = range(len(self.mesh.shape))
        ragged = _unlike_axes(op).union(group_axes(op))
        operands = [self._trimmed(v, ragged) for v in op.operands]
        if not self.program.in_time and (rows := lower_rows(self.emitter, op, operands, self.program.packed)):
            return self._padded(op, [rows], ragged)
        reduced = {axis: factor for axis in axes if (factor := self._reduced_factor(op, axis))}
        for axis in reduced.keys() - ragged:
            operands = [self._neutral(v, local, op, axis) for v, local in zip(op.operands, operands, strict=True)]
        entry = lookup(op.name, op.location)
        for axis in set(axes) - ragged:
            operands = self._valid(op, operands, axis)
        self.emitter.hint = op.results[0].name
        factors = {axis: f for axis in axes if (f := reduced.get(axis) or self._expanded_factor(op, axis))}
        for factor in factors.values():
            if expand := entry.split.expand.get(factor.name) or entry.split.expand.get("*"):
                split = [axis for axis, other in factors.items() if other == factor]
                return self._padded(op, list(expand(self._expansion(op, operands, split, factor, ragged))), ragged)
        windows = split_windows(op, self.mesh)
        operands = fetch(self.emitter, self.tails, operands, windows)
        cut = ragged.union(*(window.axes for window in windows))
        kinds = [self._local_type(v.dtensor, cut) for v in op.results]
        attrs = self._local_attrs(op, operands, kinds, windows)
        inferred = self.emitter.infer(op.name, tuple(operands), attrs)
        if list(inferred) != kinds:
            given, expected = (", ".join(map(str, types)) for types in (inferred, kinds))
            raise VerificationError(f"{op.name} gives {given} on the devices, expected {expected}", op.location)
        results = [Value(self.emitter.fresh(v.name), kind) for v, kind in zip(op.results, kinds, strict=True)]
        self.emitter.ops.append(Op(op.name, tuple(operands), tuple(results), attrs, op.location))
        if Trait.SCALAR in entry.traits:
            self.tails.note_constant(results[0], float(op.attrs["value"]), len(self.mesh.shape))  # type: ignore[arg-type]
        for axis in axes:
            self.tails.follow(op, axis, operands, results)
        return self._padded(op, results, cut)

    def _trimmed(self, value: Value, axes: set[int]) -> Value:
        """The local value of an operand, without its filling along `axes`."""
        local = self.values[value.name]
        self.emitter.hint = f"{local.name}.trimmed"
        return self.tails.trim_all(self.emitter, local, value.dtensor.placements, axes, set())

    def _padded(self, op: Op, results: list[Value], axes: set[int]) -> list[Value]:
        """The results of an op, filled up along `axes`."""
        self.emitter.hint = f"{op.results[0].name}.padded"
        return [
            self.tails.pad_all(self.emitter, local, v.dtensor.placements, axes, set())
            for v, local in zip(op.results, results, strict=True)
        ]

    def _neutral(self, value: Value, local: Value, op: Op, axis: int) -> Value:
        reduction = next(p.reduction for v in op.results if isinstance(p := v.dtensor.placements[axis], Partial))
        return self._refilled(value, local, axis, NEUTRAL[reduction])

    def _valid(self, op: Op, operands: list[Value], axis: int) -> list[Value]:
        """The operands, short shards along `axis` filled with numbers that the op can take: indices, divisors."""
        split = lookup(op.name).split
        found = list(operands)
        for i, (value, local) in enumerate(zip(op.operands, operands, strict=True)):
            if i in split.indices:
                found[i] = self._refilled(value, local, axis, 0.0)
            if i in split.divisors and "int" in local.placed.dtype:
                found[i] = self._refilled(value, local, axis, 1.0)
        return found

    def _refilled(self, value: Value, local: Value, axis: int, number: float) -> Value:
        """`local` with short shards along `axis` filled with `number`."""
        placement = value.dtensor.placements[axis]
        if not isinstance(placement, Shard) or not is_padded(value.dtensor.placements, axis):
            return local
        self.emitter.hint = f"{local.name}.refilled"
        return self.tails.refill(self.emitter, local, axis, placement, number)

    def _reduced_factor(self, op: Op, axis: int) -> _Factor | None:
        """The factor that is summed over a split dim along `axis`; None when there is none.

        A pending sum that merely passes through comes in with an operand.
        """
        if not any(is_pending(v, axis) for v in op.results) or any(is_pending(v, axis) for v in op.operands):
            return None
        types = [v.dtensor.tensor for v in op.operands]
        rule = lookup(op.name).rule_for(types, op.attrs, [v.dtensor.tensor for v in op.results])
        for number, (value, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
            placement = value.dtensor.placements[axis]
            if isinstance(placement, Shard):
                for index in dims[placement.dim]:
                    if rule.factors[index].kind != PARALLEL:
                        return _Factor(rule.factors[index].name, number, placement.dim)
        raise VerificationError(f"{op.name} leaves a pending sum, but none of its operands is split", op.location)

    def _expanded_factor(self, op: Op, axis: int) -> _Factor | None:
        """The factor of the results whose split along `axis` needs other ops than the op itself; None without one."""
        expand = lookup(op.name).split.expand
        if not expand:
            return None
        types = [v.dtensor.tensor for v in op.operands]
        rule = lookup(op.name).rule_for(types, op.attrs, [v.dtensor.tensor for v in op.results])
        for number, (value, dims) in enumerate(zip(op.results, rule.results, strict=True), len(op.operands)):
            placement = value.dtensor.placements[axis]
            if isinstance(placement, Shard):
                for index in dims[placement.dim]:
                    if rule.factors[index].name in expand:
                        return _Factor(rule.factors[index].name, number, placement.dim)
        return None

    def _expansion(
        self, op: Op, operands: list[Value], axes: list[int], factor: _Factor, ragged: Container[int]
    ) -> Expansion:
        kind = (*op.operands, *op.results)[factor.tensor].dtensor
        return Expansion(
            self.emitter,
            tuple(operands),
            op.attrs,
            tuple((self.mesh.axes[axis], self._parts(kind, factor.dim, axes[: i + 1])) for i, axis in enumerate(axes)),
            self._local_type(kind, ragged).shape[factor.dim],
            tuple(v.dtensor.tensor for v in op.operands),
            tuple(v.dtensor.tensor for v in op.results),
        )

    def _parts(self, kind: DTensorType, dim: int, axes: list[int]) -> tuple[Size, ...]:
        """How many elements of `dim` each index along the last of `axes` holds of what the axes before leave it."""
        placements = [kind.placements[axis] for axis in axes]
        rows = []
        kinds = mesh_kinds(self.mesh, tuple(axes[:-1]))
        for device in kinds.firsts:
            *before, _ = (self.mesh.coordinates(device)[axis] for axis in axes)
            indices = range(self.mesh.shape[axes[-1]])
            held = (held_intervals(placements, dim, kind.shape[dim], [*before, i]) for i in indices)
            rows.append([sum(stop - start for start, stop in pieces) for pieces in held])
        return tuple(kinds.spread(column) for column in zip(*rows, strict=True))

    def _local_attrs(
        self, op: Op, operands: list[Value], results: list[PlacedType], windows: list[SplitWindow]
    ) -> dict[str, Attribute]:
        split = lookup(op.name).split
        if split.localize is None and not windows:
            return dict(op.attrs)
        rows = []
        columns = [mesh_kinds(self.mesh, window.axes).of for window in windows]
        columns += [
            d.values for k in (*(v.placed for v in operands), *results) for d in k.shape if isinstance(d, PerRank)
        ]
        kinds = kinds_of(tuple(columns), self.mesh.size)
        for device, mine in zip(kinds.firsts, parts(self.mesh, windows, kinds.firsts), strict=True):
            attrs: Mapping[str, Attribute] = op.attrs
            if windows:
                assert split.windowed is not None
                attrs = split.windowed(attrs, mine)
            if split.localize is not None:
                types = [v.placed.local(device) for v in operands]
                attrs = split.localize(attrs, types, [r.local(device) for r in results])
            rows.append(dict(attrs))
        return merge_attrs(rows, kinds)

    def _local_type(self, kind: DTensorType, ragged: Container[int] = ()) -> PlacedType:
        """The local type of a value, as it is along the mesh axes `ragged`, short shards filled up along the others."""
        shape: list[Size] = list(kind.shape)
        for axis, placement in enumerate(kind.placements):
            if not isinstance(placement, Shard) or self.mesh.shape[axis] == 1:
                continue
            if axis not in ragged and is_padded(kind.placements, axis):
                shape[placement.dim] = self.emitter.by_index(axis, self.tails.size(placement))
            else:
                size = kind.shape[placement.dim]
                shape[placement.dim] = held_size(kind.placements, placement.dim, size, self.mesh)
        return PlacedType(tuple(shape), kind.dtype, self.emitter.devices)


def _unlike_axes(op: Op) -> set[int]:
    """The mesh axes along which short shards are filled up in some of the op's values and not in others."""
    kinds = [v.dtensor for v in (*op.operands, *op.results)]
    return {
        axis
        for axis in range(len(kinds[0].placements))
        if len({is_padded(k.placements, axis) for k in kinds if isinstance(k.placements[axis], Shard)}) > 1
    }
