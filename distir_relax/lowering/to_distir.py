"""From the sharded stage to the distributed one: DistIR, the explicit schedule of all devices.

Every op becomes the op that each device runs on its shard; every `redistribute` becomes collectives. Program order is
kept: it is the schedule. One op instance stands for all devices, so the size of the program does not depend on how
many there are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import (
    Attribute,
    DeviceMesh,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    Partial,
    PlacedType,
    Shard,
    Size,
    Value,
    at_rank,
    held_intervals,
    per_rank,
)
from distir_relax.lowering.collectives import lower_redistribute
from distir_relax.lowering.emitter import PlacedEmitter, merge_attrs
from distir_relax.ops.placed import placed
from distir_relax.lowering.halos import SplitWindow, fetch, parts, split_windows
from distir_relax.lowering.tails import MODES, Tails, is_padded, is_pending
from distir_relax.ops import PARALLEL, Expansion, lookup


@dataclass(frozen=True, slots=True)
class ToDistIR:
    """The pass: sharded stage in, distributed stage out. `tail` is ``ragged`` or ``pad`` (see `lowering.tails`)."""

    tail: str = "ragged"

    def run(self, module: Module) -> Module:
        """Lower the entry function; raises `DistIRError` for an unknown tail mode."""
        if self.tail not in MODES:
            raise DistIRError(f"tail is one of {', '.join(MODES)}, found {self.tail!r}")
        function = _Lowering(module.main, module.meshes[0], Tails(self.tail)).run()
        return Module("distributed", (function,), module.meshes)


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor that is split: its name, and the first operand or result where it is, and the dim there."""

    name: str
    tensor: int
    dim: int


