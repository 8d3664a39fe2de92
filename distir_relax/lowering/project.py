"""Projection of a distributed program to ranked programs, one per distinct rank.

The program of a rank consists of the ops that it takes part in, in schedule order, with local shapes and attributes;
ops that leave a tensor unchanged are omitted. Ranks with equal programs share one; for that, collectives name a mesh
axis and list the sizes of all its devices. Functions stay functions, one variant per distinct rank; if some device of a
call lacks an input or output of the function, all calls are inlined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

from distir_relax.ir import (
    Attribute,
    DeviceEquivalence,
    Function,
    Input,
    Module,
    Op,
    PerRank,
    Value,
    classify_devices,
    fresh_name,
    inline,
    value_names,
)
from distir_relax.ops import Trait, infer, lookup
from distir_relax.ops.communication.collectives import FINISH_COLLECTIVE
from distir_relax.ops.table.spmd_inference import local_attrs, numbers_by_device


@dataclass(frozen=True, slots=True)
class Project:
    """Pass: distributed stage in, ranked stage out."""

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "ranked"

    def run(self, module: Module) -> Module:
        """Return one function per distinct rank, ``main_0``, ``main_1``, ..., and the map from ranks to functions."""
        if not all(_is_complete(module.function(op.callee), op) for f in module.functions for op in f.ops if op.callee):
            module = inline(module)
        ends = accumulate(len(f.ops) for f in module.functions)
        steps = {f.name: end - len(f.ops) for f, end in zip(module.functions, ends, strict=True)}
        program = _Program(module, steps)
        ranks = program.rank_programs(module.main, module.meshes[0].devices)
        # Entries come first, then functions in their order.
        functions = (f for function in module.functions for f in program.distinct.get(function.name, {}).values())
        return Module("ranked", tuple(functions), module.meshes, ranks.names(), module.records)


@dataclass(frozen=True, slots=True)
class _RankPrograms:
    """The classes of the devices that a function runs on, and the name of each class's function."""

    classes: DeviceEquivalence
    names_: tuple[str, ...]

    def name(self, position: int) -> str:
        """Return the function of the device at a position among them."""
        return self.names_[self.classes.of[position]]

    def names(self) -> tuple[str, ...]:
        """Return the functions of all devices."""
        return tuple(self.names_[class_] for class_ in self.classes.of)


@dataclass(slots=True)
class _Program:
    """Projects functions, each once for all calls in which devices do the same."""

    module: Module
    steps: Mapping[str, int]
    """The index in the schedule of each function's first op."""
    distinct: dict[str, dict[object, Function]] = field(default_factory=dict)
    _programs: dict[object, _RankPrograms] = field(default_factory=dict)
    _sends: dict[str, bool] = field(default_factory=dict)

    def rank_programs(self, function: Function, devices: tuple[int, ...]) -> _RankPrograms:
        """Project a function that runs on `devices`."""
        # The peers of a function that sends depend on its devices.
        key = (function.name, devices if self._has_transfers(function) else len(devices))
        if key not in self._programs:
            self._programs[key] = self._project(function, devices)
        return self._programs[key]

    def _project(self, function: Function, devices: tuple[int, ...]) -> _RankPrograms:
        inner: dict[int, tuple[tuple[int, ...], _RankPrograms]] = {}
        callees: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], _RankPrograms]] = {}
        for number, op in enumerate(function.ops):
            if op.callee:
                subset = op.devices or ()
                if (op.callee, subset) not in callees:
                    absolute = tuple(devices[i] for i in subset)
                    callees[op.callee, subset] = (subset, self.rank_programs(self.module.function(op.callee), absolute))
                inner[number] = callees[op.callee, subset]
        columns = [_class_column(subset, programs, len(devices)) for subset, programs in callees.values()]
        classes = classify_ranks(function, devices, columns)
        distinct = self.distinct.setdefault(function.name, {})
        names: list[str] = []
        for position in classes.firsts:
            callee_names = {
                number: programs.name(_position(subset, position))
                for number, (subset, programs) in inner.items()
                if _has(subset, position)
            }
            projected = _project_rank(function, position, self.steps[function.name], callee_names, devices)
            key = _key(projected)
            if key not in distinct:
                distinct[key] = replace(projected, name=f"{function.name}_{len(distinct)}")
            names.append(distinct[key].name)
        return _RankPrograms(classes, tuple(names))

    def _has_transfers(self, function: Function) -> bool:
        if function.name not in self._sends:
            self._sends[function.name] = any(
                self._has_transfers(self.module.function(op.callee))
                if op.callee
                else Trait.TRANSFER in lookup(op.name, op.location).traits
                for op in function.ops
            )
        return self._sends[function.name]


