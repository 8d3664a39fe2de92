"""From the distributed stage to ranked programs: what each device does, in its order.

The program of a rank is the schedule with the ops that it takes part in, its own shapes and attributes, and nothing
that leaves a tensor as it is. Ranks whose programs are equal share one; collectives name a mesh axis and list the
sizes of all its devices, so that they stay equal. Functions that run on all devices stay functions, one for each
distinct rank; those of some devices are written out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    called_first,
    inline,
    kinds_of,
)
from distir_relax.ops import Trait, infer, lookup
from distir_relax.ops.table.check import local_attrs, numbers_by_device


@dataclass(frozen=True, slots=True)
class Project:
    """The pass: distributed stage in, ranked stage out."""

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "ranked"

    def run(self, module: Module) -> Module:
        """One function per distinct rank, ``main_0``, ``main_1``, …, and the map from rank to function."""
        devices = module.meshes[0].devices
        if any(op.devices != devices for f in module.functions for op in f.ops if op.callee):
            module = inline(module)
        steps = dict(
            zip((f.name for f in module.functions), accumulate(len(f.ops) for f in module.functions), strict=True)
        )
        ranked: dict[str, _Ranked] = {}
        for function in called_first(module):
            ranked[function.name] = _project(function, devices, steps[function.name] - len(function.ops), ranked)
        functions = tuple(f for function in module.functions for f in ranked[function.name].functions)
        main = ranked[module.main.name]
        ranks = tuple(main.name(rank) for rank in devices)
        return Module("ranked", functions, module.meshes, ranks, module.records)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The distinct functions that ranks have of one function, and for each kind of rank the name of its own."""

    functions: tuple[Function, ...]
    names: tuple[str, ...]
    kinds: Kinds

    def name(self, rank: int) -> str:
        return self.names[self.kinds.of[rank]]


def _project(function: Function, ranks: tuple[int, ...], step: int, callees: Mapping[str, _Ranked]) -> _Ranked:
    """What each rank does of a function whose first op has number `step` in the schedule."""
    called = dict.fromkeys(op.callee for op in function.ops if op.callee)
    kinds = _rank_kinds(function, ranks, [callees[name].kinds.of for name in called])
    distinct: dict[object, Function] = {}
    names: list[str] = []
    for rank in kinds.firsts:
        mine = project(function, rank, step, {name: callees[name].name(rank) for name in called})
        key = _key(mine)
        if key not in distinct:
            distinct[key] = replace(mine, name=f"{function.name}_{len(distinct)}")
        names.append(distinct[key].name)
    return _Ranked(tuple(distinct.values()), tuple(names), kinds)


def project(function: Function, rank: int, step: int = 0, callees: Mapping[str, str] | None = None) -> Function:
    """What `rank` does of `function`; `callees` names its own functions for those that are called.

    Ops that communicate carry their place in the schedule as attribute `step`, counted from that of the function's
    first op. In a function it is the same in every call.
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
    for number, op in enumerate(function.ops, step):
        entry = lookup(op.name, op.location)
        if Trait.TRANSFER in entry.traits:
            ops += _transfer(op, rank, number, values)
            continue
        if not _is_on(op.results[0], rank):
            continue
        operands = tuple(values[v.name] for v in op.operands if _is_on(v, rank))
        results = tuple(local(v) for v in op.results)
        if Trait.TRIVIAL in entry.traits and len(operands) == 1 and operands[0].type == results[0].type:
            values[op.results[0].name] = operands[0]
            continue
        if op.callee:
            values.update((v.name, v) for v in results)
            ops.append(Op(op.name, operands, results, {"callee": (callees or {})[op.callee]}, op.location))
            continue
        attrs = local_attrs(op.attrs, _place(op.results[0].placed.devices, rank))
        if Trait.COMMUNICATES in entry.traits:
            attrs["step"] = number
        values.update((v.name, v) for v in results)
        ops.append(Op(op.name, operands, results, attrs, op.location))
    outputs = tuple(Output(o.name, values[o.value.name]) for o in function.outputs if _is_on(o.value, rank))
    return Function(function.name, tuple(inputs), tuple(ops), outputs)


def _rank_kinds(function: Function, ranks: tuple[int, ...], called: Sequence[tuple[int, ...]]) -> Kinds:
    """Which ranks are alike: they are on the same device sets, with the same sizes, attributes and peers.

    In the functions `called` they are of the same kinds.
    """
    columns: dict[tuple[int, ...], None] = dict.fromkeys(called)

    def note(devices: tuple[int, ...], numbers: Iterable[PerRank]) -> None:
        if devices == ranks:
            columns.update((n.values, None) for n in numbers)
            return
        places = {device: index for index, device in enumerate(devices)}
        columns[tuple(rank in places for rank in ranks)] = None
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


def _transfer(op: Op, rank: int, step: int, values: dict[str, Value]) -> list[Op]:
    """What `rank` does in an op of role ``transfer``: it sends, it receives, or it has no part in it."""
    ((value,), (result,)) = op.operands, op.results
    source, target = value.placed, result.placed
    if rank in source.devices:
        peer = target.devices[source.devices.index(rank)]
        held = values[value.name]
        sent = Value(f"{result.name}.sent", infer("send", [held.tensor], {"peer": peer}, op.location)[0])
        return [Op("send", (held,), (sent,), {"peer": peer, "step": step}, op.location)]
    if rank in target.devices:
        index = target.devices.index(rank)
        kind = target.local(index)
        values[result.name] = Value(result.name, kind)
        attrs: dict[str, Attribute] = {
            "shape": kind.shape,
            "dtype": kind.dtype,
            "peer": source.devices[index],
            "step": step,
        }
        return [Op("recv", (), (values[result.name],), attrs, op.location)]
    return []


def _is_on(value: Value, rank: int) -> bool:
    devices = value.placed.devices
    place = _place(devices, rank)
    return place < len(devices) and devices[place] == rank


def _place(devices: tuple[int, ...], rank: int) -> int:
    """Where `rank` stands among devices in ascending order, if it does."""
    return bisect_left(devices, rank)


def _key(function: Function) -> object:
    """Equal for functions that differ in nothing but name."""
    ops = tuple((op.name, op.operands, op.results, tuple(op.attrs.items())) for op in function.ops)
    return (tuple((i.value, i.role) for i in function.inputs), ops, function.outputs)