@dataclass(slots=True)
class _Lowering:
    function: Function
    mesh: DeviceMesh
    tails: Tails
    emitter: PlacedEmitter = field(init=False)
    values: dict[str, Value] = field(default_factory=dict)

    def run(self) -> Function:
        self.emitter = PlacedEmitter(self.mesh, {i.value.name for i in self.function.inputs})
        inputs = [self._input(item) for item in self.function.inputs]
        for op in self.function.ops:
            self.emitter.location, self.emitter.hint = op.location, op.results[0].name
            results = self._redistribute(op) if lookup(op.name).role == "redistribution" else self._op(op)
            for value, local in zip(op.results, results, strict=True):
                self.values[value.name] = local
        self.emitter.location = ""
        outputs = tuple(Output(o.name, self._output(o)) for o in self.function.outputs)
        return Function(self.function.name, tuple(inputs), tuple(self.emitter.ops), outputs)

    def _input(self, item: Input) -> Input:
        kind = _dtensor(item.value)
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
        placements = _dtensor(output.value).placements
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard) and is_padded(placements, axis):
                value = self.tails.trim(self.emitter, value, axis, placement)
        return value

    def _redistribute(self, op: Op) -> list[Value]:
        source, target = _dtensor(op.operands[0]), _dtensor(op.results[0])
        value = lower_redistribute(self.emitter, self.tails, self.values[op.operands[0].name], source, target)
        return [value]

    def _op(self, op: Op) -> list[Value]:
        axes = range(len(self.mesh.shape))
        ragged = _unlike_axes(op)
        operands = [self._trimmed(v, ragged) for v in op.operands]
        reduced = {axis: factor for axis in axes if (factor := self._reduced_factor(op, axis))}
        for axis in reduced.keys() - ragged:
            operands = [self._neutral(v, local, op, axis) for v, local in zip(op.operands, operands, strict=True)]
        entry = lookup(op.name, op.location)
        for axis in set(axes) - ragged:
            pairs = enumerate(zip(op.operands, operands, strict=True))
            operands = [self._refilled(v, local, axis, "sum") if i in entry.indices else local for i, (v, local) in pairs]
        self.emitter.hint = op.results[0].name
        factors = {axis: f for axis in axes if (f := reduced.get(axis) or self._expanded_factor(op, axis))}
        for factor in factors.values():
            if expand := entry.expand.get(factor.name) or entry.expand.get("*"):
                split = [axis for axis, other in factors.items() if other == factor]
                return self._padded(op, list(expand(self._expansion(op, operands, split, factor, ragged))), ragged)
        windows = split_windows(op, self.mesh)
        operands = fetch(self.emitter, self.tails, operands, windows)
        cut = ragged.union(*(window.axes for window in windows))
        kinds = [self._local_type(_dtensor(v), cut) for v in op.results]
        attrs = self._local_attrs(op, operands, kinds, windows)
        inferred = self.emitter.infer(op.name, tuple(operands), attrs)
        if list(inferred) != kinds:
            raise VerificationError(
                f"{op.name} gives {', '.join(map(str, inferred))} on the devices, expected {', '.join(map(str, kinds))}",
                op.location,
            )
        results = [Value(self.emitter.fresh(v.name), kind) for v, kind in zip(op.results, kinds, strict=True)]
        self.emitter.ops.append(Op(op.name, tuple(operands), tuple(results), attrs, op.location))
        if entry.role == "scalar":
            self.tails.note_constant(results[0], float(op.attrs["value"]), len(self.mesh.shape))  # type: ignore[arg-type]
        for axis in axes:
            self.tails.follow(op, axis, operands, results)
        return self._padded(op, results, cut)

    def _trimmed(self, value: Value, axes: set[int]) -> Value:
        """The local value of an operand, without its filling along `axes`."""
        local = self.values[value.name]
        self.emitter.hint = f"{local.name}.trimmed"
        return self.tails.trim_all(self.emitter, local, _dtensor(value).placements, axes, set())

    def _padded(self, op: Op, results: list[Value], axes: set[int]) -> list[Value]:
        """The results of an op, filled up along `axes`."""
        self.emitter.hint = f"{op.results[0].name}.padded"
        return [
            self.tails.pad_all(self.emitter, local, _dtensor(v).placements, axes, set())
            for v, local in zip(op.results, results, strict=True)
        ]

    def _neutral(self, value: Value, local: Value, op: Op, axis: int) -> Value:
        reduction = next(p.reduction for v in op.results if isinstance(p := _dtensor(v).placements[axis], Partial))
        return self._refilled(value, local, axis, reduction)

    def _refilled(self, value: Value, local: Value, axis: int, reduction: str) -> Value:
        """`local` with short shards along `axis` filled with what `reduction` is indifferent to: zeros for a sum."""
        placement = _dtensor(value).placements[axis]
        if not isinstance(placement, Shard) or not is_padded(_dtensor(value).placements, axis):
            return local
        self.emitter.hint = f"{local.name}.refilled"
        return self.tails.neutralize(self.emitter, local, axis, placement, reduction)

    def _reduced_factor(self, op: Op, axis: int) -> _Factor | None:
        """The factor that is summed over a split dim along `axis`; None when there is none.

        A pending sum that merely passes through comes in with an operand.
        """
        if not any(is_pending(v, axis) for v in op.results) or any(is_pending(v, axis) for v in op.operands):
            return None
        types = [_dtensor(v).tensor for v in op.operands]
        rule = lookup(op.name).rule_for(types, op.attrs, [_dtensor(v).tensor for v in op.results])
        for number, (value, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
            placement = _dtensor(value).placements[axis]
            if isinstance(placement, Shard):
                for index in dims[placement.dim]:
                    if rule.factors[index].kind != PARALLEL:
                        return _Factor(rule.factors[index].name, number, placement.dim)
        raise VerificationError(f"{op.name} leaves a pending sum, but none of its operands is split", op.location)

    def _expanded_factor(self, op: Op, axis: int) -> _Factor | None:
        """The factor of the results whose split along `axis` needs other ops than the op itself; None when there is none."""
        expand = lookup(op.name).expand
        if not expand:
            return None
        types = [_dtensor(v).tensor for v in op.operands]
        rule = lookup(op.name).rule_for(types, op.attrs, [_dtensor(v).tensor for v in op.results])
        for number, (value, dims) in enumerate(zip(op.results, rule.results, strict=True), len(op.operands)):
            placement = _dtensor(value).placements[axis]
            if isinstance(placement, Shard):
                for index in dims[placement.dim]:
                    if rule.factors[index].name in expand:
                        return _Factor(rule.factors[index].name, number, placement.dim)
        return None

    def _expansion(
        self, op: Op, operands: list[Value], axes: list[int], factor: _Factor, ragged: Container[int]
    ) -> Expansion:
        kind = _dtensor((*op.operands, *op.results)[factor.tensor])
        return Expansion(
            self.emitter,
            tuple(operands),
            op.attrs,
            tuple((self.mesh.axes[axis], self._parts(kind, factor.dim, axes[: i + 1])) for i, axis in enumerate(axes)),
            self._local_type(kind, ragged).shape[factor.dim],
            tuple(_dtensor(v).tensor for v in op.operands),
            tuple(_dtensor(v).tensor for v in op.results),
        )

    def _parts(self, kind: DTensorType, dim: int, axes: list[int]) -> tuple[Size, ...]:
        """How many elements of `dim` each index along the last of `axes` holds of what the axes before leave it."""
        placements = [kind.placements[axis] for axis in axes]
        rows = []
        for device in self.emitter.devices:
            *before, _ = (self.mesh.coordinates(device)[axis] for axis in axes)
            indices = range(self.mesh.shape[axes[-1]])
            held = (held_intervals(placements, dim, kind.shape[dim], [*before, i]) for i in indices)
            rows.append([sum(stop - start for start, stop in pieces) for pieces in held])
        return tuple(per_rank(list(column)) for column in zip(*rows, strict=True))

    def _local_attrs(
        self, op: Op, operands: list[Value], results: list[PlacedType], windows: list[SplitWindow]
    ) -> dict[str, Attribute]:
        entry = lookup(op.name)
        if entry.localize is None and not windows:
            return dict(op.attrs)
        rows = []
        for device, mine in zip(self.emitter.devices, parts(self.emitter, windows), strict=True):
            attrs: Mapping[str, Attribute] = op.attrs
            if windows:
                assert entry.windowed is not None
                attrs = entry.windowed(attrs, mine)
            if entry.localize is not None:
                types = [placed(v).local(device) for v in operands]
                attrs = entry.localize(attrs, types, [r.local(device) for r in results])
            rows.append(dict(attrs))
        return merge_attrs(rows)

    def _local_type(self, kind: DTensorType, ragged: Container[int] = ()) -> PlacedType:
        """The local type of a value, as it is along the mesh axes `ragged`, short shards filled up along the others."""
        shape: list[Size] = list(kind.shape)
        for axis, placement in enumerate(kind.placements):
            if not isinstance(placement, Shard) or self.mesh.shape[axis] == 1:
                continue
            if axis not in ragged and is_padded(kind.placements, axis):
                shape[placement.dim] = self.emitter.by_index(axis, self.tails.size(placement))
            else:
                shape[placement.dim] = per_rank(
                    [self._held(kind, placement.dim, device) for device in self.emitter.devices]
                )
        return PlacedType(tuple(shape), kind.dtype, self.emitter.devices)

    def _held(self, kind: DTensorType, dim: int, device: int) -> int:
        pieces = held_intervals(kind.placements, dim, kind.shape[dim], self.mesh.coordinates(device))
        return sum(stop - start for start, stop in pieces)


def _unlike_axes(op: Op) -> set[int]:
    """The mesh axes along which short shards are filled up in some of the op's values and not in others."""
    kinds = [_dtensor(v) for v in (*op.operands, *op.results)]
    return {
        axis
        for axis in range(len(kinds[0].placements))
        if len({is_padded(k.placements, axis) for k in kinds if isinstance(k.placements[axis], Shard)}) > 1
    }


def _dtensor(value: Value) -> DTensorType:
    assert isinstance(value.type, DTensorType), f"{value}: {value.type}"
    return value.type
