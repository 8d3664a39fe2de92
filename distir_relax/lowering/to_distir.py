"""Lowering of the sharded stage to the distributed stage (DistIR), the explicit schedule of all devices.

Every op becomes the op that each device runs on its shard; every `redistribute` becomes collectives. Program order is
preserved: it is the schedule. One op represents all devices, so the size of the program does not depend on their
number.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

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
    RepeatedMicrobatches,
    Size,
    Type,
    Value,
    classify_devices,
    fresh_name,
    local_size,
    mesh_classes,
)
from distir_relax.ir.symbols import op_symbols
from distir_relax.layout import (
    DeviceMesh,
    Partial,
    Shard,
    UndecidedSize,
    is_symbolic,
    local_intervals,
    local_length,
)
from distir_relax.lowering.distributed_builder import SpmdBuilder, merge_attrs
from distir_relax.lowering.earlier_results import Earlier, EarlierResults, ExpansionEmitter
from distir_relax.lowering.expert_dispatch import can_pack, group_axes, lower_dispatch
from distir_relax.lowering.halos import SplitWindow, fetch, parts, split_windows
from distir_relax.lowering.output_assembly import assemble_outputs
from distir_relax.lowering.padding import MODES, NEUTRAL, Padding, is_padded, is_partial
from distir_relax.lowering.redistribute import lower_redistribute
from distir_relax.ops import PARALLEL, Expansion, Held, Ring, RingExpansion, Trait, lookup


@dataclass(frozen=True, slots=True)
class ToDistIR:
    """Pass: sharded stage in, distributed stage out. `tail` is ``ragged`` or ``pad`` (see `lowering.padding`).

    Calls run on all devices. A function is lowered once for each combination of operand padding: padded shards are
    passed to and from functions as they are. With `in_time`, the mesh axis is time, and a dispatch of rows stays as is.
    """

    takes: ClassVar[tuple[str, ...]] = ("sharded",)
    gives: ClassVar[str] = "distributed"
    tail: str = "ragged"
    in_time: bool = False

    def run(self, module: Module) -> Module:
        """Lower every function. Raises `DistIRError` for an unknown tail mode."""
        if self.tail not in MODES:
            raise DistIRError(f"tail is one of {', '.join(MODES)}, found {self.tail!r}")
        program = _Program(
            module, self.tail, {module.main.name}, self.in_time, self.tail == "ragged" and can_pack(module)
        )
        lowering = _Lowering(program, module.main, module.main.name)
        main = lowering.main()
        functions = tuple(map(program.earlier.added, (main, *(c.function for c in program.callees.values()))))
        assemblies = () if self.in_time else assemble_outputs(module, main, module.meshes[0])
        names = {name: value.name for name, value in lowering.values.items()}
        records = (r.replaced(names) if isinstance(r, RepeatedMicrobatches) else r for r in module.records)
        return Module("distributed", functions, module.meshes, records=(*records, *assemblies))


PadValues = tuple[float | None, ...]
"""The known padding of a value along each mesh axis."""


@dataclass(frozen=True, slots=True)
class _Callee:
    """A lowered function, the padding of its results, its expansions, and the values it takes of an earlier one."""

    function: Function
    result_pad_values: tuple[PadValues, ...]
    expansions: ExpansionEmitter
    taken: Sequence[Value]


@dataclass(slots=True)
class _Program:
    module: Module
    tail: str
    names: set[str]
    in_time: bool = False
    packed: bool = False
    """Whether routed rows may be stored compactly (`expert_dispatch.can_pack`)."""
    callees: dict[object, _Callee] = field(default_factory=dict)
    type_ids: dict[Type, int] = field(default_factory=dict)
    """Ids of types: equal types have the same id."""
    type_cache: dict[int, tuple[Type, int]] = field(default_factory=dict)
    """Cache of type ids by identity, with the types: values share them."""
    earlier: EarlierResults = field(default_factory=EarlierResults)
    unchanged: dict[object, tuple[PlacedType, ...]] = field(default_factory=dict)
    """The local types of the results of ops that each device runs as they are, on its shards: layers repeat."""

    def type_id(self, kind: Type) -> int:
        entry = self.type_cache.get(id(kind))
        if entry is None:
            entry = self.type_cache[id(kind)] = kind, self.type_ids.setdefault(kind, len(self.type_ids))
        return entry[1]

    def op_key(self, op: Op, local: list[Value]) -> object:
        """Return a key of an op and its operands: equal for ops that are lowered in the same way, without padding."""
        types = [v.type for values in (op.operands, op.results, local) for v in values]
        return (op.name, tuple(op.attrs.items()), *map(self.type_id, types))

    def callee(
        self, name: str, operands: list[Value], operand_padding: list[PadValues], made: Sequence[Op | None],
        earlier: Earlier | None,
    ) -> _Callee:  # fmt: skip
        """Return the function lowered for these operands; `made` are the ops whose elements are known, if any."""
        known = tuple([None if op is None else (op.name, tuple(op.attrs.items())) for op in made])
        types = tuple([self.type_id(v.type) for v in operands])
        key = (name, types, tuple(operand_padding), known)
        for each in (key, (*key, earlier and earlier.key)):
            if each in self.callees:
                return self.callees[each]
        lowering = _Lowering(self, self.module.function(name), fresh_name(name, self.names), earlier)
        callee = lowering.callee(operands, operand_padding, made)
        # Whatever is earlier, if it takes nothing.
        self.callees[(*key, earlier and earlier.key) if lowering.expanded.has_asked else key] = callee
        return callee


@dataclass(frozen=True, slots=True)
class _Factor:
    """A split factor: its name, and the first operand or result that has it, with the dim."""

    name: str
    tensor: int
    dim: int


@dataclass(slots=True)
class _Lowering:
    program: _Program
    function: Function
    name: str
    earlier: Earlier | None = None
    mesh: DeviceMesh = field(init=False)
    padding: Padding = field(init=False)
    builder: SpmdBuilder = field(init=False)
    expanded: ExpansionEmitter = field(init=False)
    values: dict[str, Value] = field(default_factory=dict)
    made: dict[str, Op] = field(default_factory=dict)
    """The ops of values whose elements are known when compiling (`Semantics.array`)."""
    calls: dict[str, tuple[Op, _Callee]] = field(default_factory=dict)
    """The calls, by the values that they give."""

    def __post_init__(self) -> None:
        self.mesh, self.padding = self.program.module.meshes[0], Padding(self.program.tail)
        self.builder = SpmdBuilder(self.mesh, {i.value.name for i in self.function.inputs})
        self.expanded = ExpansionEmitter(self.builder, self.earlier)

    def main(self) -> Function:
        inputs = [self._input(item) for item in self.function.inputs]
        self._body()
        outputs = tuple(replace(o, value=self._output(o), layout=None) for o in self.function.outputs)
        return Function(self.name, tuple(inputs), tuple(self.builder.ops), outputs)

    def callee(self, operands: list[Value], operand_padding: list[PadValues], made: Sequence[Op | None]) -> _Callee:
        """Lower the function for operands with this padding; its results may be padded too."""
        inputs = []
        for item, operand, pad_values, op in zip(self.function.inputs, operands, operand_padding, made, strict=True):
            value = self.values[item.value.name] = Value(item.value.name, operand.type)
            self._set_pad_values(value, pad_values)
            if op is not None:
                self.made[item.value.name] = op
            inputs.append(Input(value, item.role, item.location, item.layout))
        self._body()
        results = [self.values[o.value.name] for o in self.function.outputs]
        outputs = tuple(replace(o, value=v, layout=None) for o, v in zip(self.function.outputs, results, strict=True))
        used = (v.name for op in self.builder.ops for v in op.operands)
        more, taken = self.expanded.taken(used)
        function = Function(self.name, (*inputs, *more), tuple(self.builder.ops), outputs)
        return _Callee(function, tuple(map(self._pad_values, results)), self.expanded, taken)

    def _body(self) -> None:
        for op in self.function.ops:
            self.builder.location, self.builder.hint = op.location, op.results[0].name
            if op.callee:
                results = self._call(op)
            else:
                entry = lookup(op.name)
                is_reshard = Trait.REDISTRIBUTION in entry.traits
                is_known = entry.semantics.array is not None and not op_symbols(op)
                if made := self.made.get(op.operands[0].name) if is_reshard else op if is_known else None:
                    self.made[op.results[0].name] = made
                if is_reshard:
                    with _refusing(op):
                        results = self._redistribute(op)
                else:
                    results = self._memoized_op(op)
            for value, local in zip(op.results, results, strict=True):
                self.values[value.name] = local
        self.builder.location = ""

    def _call(self, op: Op) -> list[Value]:
        operands = [self.values[v.name] for v in op.operands]
        made = [self.made.get(v.name) for v in op.operands]
        call, earlier = self._earlier(op.callee, operands)
        callee = self.program.callee(op.callee, operands, [self._pad_values(v) for v in operands], made, earlier)
        if callee.taken:
            assert call is not None
            operands += self.program.earlier.of_call(self.builder, self.name, call, callee.taken)
        outputs = callee.function.outputs
        results = [Value(self.builder.fresh(v.name), o.value.type) for v, o in zip(op.results, outputs, strict=True)]
        for value, pad_values in zip(results, callee.result_pad_values, strict=True):
            self._set_pad_values(value, pad_values)
        attrs: dict[str, Attribute] = {"callee": callee.function.name, "devices": self.builder.devices, **op.task}
        self.builder.ops.append(Op(CALL, tuple(operands), tuple(results), attrs, op.location))
        if callee.expansions.made:
            self.calls |= {value.name: (self.builder.ops[-1], callee) for value in results}
        return results

    def _earlier(self, name: str, operands: Sequence[Value]) -> tuple[Op | None, Earlier | None]:
        """Return the call that gives most of the operands, if its function has expansions, and how `name` sees it."""
        found = [self.calls[value.name] for value in operands if value.name in self.calls]
        if not found:
            return None, None
        call, callee = max(found, key=lambda pair: sum(pair[0] is call for call, _ in found))
        inputs = self.program.module.function(name).inputs
        return call, Earlier.of(call, callee.function, callee.expansions, inputs, operands)

    def _pad_values(self, value: Value) -> PadValues:
        if not self.padding.pad_values:
            return (None,) * len(self.mesh.shape)
        return tuple(self.padding.pad_values.get((value.name, axis)) for axis in range(len(self.mesh.shape)))

    def _set_pad_values(self, value: Value, pad_values: PadValues) -> None:
        numbers = ((axis, number) for axis, number in enumerate(pad_values) if number is not None)
        self.padding.pad_values.update(((value.name, axis), number) for axis, number in numbers)

    def _input(self, item: Input) -> Input:
        kind = item.value.dtensor
        local = Value(item.value.name, self._local_type(kind, range(len(self.mesh.shape))))
        value = local
        self.builder.hint = f"{local.name}.padded"
        for axis, placement in enumerate(kind.placements):
            if isinstance(placement, Shard) and is_padded(kind.placements, axis):
                value = self.padding.pad(self.builder, value, axis, placement)
                # A shard without padding counts as padded with any value.
                self.padding.pad_values.setdefault((value.name, axis), 0.0)
        self.values[item.value.name] = value
        return replace(item, value=local)

    def _output(self, output: Output) -> Value:
        value = self.values[output.value.name]
        self.builder.hint = f"{output.value.name}.trimmed"
        placements = output.value.dtensor.placements
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard) and is_padded(placements, axis):
                value = self.padding.trim(self.builder, value, axis, placement)
        return value

    def _redistribute(self, op: Op) -> list[Value]:
        source, target = op.operands[0].dtensor, op.results[0].dtensor
        value = lower_redistribute(self.builder, self.padding, self.values[op.operands[0].name], source, target)
        return [value]

    def _memoized_op(self, op: Op) -> list[Value]:
        if self.program.tail != "ragged":
            # The op may depend on the padding of its operands.
            with _refusing(op):
                return self._op(op)
        operands = [self.values[v.name] for v in op.operands]
        key = self.program.op_key(op, operands)
        types = self.program.unchanged.get(key)
        if types is not None:
            return self._add_op(op, operands, types, dict(op.attrs))
        first = len(self.builder.ops)
        with _refusing(op):
            results = self._op(op)
        added = self.builder.ops[first:]
        if len(added) == 1 and _is_unchanged(op, added[0], operands, results):
            self.program.unchanged[key] = tuple([v.placed for v in results])
        return results

    def _add_op(
        self, op: Op, operands: list[Value], types: Sequence[PlacedType], attrs: dict[str, Attribute]
    ) -> list[Value]:
        """Add an op that each device runs on its shards."""
        results = [Value(self.builder.fresh(v.name), kind) for v, kind in zip(op.results, types, strict=True)]
        self.builder.ops.append(Op(op.name, tuple(operands), tuple(results), attrs, op.location))
        self.expanded.note(self.builder.ops[-1])
        return results

    def _op(self, op: Op) -> list[Value]:
        axes = range(len(self.mesh.shape))
        entry = lookup(op.name, op.location)
        rings = {axis: found for axis in axes if (found := self._ring(op, axis))}
        others = [axis for axis in axes if axis not in rings]
        reduced = {axis: factor for axis in others if (factor := self._reduced_factor(op, axis))}
        factors = {axis: f for axis in others if (f := reduced.get(axis) or self._expanded_factor(op, axis))}
        exact = (axis for axis, factor in factors.items() if factor.name in entry.split.exact)
        ragged = _partly_padded_axes(op).union(group_axes(op), exact, rings)
        operands = [self._trim(v, ragged) for v in op.operands]
        if not self.program.in_time and (rows := lower_dispatch(self.builder, op, operands, self.program.packed)):
            return self._pad(op, [rows], ragged)
        for axis in reduced.keys() - ragged:
            operands = [self._pad_neutral(v, local, op, axis) for v, local in zip(op.operands, operands, strict=True)]
        for axis in set(axes) - ragged:
            operands = self._pad_valid(op, operands, axis)
        self.builder.hint = op.results[0].name
        if rings:
            axis, (ring, first, second) = next(iter(rings.items()))
            return self._pad(op, list(ring.expand(self._ring_expansion(op, operands, axis, first, second))), ragged)
        for factor in factors.values():
            if expand := entry.split.expand.get(factor.name) or entry.split.expand.get("*"):
                split = [axis for axis, other in factors.items() if other == factor]
                return self._pad(op, list(expand(self._expansion(op, operands, split, factor, ragged))), ragged)
        windows = split_windows(op, self.mesh)
        operands = fetch(self.builder, self.padding, operands, windows)
        unpadded = ragged.union(*(window.axes for window in windows))
        local_types = [self._local_type(v.dtensor, unpadded) for v in op.results]
        attrs = self._local_attrs(op, operands, local_types, windows)
        inferred = self.builder.infer(op.name, tuple(operands), attrs)
        if list(inferred) != local_types:
            actual, expected = (", ".join(map(str, types)) for types in (inferred, local_types))
            raise VerificationError(f"{op.name} gives {actual} on the devices, expected {expected}", op.location)
        results = self._add_op(op, operands, local_types, attrs)
        if Trait.SCALAR in entry.traits and not is_symbolic(op.attrs["value"]):
            self.padding.set_constant(results[0], float(op.attrs["value"]), len(self.mesh.shape))  # type: ignore[arg-type]
        for axis in axes:
            self.padding.propagate(op, axis, operands, results)
        return self._pad(op, results, unpadded)

    def _trim(self, value: Value, axes: set[int]) -> Value:
        """Return the local value of an operand, without its padding along `axes`."""
        local = self.values[value.name]
        self.builder.hint = f"{local.name}.trimmed"
        return self.padding.trim_all(self.builder, local, value.dtensor.placements, axes, set())

    def _pad(self, op: Op, results: list[Value], axes: set[int]) -> list[Value]:
        """Pad the results of an op along `axes`."""
        self.builder.hint = f"{op.results[0].name}.padded"
        return [
            self.padding.pad_all(self.builder, local, v.dtensor.placements, axes, set())
            for v, local in zip(op.results, results, strict=True)
        ]

    def _pad_neutral(self, value: Value, local: Value, op: Op, axis: int) -> Value:
        reduction = next(p.reduction for v in op.results if isinstance(p := v.dtensor.placements[axis], Partial))
        return self._refill(value, local, axis, NEUTRAL[reduction])

    def _pad_valid(self, op: Op, operands: list[Value], axis: int) -> list[Value]:
        """Pad short shards of operands along `axis` with values that are valid for the op: indices, divisors."""
        split = lookup(op.name).split
        results = list(operands)
        for i, (value, local) in enumerate(zip(op.operands, operands, strict=True)):
            if i in split.indices:
                results[i] = self._refill(value, local, axis, 0.0)
            if i in split.divisors and "int" in local.placed.dtype:
                results[i] = self._refill(value, local, axis, 1.0)
        return results

    def _refill(self, value: Value, local: Value, axis: int, number: float) -> Value:
        """Pad short shards of `local` along `axis` with `number`."""
        placement = value.dtensor.placements[axis]
        if not isinstance(placement, Shard) or not is_padded(value.dtensor.placements, axis):
            return local
        self.builder.hint = f"{local.name}.refilled"
        return self.padding.refill(self.builder, local, axis, placement, number)

    def _reduced_factor(self, op: Op, axis: int) -> _Factor | None:
        """Return the factor that is summed over a split dim along `axis`; None if there is none.

        A partial sum that merely passes through is one already in an operand.
        """
        if not any(is_partial(v, axis) for v in op.results) or any(is_partial(v, axis) for v in op.operands):
            return None
        types = [v.dtensor.tensor for v in op.operands]
        rule = lookup(op.name).rule_for(types, op.attrs, [v.dtensor.tensor for v in op.results])
        for number, (value, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
            placement = value.dtensor.placements[axis]
            if isinstance(placement, Shard):
                for index in dims[placement.dim]:
                    if rule.factors[index].kind != PARALLEL:
                        return _Factor(rule.factors[index].name, number, placement.dim)
        raise VerificationError(f"{op.name} returns a partial sum, but none of its operands is split", op.location)

    def _expanded_factor(self, op: Op, axis: int) -> _Factor | None:
        """Return the result factor whose split along `axis` needs other ops than the op itself; None without one."""
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

    def _ring(self, op: Op, axis: int) -> tuple[Ring, _Factor, _Factor] | None:
        """Return the two factors that are split along `axis`, if the op's entry has ops for that."""
        for name, ring in lookup(op.name).split.ring.items():
            first, second = self._factor_along(op, name, axis), self._factor_along(op, ring.factor, axis)
            if first is not None and second is not None:
                return ring, first, second
        return None

    def _factor_along(self, op: Op, name: str, axis: int) -> _Factor | None:
        """Return a factor with the first operand that is split along it on `axis`; None if none is."""
        rule = lookup(op.name).rule_for(
            [v.dtensor.tensor for v in op.operands], op.attrs, [v.dtensor.tensor for v in op.results]
        )
        for number, (value, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
            placement = value.dtensor.placements[axis]
            if isinstance(placement, Shard) and any(rule.factors[i].name == name for i in dims[placement.dim]):
                return _Factor(name, number, placement.dim)
        return None

    def _ring_expansion(
        self, op: Op, operands: list[Value], axis: int, first: _Factor, second: _Factor
    ) -> RingExpansion:
        def held(factor: _Factor) -> Held:
            kind = op.operands[factor.tensor].dtensor
            along = [kind.placements[axis]]
            intervals = (
                local_intervals(along, factor.dim, kind.shape[factor.dim], [i]) for i in range(self.mesh.shape[axis])
            )
            return tuple(map(tuple, intervals))

        def elements(value: Value) -> Any:
            made = self.made.get(value.name)
            array = None if made is None else lookup(made.name).semantics.array
            return None if made is None or array is None else array(made.attrs)

        arrays = tuple(map(elements, op.operands))
        plain = self._expansion(op, operands, [axis], second, {axis})
        by_index = partial(self.builder.expand_by_index, axis)
        return RingExpansion(**vars(plain), first=held(first), second=held(second), arrays=arrays, by_index=by_index)

    def _expansion(
        self, op: Op, operands: list[Value], axes: list[int], factor: _Factor, ragged: Container[int]
    ) -> Expansion:
        kind = (*op.operands, *op.results)[factor.tensor].dtensor
        return Expansion(
            self.expanded,
            tuple(operands),
            op.attrs,
            tuple((self.mesh.axes[axis], self._sizes(kind, factor.dim, axes[: i + 1])) for i, axis in enumerate(axes)),
            self._local_type(kind, ragged).shape[factor.dim],
            tuple(v.dtensor.tensor for v in op.operands),
            tuple(v.dtensor.tensor for v in op.results),
        )

    def _sizes(self, kind: DTensorType, dim: int, axes: list[int]) -> tuple[Size, ...]:
        """Return the sizes of each index along the last of `axes`, within its part along the axes before."""
        placements = [kind.placements[axis] for axis in axes]
        rows = []
        classes = mesh_classes(self.mesh, tuple(axes[:-1]))
        for device in classes.firsts:
            *before, _ = (self.mesh.coordinates(device)[axis] for axis in axes)
            indices = range(self.mesh.shape[axes[-1]])
            rows.append([local_length(placements, dim, kind.shape[dim], [*before, i]) for i in indices])
        return tuple(classes.expand(column) for column in zip(*rows, strict=True))

    def _local_attrs(
        self, op: Op, operands: list[Value], results: list[PlacedType], windows: list[SplitWindow]
    ) -> dict[str, Attribute]:
        split = lookup(op.name).split
        if split.localize is None and not windows:
            return dict(op.attrs)
        rows = []
        columns = [mesh_classes(self.mesh, window.axes).of for window in windows]
        columns += [
            d.values for k in (*(v.placed for v in operands), *results) for d in k.shape if isinstance(d, PerRank)
        ]
        classes = classify_devices(tuple(columns), self.mesh.size)
        for device, positions in zip(classes.firsts, parts(self.mesh, windows, classes.firsts), strict=True):
            attrs: Mapping[str, Attribute] = op.attrs
            if windows:
                assert split.windowed is not None
                attrs = split.windowed(attrs, positions)
            if split.localize is not None:
                types = [v.placed.local(device) for v in operands]
                attrs = split.localize(attrs, types, [r.local(device) for r in results])
            rows.append(dict(attrs))
        return merge_attrs(rows, classes)

    def _local_type(self, kind: DTensorType, ragged: Container[int] = ()) -> PlacedType:
        """Return the local type of a value, without padding along the mesh axes `ragged`, with it along the others."""
        shape: list[Size] = list(kind.shape)
        for axis, placement in enumerate(kind.placements):
            if not isinstance(placement, Shard) or self.mesh.shape[axis] == 1:
                continue
            if axis not in ragged and is_padded(kind.placements, axis):
                shape[placement.dim] = self.builder.expand_by_index(axis, self.padding.size(placement))
            else:
                size = kind.shape[placement.dim]
                shape[placement.dim] = local_size(kind.placements, placement.dim, size, self.mesh)
        return PlacedType(tuple(shape), kind.dtype, self.builder.devices)


def _is_unchanged(op: Op, local: Op, operands: list[Value], results: list[Value]) -> bool:
    """Whether the op of all devices is `op` itself, on their shards."""
    is_same = local.name == op.name and local.operands == tuple(operands) and local.results == tuple(results)
    return is_same and lookup(op.name).split.localize is None and local.attrs == op.attrs


@contextmanager
def _refusing(op: Op) -> Iterator[None]:
    """Add to an undecided comparison the op that cannot be split, and its symbolic dims."""
    try:
        yield
    except UndecidedSize as error:
        splits = {
            f"{value} along dim {p.dim} of size {value.dtensor.shape[p.dim]}"
            for value in (*op.operands, *op.results)
            for p in value.dtensor.placements
            if isinstance(p, Shard) and is_symbolic(value.dtensor.shape[p.dim])
        }
        raise DistIRError(
            f"{op.name} cannot be split for every size: {', '.join(sorted(splits))}; {error.message}",
            op.location,
            "annotate the value R there, or leave the size out of dynamic_shapes",
        ) from None


def _partly_padded_axes(op: Op) -> set[int]:
    """Return the mesh axes along which short shards are padded in some of the op's values and not in others."""
    kinds = [v.dtensor for v in (*op.operands, *op.results)]
    return {
        axis
        for axis in range(len(kinds[0].placements))
        if len({is_padded(k.placements, axis) for k in kinds if isinstance(k.placements[axis], Shard)}) > 1
    }
