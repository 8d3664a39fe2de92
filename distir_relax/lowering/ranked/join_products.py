"""Products of one input are joined: those with the weights of queries, keys and values, or of a gate and its values.

A product of a few rows reads its weight once, and one that reads a larger weight is closer to the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.executable.lasting_values import mutated_values
from distir_relax.ir import Function, Module, Op, PlacedType, Untyped, Value
from distir_relax.ops import Trait, is_packable, lookup


@dataclass(frozen=True, slots=True)
class JoinProducts:
    """Pass: ranked or distributed stage, in and out. It follows `FuseLocal`, which adds biases to products."""

    takes: ClassVar[tuple[str, ...]] = ("distributed", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Join ops of every function (`Code.joined`), but none whose weight changes with one whose weight does not."""
        mutated = mutated_values(module)
        return replace(module, functions=tuple(_joined(f, mutated[f.name]) for f in module.functions))


def _joined(function: Function, mutated: Collection[str]) -> Function:
    """Replace the first of several products of an input by their joined form."""
    groups: list[tuple[int, list[Op]]] = []
    by_input: dict[object, tuple[int, list[Op]]] = {}
    defined: dict[str, int] = {}
    for number, op in enumerate(function.ops):
        entry = None if op.callee else lookup(op.name, op.location)
        if entry is None or not entry.traits.isdisjoint({Trait.COMMUNICATES, Trait.ON_COMMUNICATOR}):
            # Products do not move across communication, for which other ranks wait.
            by_input.clear()
        elif entry.code.joined and is_packable(op):
            changes = any(v.name in mutated for v in op.operands[1:])
            kinds = tuple(map(_kind, op.operands[1:]))
            key = (op.name, op.operands[0], tuple(op.attrs.items()), _devices(op), changes, kinds)
            start, group = by_input.get(key, (-1, []))
            if all(defined.get(v.name, -1) < start for v in op.operands[1:]):
                group.append(op)
            else:
                by_input[key] = number, [op]
                groups.append(by_input[key])
        defined |= {v.name: number for v in op.results}
    joined = {group[0].results[0].name: _join(group) for _, group in groups if len(group) > 1}
    removed = {op.results[0].name for _, group in groups for op in group[1:]}
    ops = [
        joined.get(op.results[0].name, op) if op.results else op
        for op in function.ops
        if not op.results or op.results[0].name not in removed
    ]
    return replace(function, ops=tuple(ops))


def _join(group: list[Op]) -> Op:
    first = group[0]
    operands = (first.operands[0], *(v for op in group for v in op.operands[1:]))
    results = tuple(v for op in group for v in op.results)
    return replace(first, name=lookup(first.name).code.joined, operands=operands, results=results)


def _devices(op: Op) -> object:
    """Return the devices that run an op of a distributed program."""
    kind = op.results[0].type
    return kind.devices if isinstance(kind, PlacedType) else None


def _kind(value: Value) -> tuple[str, int]:
    """Return the dtype and the number of dims: quantized weights of one product have one format."""
    kind = value.type
    assert not isinstance(kind, Untyped), "types are inferred before"
    return kind.dtype, len(kind.shape)
