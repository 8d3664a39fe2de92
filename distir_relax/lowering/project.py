"""From the distributed stage to ranked programs: what each device does, in its order.

The program of a rank is the schedule with the ops that it takes part in, its own shapes and attributes, and nothing
that leaves a tensor as it is. Ranks whose programs are equal share one; collectives name a mesh axis and list the
sizes of all its devices, so that they stay equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.ir import Attribute, Function, Input, Module, Op, Output, PlacedType, Value
from distir_relax.ops import infer, lookup, tensor_type
from distir_relax.ops.check import local_attrs


@dataclass(frozen=True, slots=True)
class Project:
    """The pass: distributed stage in, ranked stage out."""

    def run(self, module: Module) -> Module:
        """One function per distinct rank, ``main_0``, ``main_1``, …, and the map from rank to function."""
        mesh = module.meshes[0]
        distinct: dict[object, Function] = {}
        ranks: list[str] = []
        for rank in range(mesh.size):
            function = project(module.main, rank)
            key = _key(function)
            if key not in distinct:
                name = f"{module.main.name}_{len(distinct)}"
                distinct[key] = Function(name, function.inputs, function.ops, function.outputs)
            ranks.append(distinct[key].name)
        return Module("ranked", tuple(distinct.values()), module.meshes, tuple(ranks))


def project(function: Function, rank: int) -> Function:
    """What `rank` does of `function`. Ops that communicate carry their place in the schedule as attribute `step`."""
    values: dict[str, Value] = {}

    def local(value: Value) -> Value:
        assert isinstance(value.type, PlacedType)
        return Value(value.name, value.type.local(value.type.devices.index(rank)))

    inputs = []
    for item in function.inputs:
        if _is_on(item.value, rank):
            values[item.value.name] = local(item.value)
            inputs.append(Input(values[item.value.name], item.role, item.location))
    ops: list[Op] = []
    for step, op in enumerate(function.ops):
        entry = lookup(op.name, op.location)
        if entry.role == "transfer":
            ops += _transfer(op, rank, step, values)
            continue
        if not _is_on(op.results[0], rank):
            continue
        operands = tuple(values[v.name] for v in op.operands if _is_on(v, rank))
        results = tuple(local(v) for v in op.results)
        if entry.trivial and len(operands) == 1 and operands[0].type == results[0].type:
            values[op.results[0].name] = operands[0]
            continue
        kind = op.results[0].type
        assert isinstance(kind, PlacedType)
        attrs = local_attrs(op.attrs, kind.devices.index(rank))
        if entry.communicates:
            attrs["step"] = step
        values.update((v.name, v) for v in results)
        ops.append(Op(op.name, operands, results, attrs, op.location))
    outputs = tuple(Output(o.name, values[o.value.name]) for o in function.outputs if _is_on(o.value, rank))
    return Function(function.name, tuple(inputs), tuple(ops), outputs)


def _transfer(op: Op, rank: int, step: int, values: dict[str, Value]) -> list[Op]:
    """What `rank` does in an op of role ``transfer``: it sends, it receives, or it has no part in it."""
    ((value,), (result,)) = op.operands, op.results
    source, target = value.type, result.type
    assert isinstance(source, PlacedType)
    assert isinstance(target, PlacedType)
    if rank in source.devices:
        peer = target.devices[source.devices.index(rank)]
        held = values[value.name]
        sent = Value(f"{result.name}.sent", infer("send", [tensor_type(held)], {"peer": peer}, op.location)[0])
        return [Op("send", (held,), (sent,), {"peer": peer, "step": step}, op.location)]
    if rank in target.devices:
        index = target.devices.index(rank)
        kind = target.local(index)
        values[result.name] = Value(result.name, kind)
        attrs: dict[str, Attribute] = {"shape": kind.shape, "dtype": kind.dtype, "peer": source.devices[index], "step": step}
        return [Op("recv", (), (values[result.name],), attrs, op.location)]
    return []


def _is_on(value: Value, rank: int) -> bool:
    assert isinstance(value.type, PlacedType)
    return rank in value.type.devices


def _key(function: Function) -> object:
    """Equal for functions that differ in nothing but name."""
    ops = tuple((op.name, op.operands, op.results, tuple(op.attrs.items())) for op in function.ops)
    return (tuple((i.value, i.role) for i in function.inputs), ops, function.outputs)
