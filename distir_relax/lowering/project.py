"""From the distributed stage to ranked programs: what each device does, in its order.

The program of a rank is the schedule with the ops that it takes part in, its own shapes and attributes, and nothing
that leaves a tensor as it is. Ranks whose programs are equal share one; collectives name a mesh axis and list the
sizes of all its devices, so that they stay equal. Functions stay functions, one for each distinct rank; where some
device of a call lacks what the function takes or gives, all are written out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

from distir_relax.ir import (
    Attribute,
    Function,
    Input,
    Kinds,
    Module,
    Op,
    Output,
    PerRank,
    Value,
    inline,
    kinds_of,
)
from distir_relax.ops import Trait, infer, lookup
from distir_relax.ops.table.type_checks import local_attrs, numbers_by_device


@dataclass(frozen=True, slots=True)
class Project:
    """The pass: distributed stage in, ranked stage out."""

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "ranked"

    def run(self, module: Module) -> Module:
        """One function per distinct rank, ``main_0``, ``main_1``, …, and the map from rank to function."""
        if not all(_is_whole(module.function(op.callee), op) for f in module.functions for op in f.ops if op.callee):
            module = inline(module)
        ends = accumulate(len(f.ops) for f in module.functions)
        steps = {f.name: end - len(f.ops) for f, end in zip(module.functions, ends, strict=True)}
        program = _Program(module, steps)
        ranks = program.ranked(module.main, module.meshes[0].devices)
        # The entries first, then functions in their order.
        found = (f for function in module.functions for f in program.distinct.get(function.name, {}).values())
        return Module("ranked", tuple(found), module.meshes, ranks.names(), module.records)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """For each of the devices that a function runs on, of which kind it is, and for each kind the name of its own."""

    kinds: Kinds
    names_: tuple[str, ...]

    def name(self, place: int) -> str:
        """The function of the device at a place among them."""
        return self.names_[self.kinds.of[place]]

    def names(self) -> tuple[str, ...]:
        """Those of all devices."""
        return tuple(self.names_[kind] for kind in self.kinds.of)


@dataclass(slots=True)
class _Program:
    """Projects functions, each once for all calls in which devices do the same."""

    module: Module
    steps: Mapping[str, int]
    """The number in the schedule of each function's first op."""
    distinct: dict[str, dict[object, Function]] = field(default_factory=dict)
    _found: dict[object, _Ranked] = field(default_factory=dict)
    _sends: dict[str, bool] = field(default_factory=dict)

    def ranked(self, function: Function, devices: tuple[int, ...]) -> _Ranked:
        """What each of `devices` does of a function that runs on them."""
        # Elsewhere, a function that sends sends to others.
        key = (function.name, devices if self._has_transfers(function) else len(devices))
        if key not in self._found:
            self._found[key] = self._project(function, devices)
        return self._found[key]

    def _project(self, function: Function, devices: tuple[int, ...]) -> _Ranked:
        inner: dict[int, tuple[tuple[int, ...], _Ranked]] = {}
        callees: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], _Ranked]] = {}
        for number, op in enumerate(function.ops):
            if op.callee:
                onto = op.devices or ()
                if (op.callee, onto) not in callees:
                    absolute = tuple(devices[i] for i in onto)
                    callees[op.callee, onto] = onto, self.ranked(self.module.function(op.callee), absolute)
                inner[number] = callees[op.callee, onto]
        columns = [_column(onto, ranked, len(devices)) for onto, ranked in callees.values()]
        kinds = rank_kinds(function, tuple(range(len(devices))), columns)
        distinct = self.distinct.setdefault(function.name, {})
        names: list[str] = []
        for place in kinds.firsts:
            mine = {
                number: ranked.name(_place(onto, place))
                for number, (onto, ranked) in inner.items()
                if _has(onto, place)
            }
            found = _projected(function, place, self.steps[function.name], mine, devices)
            key = _key(found)
            if key not in distinct:
                distinct[key] = replace(found, name=f"{function.name}_{len(distinct)}")
            names.append(distinct[key].name)
        return _Ranked(kinds, tuple(names))

    def _has_transfers(self, function: Function) -> bool:
        if function.name not in self._sends:
            self._sends[function.name] = any(
                self._has_transfers(self.module.function(op.callee))
                if op.callee
                else Trait.TRANSFER in lookup(op.name, op.location).traits
                for op in function.ops
            )
        return self._sends[function.name]


