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
from distir_relax.lowering.halos import SplitWindow, fetch, paddings, split_windows
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
        operands = [self.values[v.name] for v in op.operands]
        axes = range(len(self.mesh.shape))
        reduced = {axis: self._reduced_factor(op, axis) for axis in axes}
        for axis, factor in reduced.items():
            if factor:
                operands = [self._neutral(v, local, op, axis) for v, local in zip(op.operands, operands, strict=True)]
        entry = lookup(op.name, op.location)
        for axis in axes:
            pairs = enumerate(zip(op.operands, operands, strict=True))
            operands = [self._refilled(v, local, axis, "sum") if i in entry.indices else local for i, (v, local) in pairs]
        self.emitter.hint = op.results[0].name
        for axis in axes:
            factor = reduced[axis] or self._expanded_factor(op, axis)
            expand = factor and (entry.expand.get(factor[0]) or entry.expand.get("*"))
            if factor and expand:
                return list(expand(self._expansion(op, operands, axis, factor[1])))
        windows = split_windows(op)
        operands = fetch(self.emitter, self.tails, operands, windows)
        cut = {window.axis for window in windows}
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
        self.emitter.hint = f"{op.results[0].name}.padded"
        return [
            self.tails.pad_all(self.emitter, value, _dtensor(v).placements, cut, set()) if cut else value
            for v, value in zip(op.results, results, strict=True)
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

    def _reduced_factor(self, op: Op, axis: int) -> tuple[str, Shard] | None:
        """The factor that is summed over a split dim along `axis`, and how that dim is split; None when there is none.

        A pending sum that merely passes through comes in with an operand.
        """
        if not any(is_pending(v, axis) for v in op.results) or any(is_pending(v, axis) for v in op.operands):
            return None
        types = [_dtensor(v).tensor for v in op.operands]
        rule = lookup(op.name).rule_for(types, op.attrs, [_dtensor(v).tensor for v in op.results])
        for value, dims in zip(op.operands, rule.operands, strict=True):
            placement = _dtensor(value).placements[axis]
            if isinstance(placement, Shard):
                for index in dims[placement.dim]:
                    if rule.factors[index].kind != PARALLEL:
                        return rule.factors[index].name, placement
        raise VerificationError(f"{op.name} leaves a pending sum, but none of its operands is split", op.location)

    def _expanded_factor(self, op: Op, axis: int) -> tuple[str, Shard] | None:
        """The factor of the results whose split along `axis` needs other ops than the op itself; None when there is none."""
        expand = lookup(op.name).expand
        if not expand:
            return None
        types = [_dtensor(v).tensor for v in op.operands]
        rule = lookup(op.name).rule_for(types, op.attrs, [_dtensor(v).tensor for v in op.results])
        for value, dims in zip(op.results, rule.results, strict=True):
            placement = _dtensor(value).placements[axis]
            if isinstance(placement, Shard):
                for index in dims[placement.dim]:
                    if rule.factors[index].name in expand:
                        return rule.factors[index].name, placement
        return None

    def _expansion(self, op: Op, operands: list[Value], axis: int, placement: Shard) -> Expansion:
        assert placement.cut is not None
        value = next(v for v in (*op.operands, *op.results) if _dtensor(v).placements[axis] == placement)
        return Expansion(
            self.emitter,
            tuple(operands),
            op.attrs,
            self.mesh.axes[axis],
            placement.cut.local_sizes(),
            self._local_type(_dtensor(value)).shape[placement.dim],
            tuple(_dtensor(v).tensor for v in op.operands),
            tuple(_dtensor(v).tensor for v in op.results),
        )

    def _local_attrs(
        self, op: Op, operands: list[Value], results: list[PlacedType], windows: list[SplitWindow]
    ) -> dict[str, Attribute]:
        entry = lookup(op.name)
        if entry.localize is None and not windows:
            return dict(op.attrs)
        ends = paddings(self.emitter, windows)
        rows = []
        for device in self.emitter.devices:
            attrs: Mapping[str, Attribute] = op.attrs
            if windows:
                assert entry.padded is not None
                mine = {i: (at_rank(low, device), at_rank(high, device)) for i, (low, high) in ends.items()}
                attrs = entry.padded(attrs, mine)
            if entry.localize is not None:
                types = [placed(v).local(device) for v in operands]
                attrs = entry.localize(attrs, types, [r.local(device) for r in results])
            rows.append(dict(attrs))
        return merge_attrs(rows)

    def _local_type(self, kind: DTensorType, ragged: Container[int] = ()) -> PlacedType:
        """The local type of a value, as it is along the mesh axes `ragged`, short shards filled up along the others."""
        shape: list[Size] = list(kind.shape)
        for axis, placement in enumerate(kind.placements):
            if not isinstance(placement, Shard):
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


def _dtensor(value: Value) -> DTensorType:
    assert isinstance(value.type, DTensorType), f"{value}: {value.type}"
    return value.type
