"""Positions of samples, computed by the entry and passed to the functions that use them.

Dropout draws by seed and position, so a block with dropout holds an ``arange`` over the samples. Along a split of the
samples such an op is computed whole and sliced, at other bounds for each part. Inside a function the bounds would give
every microbatch a function of its own; as an operand, the slice leaves one function for all of them::

    func @block(%x, …)                        func @block(%x, %places, …)
      %places = arange() {end=12, …}    =>
      nn.dropout(%x, %seed, %places)            nn.dropout(%x, %seed, %places)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import Function, Input, Instance, Module, Op, Value, called_first, fresh_name, value_names
from distir_relax.ir.outline import attributes_of
from distir_relax.ops import BLOCKED
from distir_relax.strategies.sample_dims import Samples

_Key = tuple[str, str, str]
"""What tells positions apart: the op, its attributes, and its type."""


@dataclass(frozen=True, slots=True)
class HoistPositions:
    """The pass: global stage in and out. Ops without operands that number the samples are moved into the entry.

    The samples are those that `BatchDim` records name; other functions and ops are left as they are.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    def run(self, module: Module) -> Module:
        """The module whose functions take positions of samples as inputs."""
        samples = Samples.of(module)
        moved: dict[str, set[str]] = defaultdict(set)
        for function, name in _positions(samples.instance, samples):
            moved[function].add(name)
        if not moved:
            return module
        writer = _Writer(module, moved)
        functions = {f.name: writer.function(f) for f in called_first(module) if f.name != module.main.name}
        main = writer.entry(module.main)
        return replace(module, functions=(main, *(functions[f.name] for f in module.functions[1:])))


def _positions(instance: Instance, samples: Samples) -> Iterator[tuple[str, str]]:
    """The functions called, each with the name of a value that numbers samples."""
    for place in instance.ops:
        if not isinstance(place, Instance):
            continue
        for op, number in zip(place.function.ops, place.ops, strict=True):
            if isinstance(number, int) and not op.operands:
                name, rank = op.results[0].name, len(op.results[0].tensor.shape)
                blocked = any(atom.kind == BLOCKED for atom in samples.classes.factoring.atoms[number])
                if blocked and samples.dims(place.names[name], rank):
                    yield place.function.name, name
        yield from _positions(place, samples)


@dataclass(slots=True)
class _Writer:
    module: Module
    moved: Mapping[str, set[str]]
    """For each function the values that become inputs of it."""
    needed: dict[str, dict[_Key, Op]] = field(default_factory=dict)
    """For each function the ops whose results it takes."""

    def function(self, function: Function) -> Function:
        """The function with an input for each distinct op, after its own inputs and before its weights."""
        names = value_names(function)
        own = self.moved.get(function.name, set())
        needed = self.needed[function.name] = self._needed(function.ops, own)
        inputs = {key: Value(fresh_name(op.results[0].name, names), op.results[0].type) for key, op in needed.items()}
        values = {op.results[0].name: inputs[_key(op)] for op in function.ops if op.results[0].name in own}
        ops = tuple(self._rewritten(op, values, inputs) for op in function.ops if op.results[0].name not in own)
        at = _place(function.inputs)
        added = tuple(Input(value, "input") for value in inputs.values())
        return replace(function, inputs=(*function.inputs[:at], *added, *function.inputs[at:]), ops=ops)

    def entry(self, main: Function) -> Function:
        """The entry, which computes all that its functions take."""
        names = value_names(main)
        needed = self._needed(main.ops, set())
        made = {
            key: replace(op, results=(Value(fresh_name(op.results[0].name, names), op.results[0].type),))
            for key, op in needed.items()
        }
        inputs = {key: op.results[0] for key, op in made.items()}
        ops = tuple(self._rewritten(op, {}, inputs) for op in main.ops)
        return replace(main, ops=(*made.values(), *ops))

    def _needed(self, ops: Sequence[Op], own: set[str]) -> dict[_Key, Op]:
        found: dict[_Key, Op] = {}
        for op in ops:
            if op.callee:
                for key, other in self.needed[op.callee].items():
                    found.setdefault(key, other)
            elif op.results[0].name in own:
                found.setdefault(_key(op), op)
        return found

    def _rewritten(self, op: Op, values: Mapping[str, Value], inputs: Mapping[_Key, Value]) -> Op:
        operands = tuple(values.get(v.name, v) for v in op.operands)
        if op.callee and self.needed[op.callee]:
            at = _place(self.module.function(op.callee).inputs)
            added = tuple(inputs[key] for key in self.needed[op.callee])
            operands = (*operands[:at], *added, *operands[at:])
        return op if operands == op.operands else replace(op, operands=operands)


def _key(op: Op) -> _Key:
    return op.name, attributes_of(op), str(op.results[0].type)


def _place(inputs: Sequence[Input]) -> int:
    """Where inputs are added: before the first weight."""
    return next((number for number, item in enumerate(inputs) if item.role != "input"), len(inputs))