def _is_whole(callee: Function, call: Op) -> bool:
    """Whether all devices of a call have all that it takes and gives."""
    count = len(call.devices or ())
    values = (*(i.value for i in callee.inputs), *(o.value for o in callee.outputs))
    return all(len(value.placed.devices) == count for value in values)


def _column(onto: tuple[int, ...], ranked: _Ranked, count: int) -> tuple[int, ...]:
    """Of which kind each device is in a call, -1 where it takes no part."""
    if len(onto) == count:
        return ranked.kinds.of
    of = dict(zip(onto, ranked.kinds.of, strict=True))
    return tuple(of.get(place, -1) for place in range(count))


def project(function: Function, rank: int, callees: Mapping[str, str] | None = None) -> Function:
    """What `rank` does of `function`; `callees` names its own functions for those that are called, on all devices.

    Ops that communicate carry their place in the function as attribute `step`.
    """
    names = {n: (callees or {})[op.callee] for n, op in enumerate(function.ops) if op.callee}
    return _projected(function, rank, 0, names, None)


def _projected(
    function: Function, rank: int, step: int, callees: Mapping[int, str], devices: tuple[int, ...] | None
) -> Function:
    """What the device at place `rank` does of `function`; `callees` names its own functions, by the number of the call.

    `step` is the place in the schedule of its first op, the same in every call. `devices` are those that the function
    runs on, where they are not numbered from 0.
    """
    values: dict[str, Value] = {}

    def local(value: Value) -> Value:
        return Value(value.name, value.placed.local(_place(value.placed.devices, rank)))

    inputs = []
    for item in function.inputs:
        if _is_on(item.value, rank):
            values[item.value.name] = local(item.value)
            inputs.append(Input(values[item.value.name], item.role, item.location))
    ops: list[Op] = []
    coming: dict[str, Op] = {}
    """The values that are on their way, by the op that began to receive them."""
    for number, op in enumerate(function.ops, step):
        entry = lookup(op.name, op.location)
        if Trait.TRANSFER in entry.traits:
            ops += _transfer(op, rank, number, values, devices)
            if "stream" in op.attrs and _is_on(op.results[0], rank):
                coming[op.results[0].name] = ops[-1]
            continue
        if op.callee and number - step not in callees:
            continue
        if not op.callee and not _is_on(op.results[0], rank):
            continue
        operands = tuple(values[v.name] for v in op.operands if _is_on(v, rank))
        results = tuple(local(v) for v in op.results)
        if Trait.WAIT in entry.traits and op.operands[0].name in coming:
            start = coming[op.operands[0].name]
            values[op.results[0].name] = results[0]
            attrs = {"peer": start.attrs["peer"], "step": start.attrs["step"], **_named_task(start)}
            ops.append(Op("finish_recv", operands, results, attrs, op.location))
            continue
        if Trait.TRIVIAL in entry.traits and len(operands) == 1 and operands[0].type == results[0].type:
            values[op.results[0].name] = operands[0]
            continue
        if op.callee:
            values.update((v.name, v) for v in results)
            ops.append(Op(op.name, operands, results, {"callee": callees[number - step], **op.task}, op.location))
            continue
        attrs = local_attrs(op.attrs, _place(op.results[0].placed.devices, rank))
        if Trait.COMMUNICATES in entry.traits:
            attrs["step"] = number
        values.update((v.name, v) for v in results)
        ops.append(Op(op.name, operands, results, attrs, op.location))
    outputs = tuple(Output(o.name, values[o.value.name]) for o in function.outputs if _is_on(o.value, rank))
    return Function(function.name, tuple(inputs), tuple(ops), outputs)


