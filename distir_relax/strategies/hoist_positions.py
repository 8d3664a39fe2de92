"""Compute sample positions in the entry and pass them to the functions that use them.

Dropout draws by seed and position, so a block with dropout contains an ``arange`` over the samples. If the samples are
split, such an op is computed in full and sliced, with different bounds for each part. Inside a function the bounds
would require one function per microbatch; as an operand, the slice leaves one function for all of them::

    func @block(%x, …)                        func @block(%x, %places, …)
      %places = arange() {end=12, …}    =>
      nn.dropout(%x, %seed, %places)            nn.dropout(%x, %seed, %places)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import Function, Input, Instance, Module, Op, Value, callees_first, fresh_name, value_names
from distir_relax.ir.outline import print_attributes
from distir_relax.strategies.sample_dims import Samples

_Key = tuple[str, str, str]
"""Identity of positions: the op, its attributes, and its type."""


@dataclass(frozen=True, slots=True)
class HoistPositions:
    """Pass within the global stage: move ops without operands that number the samples into the entry.

    The samples are the dims of `BatchDim` records; other functions and ops are unchanged.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    def run(self, module: Module) -> Module:
        """Return the module whose functions take sample positions as inputs."""
        samples = Samples.of(module)
        hoisted: dict[str, set[str]] = defaultdict(set)
        for function, name in _positions(samples.instance, samples):
            hoisted[function].add(name)
        if not hoisted:
            return module
        writer = _Hoister(module, hoisted)
        functions = {f.name: writer.function(f) for f in callees_first(module) if f.name != module.main.name}
        main = writer.entry(module.main)
        return replace(module, functions=(main, *(functions[f.name] for f in module.functions[1:])))


def _positions(instance: Instance, samples: Samples) -> Iterator[tuple[str, str]]:
    """Yield the called functions, each with the name of a value that numbers samples."""
    for call in instance.ops:
        if not isinstance(call, Instance):
            continue
        for op, number in zip(call.function.ops, call.ops, strict=True):
            if isinstance(number, int) and not op.operands:
                name, rank = op.results[0].name, len(op.results[0].tensor.shape)
                if not samples.classes.factoring.atoms[number] and samples.dims(call.names[name], rank):
                    yield call.function.name, name
        yield from _positions(call, samples)


@dataclass(slots=True)
class _Hoister:
    module: Module
    hoisted: Mapping[str, set[str]]
    """For each function: the values that become its inputs."""
    positions: dict[str, dict[_Key, Op]] = field(default_factory=dict)
    """For each function: the ops whose results it takes."""

    def function(self, function: Function) -> Function:
        """Return the function with an input for each distinct op, after its own inputs and before its weights."""
        names = value_names(function)
        hoisted = self.hoisted.get(function.name, set())
        needed = self.positions[function.name] = self._position_ops(function.ops, hoisted)
        inputs = {key: Value(fresh_name(op.results[0].name, names), op.results[0].type) for key, op in needed.items()}
        values = {op.results[0].name: inputs[_key(op)] for op in function.ops if op.results[0].name in hoisted}
        ops = tuple(self._rewrite(op, values, inputs) for op in function.ops if op.results[0].name not in hoisted)
        index = _input_index(function.inputs)
        added = tuple(Input(value, "input") for value in inputs.values())
        return replace(function, inputs=(*function.inputs[:index], *added, *function.inputs[index:]), ops=ops)

    def entry(self, main: Function) -> Function:
        """Return the entry, which computes all positions that its functions take."""
        names = value_names(main)
        position_ops = self._position_ops(main.ops, set())
        hoisted = {
            key: replace(op, results=(Value(fresh_name(op.results[0].name, names), op.results[0].type),))
            for key, op in position_ops.items()
        }
        inputs = {key: op.results[0] for key, op in hoisted.items()}
        ops = tuple(self._rewrite(op, {}, inputs) for op in main.ops)
        return replace(main, ops=(*hoisted.values(), *ops))

    def _position_ops(self, ops: Sequence[Op], hoisted: set[str]) -> dict[_Key, Op]:
        position_ops: dict[_Key, Op] = {}
        for op in ops:
            if op.callee:
                for key, inner in self.positions[op.callee].items():
                    position_ops.setdefault(key, inner)
            elif op.results[0].name in hoisted:
                position_ops.setdefault(_key(op), op)
        return position_ops

    def _rewrite(self, op: Op, values: Mapping[str, Value], inputs: Mapping[_Key, Value]) -> Op:
        operands = tuple(values.get(v.name, v) for v in op.operands)
        if op.callee and self.positions[op.callee]:
            index = _input_index(self.module.function(op.callee).inputs)
            added = tuple(inputs[key] for key in self.positions[op.callee])
            operands = (*operands[:index], *added, *operands[index:])
        return op if operands == op.operands else replace(op, operands=operands)


def _key(op: Op) -> _Key:
    return op.name, print_attributes(op), str(op.results[0].type)


def _input_index(inputs: Sequence[Input]) -> int:
    """Return the index of new inputs: before the first weight."""
    return next((number for number, item in enumerate(inputs) if item.role != "input"), len(inputs))