def _is_complete(callee: Function, call: Op) -> bool:
    """Whether all devices of a call have all of its operands and results."""
    count = len(call.devices or ())
    values = (*(i.value for i in callee.inputs), *(o.value for o in callee.outputs))
    return all(len(value.placed.devices) == count for value in values)


def _class_column(subset: tuple[int, ...], programs: _RankPrograms, count: int) -> tuple[int, ...]:
    """Return the class of each device in a call, -1 if it does not take part."""
    if len(subset) == count:
        return programs.classes.of
    class_of = dict(zip(subset, programs.classes.of, strict=True))
    return tuple(class_of.get(position, -1) for position in range(count))


def project(function: Function, rank: int, callees: Mapping[str, str] | None = None) -> Function:
    """Project `function` to `rank`; `callees` maps functions that it calls, on all devices, to those of the rank.

    Communication ops get their index in the function as attribute `step`.
    """
    names = {n: (callees or {})[op.callee] for n, op in enumerate(function.ops) if op.callee}
    return _project_rank(function, rank, 0, names, None)


def _project_rank(
    function: Function, rank: int, step: int, callees: Mapping[int, str], devices: tuple[int, ...] | None
) -> Function:
    """Project `function` to position `rank`; `callees` maps numbers of calls to the rank's functions.

    `step` is the index in the schedule of its first op, the same in every call. `devices` are those that the function
    runs on, if they are not numbered from 0.
    """
    values: dict[str, Value] = {}

    def local(value: Value) -> Value:
        return Value(value.name, value.placed.local(_position(value.placed.devices, rank)))

    inputs = []
    for item in function.inputs:
        if _is_on(item.value, rank):
            values[item.value.name] = local(item.value)
            inputs.append(Input(values[item.value.name], item.role, item.location))
    ops: list[Op] = []
    started = _StartedOps(ops, values, value_names(function))
    for number, op in enumerate(function.ops, step):
        entry = lookup(op.name, op.location)
        if Trait.WAIT not in entry.traits:
            started.finish_all(op.operands)
        if Trait.TRANSFER in entry.traits:
            ops += _transfer(op, rank, number, values, devices)
            if "stream" in op.attrs and _is_on(op.results[0], rank):
                started.add(ops[-1])
            continue
        if op.callee and number - step not in callees:
            continue
        if not op.callee and not _is_on(op.results[0], rank):
            continue
        operands = tuple(values[v.name] for v in op.operands if _is_on(v, rank))
        results = tuple(local(v) for v in op.results)
        if Trait.WAIT in entry.traits and op.operands[0].name in started:
            values[op.results[0].name] = started.finish(op.operands[0].name, results[0], op.location)
            continue
        if entry.is_identity(operands, results):
            values[op.results[0].name] = operands[0]
            continue
        if op.callee:
            values.update((v.name, v) for v in results)
            ops.append(Op(op.name, operands, results, {"callee": callees[number - step], **op.task}, op.location))
            continue
        attrs = local_attrs(op.attrs, _position(op.results[0].placed.devices, rank))
        if Trait.COMMUNICATES in entry.traits:
            attrs["step"] = number
        values.update((v.name, v) for v in results)
        if "stream" in attrs and entry.semantics.started:
            del attrs["stream"]
            ops.append(Op(entry.semantics.started, operands, results, attrs, op.location))
            started.add(ops[-1])
        else:
            ops.append(Op(op.name, operands, results, attrs, op.location))
    started.finish_all(list(values.values()))
    mine = [output for output in function.outputs if _is_on(output.value, rank)]
    outputs = tuple(replace(output, value=values[output.value.name], layout=None) for output in mine)
    return Function(function.name, tuple(inputs), tuple(ops), outputs)


@dataclass(slots=True)
class _StartedOps:
    """The receives and collectives of a rank's program that are started and not finished yet."""

    ops: list[Op]
    """The ops of the program so far."""
    values: dict[str, Value]
    """The rank's values, by the name in the schedule."""
    names: set[str]
    _starts: dict[str, Op] = field(default_factory=dict)
    """The op that starts each, by the name of its result."""

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def add(self, op: Op) -> None:
        """Add an op that starts a communication."""
        self._starts[op.results[0].name] = op

    def finish(self, name: str, result: Value, location: str = "") -> Value:
        """Wait for a value, which is then `result`."""
        start = self._starts.pop(name)
        attrs = {key: start.attrs[key] for key in ("distance", "step") if key in start.attrs} | _task_attr(start)
        finish = "finish_recv" if "distance" in attrs else FINISH_COLLECTIVE
        self.ops.append(Op(finish, start.results, (result,), attrs, location))
        self.values[name] = result
        return result

    def finish_all(self, values: Iterable[Value]) -> None:
        """Wait for those of some values that the schedule uses on their stream, or not at all."""
        for value in values:
            if value.name in self._starts:
                local = self.values[value.name]
                self.finish(value.name, replace(local, name=fresh_name(f"{value.name}.ready", self.names)))