def rank_kinds(function: Function, ranks: tuple[int, ...], called: Sequence[tuple[int, ...]]) -> Kinds:
    """Which ranks are alike: they are on the same device sets, with the same sizes, attributes and peers.

    In the functions `called` they are of the same kinds.
    """
    columns: dict[tuple[int, ...], None] = dict.fromkeys(called)
    sets: dict[int, tuple[tuple[int, ...], dict[int, int]]] = {}

    def note(devices: tuple[int, ...], numbers: Iterable[PerRank]) -> None:
        if devices == ranks:
            columns.update((n.values, None) for n in numbers)
            return
        if id(devices) not in sets:
            sets[id(devices)] = devices, {device: index for index, device in enumerate(devices)}
            columns[tuple(rank in sets[id(devices)][1] for rank in ranks)] = None
        places = sets[id(devices)][1]
        columns.update((tuple(n.values[places[r]] if r in places else 0 for r in ranks), None) for n in numbers)

    for value in (*(i.value for i in function.inputs), *(v for op in function.ops for v in op.results)):
        note(value.placed.devices, (d for d in value.placed.shape if isinstance(d, PerRank)))
    for op in function.ops:
        devices = op.results[0].placed.devices
        note(devices, (number for attribute in op.attrs.values() for number in numbers_by_device(attribute)))
        if Trait.TRANSFER in lookup(op.name, op.location).traits:
            source = op.operands[0].placed.devices
            note(source, [PerRank(devices)])
            note(devices, [PerRank(source)])
    return kinds_of(tuple(columns), len(ranks))


def _transfer(op: Op, rank: int, step: int, values: dict[str, Value], devices: tuple[int, ...] | None) -> list[Op]:
    """What `rank` does in an op of role ``transfer``: it sends, it receives, or it has no part in it."""
    ((value,), (result,)) = op.operands, op.results

    def world(device: int) -> int:
        return device if devices is None else devices[device]

    source, target = value.placed, result.placed
    if rank in source.devices:
        peer = world(target.devices[source.devices.index(rank)])
        held = values[value.name]
        attrs: dict[str, Attribute] = {"peer": peer}
        name = "send"
        if "stream" in op.attrs:
            name, attrs["copy"] = "start_send", op.attrs.get("copy", False)
            attrs |= _named_task(op)
        sent = Value(f"{result.name}.sent", infer(name, [held.tensor], attrs, op.location)[0])
        return [Op(name, (held,), (sent,), {**attrs, "step": step}, op.location)]
    if rank in target.devices:
        index = target.devices.index(rank)
        kind = target.local(index)
        values[result.name] = Value(result.name, kind)
        attrs = {"shape": kind.shape, "dtype": kind.dtype, "peer": world(source.devices[index]), "step": step}
        name = "start_recv" if "stream" in op.attrs else "recv"
        return [Op(name, (), (values[result.name],), {**attrs, **_named_task(op)}, op.location)]
    return []


def _named_task(op: Op) -> dict[str, Attribute]:
    """The task that makes what is sent, where that is one: what a rank that waits for it can say."""
    return {"task": op.attrs["task"]} if "task" in op.attrs else {}


def _is_on(value: Value, rank: int) -> bool:
    return _has(value.placed.devices, rank)


def _has(devices: tuple[int, ...], rank: int) -> bool:
    place = _place(devices, rank)
    return place < len(devices) and devices[place] == rank


def _place(devices: tuple[int, ...], rank: int) -> int:
    """Where `rank` stands among devices in ascending order, if it does."""
    return bisect_left(devices, rank)


def _key(function: Function) -> object:
    """Equal for functions that differ in nothing but name."""
    ops = tuple((op.name, op.operands, op.results, tuple(op.attrs.items())) for op in function.ops)
    return (tuple((i.value, i.role) for i in function.inputs), ops, function.outputs)