def classify_ranks(function: Function, world: tuple[int, ...], callees: Sequence[tuple[int, ...]]) -> DeviceEquivalence:
    """Classify the ranks `world` that a function runs on, which numbers them from 0.

    Equal ones are in the same device sets, with the same sizes, attributes, and distances to those that they exchange
    values with. `callees` are the classes of the ranks in the functions called.
    """
    ranks = tuple(range(len(world)))
    columns: dict[tuple[int, ...], None] = dict.fromkeys(callees)
    sets: dict[int, tuple[tuple[int, ...], dict[int, int]]] = {}

    def add_columns(devices: tuple[int, ...], numbers: Iterable[PerRank]) -> None:
        if devices == ranks:
            columns.update((n.values, None) for n in numbers)
            return
        if id(devices) not in sets:
            sets[id(devices)] = devices, {device: index for index, device in enumerate(devices)}
            columns[tuple(rank in sets[id(devices)][1] for rank in ranks)] = None
        positions = sets[id(devices)][1]
        columns.update((tuple(n.values[positions[r]] if r in positions else 0 for r in ranks), None) for n in numbers)

    for value in (*(i.value for i in function.inputs), *(v for op in function.ops for v in op.results)):
        add_columns(value.placed.devices, (d for d in value.placed.shape if isinstance(d, PerRank)))
    for op in function.ops:
        devices = op.results[0].placed.devices
        add_columns(devices, (number for attribute in op.attrs.values() for number in numbers_by_device(attribute)))
        if Trait.TRANSFER in lookup(op.name, op.location).traits:
            source = op.operands[0].placed.devices
            distances = [world[after] - world[before] for before, after in zip(source, devices, strict=True)]
            add_columns(source, [PerRank(tuple(distances))])
            add_columns(devices, [PerRank(tuple(-distance for distance in distances))])
    return classify_devices(tuple(columns), len(ranks))


def _transfer(op: Op, rank: int, step: int, values: dict[str, Value], devices: tuple[int, ...] | None) -> list[Op]:
    """Return the ops of `rank` for an op of role ``transfer``: it sends, receives, or does nothing."""
    ((value,), (result,)) = op.operands, op.results

    def world(device: int) -> int:
        return device if devices is None else devices[device]

    source, target = value.placed, result.placed
    if rank in source.devices:
        distance = world(target.devices[source.devices.index(rank)]) - world(rank)
        operand = values[value.name]
        attrs: dict[str, Attribute] = {"distance": distance}
        name = "send"
        if "stream" in op.attrs:
            name, attrs["copy"] = "start_send", op.attrs.get("copy", False)
            attrs |= _task_attr(op)
        sent = Value(f"{result.name}.sent", infer(name, [operand.tensor], attrs, op.location)[0])
        return [Op(name, (operand,), (sent,), {**attrs, "step": step}, op.location)]
    if rank in target.devices:
        index = target.devices.index(rank)
        kind = target.local(index)
        values[result.name] = Value(result.name, kind)
        distance = world(source.devices[index]) - world(rank)
        attrs = {"shape": kind.shape, "dtype": kind.dtype, "distance": distance, "step": step}
        name = "start_recv" if "stream" in op.attrs else "recv"
        return [Op(name, (), (values[result.name],), {**attrs, **_task_attr(op)}, op.location)]
    return []


def _task_attr(op: Op) -> dict[str, Attribute]:
    """Return the attribute that names the task that computes the value sent, for diagnostics of waiting ranks."""
    return {"task": op.attrs["task"]} if "task" in op.attrs else {}


def _is_on(value: Value, rank: int) -> bool:
    return _has(value.placed.devices, rank)


def _has(devices: tuple[int, ...], rank: int) -> bool:
    position = _position(devices, rank)
    return position < len(devices) and devices[position] == rank


def _position(devices: tuple[int, ...], rank: int) -> int:
    """Return the position of `rank` among devices in ascending order, if it is one of them."""
    return bisect_left(devices, rank)


def _key(function: Function) -> object:
    """Return a key that is equal for functions that differ only by name."""
    ops = tuple((op.name, op.operands, op.results, tuple(op.attrs.items())) for op in function.ops)
    return (tuple((i.value, i.role) for i in function.inputs), ops, function.outputs)
