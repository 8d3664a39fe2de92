"""Fast path of propagation for programs without splits: every value is fully replicated.

Propagation would inspect every op of the inlined program; here the annotations suffice. A pipeline with stages of one
device, unrolled into microbatches, has tens of thousands of ops and no split.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distir_relax.errors import PlacementError
from distir_relax.ir import (
    CALL,
    DTensorType,
    Function,
    Module,
    Op,
    Output,
    TensorType,
    Value,
)
from distir_relax.layout import DeviceMesh, R
from distir_relax.layout.validate import validate_annotation
from distir_relax.sharding.factors import is_annotation


def is_fully_replicated(module: Module, mesh: DeviceMesh) -> bool:
    """Whether all annotations of a module of the global stage are ``R`` along all axes of the mesh.

    False if an annotation does not fit.
    """
    full = (R,) * len(mesh.shape)
    ops = [op for function in module.functions for op in function.ops if is_annotation(op)]
    try:
        return all(validate_annotation(op.placements, mesh, op.results[0].tensor.shape) == full for op in ops)
    except PlacementError:
        return False


def replicate_all(module: Module, mesh: DeviceMesh) -> tuple[Function, ...]:
    """Return the functions of a fully replicated module at the sharded stage, the entry first."""
    program = _Program(module, len(mesh.shape))
    main = module.main
    ops, values = program.body(main)
    outputs = tuple(replace(o, value=values[o.value.name], layout=None) for o in main.outputs)
    inputs = tuple(replace(item, value=values[item.value.name], layout=None) for item in main.inputs)
    return (Function(main.name, inputs, ops, outputs), *(callee.function for callee in program.callees.values()))


@dataclass(frozen=True, slots=True)
class _Callee:
    """A function, the numbers of the operands that it takes, and for each result of a call an input or an output."""

    function: Function
    operands: tuple[int, ...]
    results: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Program:
    module: Module
    axes: int
    callees: dict[str, _Callee] = field(default_factory=dict)
    """The functions that are called, in post-order."""
    kinds: dict[TensorType, DTensorType] = field(default_factory=dict)
    cache: dict[int, tuple[TensorType, DTensorType]] = field(default_factory=dict)
    """Cache of types by identity: values share them."""

    def body(self, function: Function) -> tuple[tuple[Op, ...], dict[str, Value]]:
        """Return the ops of a function without its annotations, and the replacement of each of its values."""
        values = {item.value.name: self._replicated(item.value) for item in function.inputs}
        ops: list[Op] = []
        for op in function.ops:
            if op.callee:
                ops.append(self._call(op, values))
            elif is_annotation(op):
                values[op.results[0].name] = values[op.operands[0].name]
            else:
                results = tuple([self._replicated(value) for value in op.results])
                operands = tuple([values[v.name] for v in op.operands])
                ops.append(Op(op.name, operands, results, op.attrs, op.location))
                values.update((v.name, v) for v in results)
        return tuple(ops), values

    def _replicated(self, value: Value) -> Value:
        entry = self.cache.get(id(value.type))
        if entry is None:
            kind = value.tensor
            if kind not in self.kinds:
                self.kinds[kind] = DTensorType(kind.shape, kind.dtype, (R,) * self.axes)
            entry = self.cache[id(kind)] = kind, self.kinds[kind]
        return Value(value.name, entry[1])

    def _call(self, op: Op, values: dict[str, Value]) -> Op:
        callee = self._callee(op.callee)
        arguments = tuple([values[op.operands[number].name] for number in callee.operands])
        results: dict[int, Value] = {}
        for value, (kind, number) in zip(op.results, callee.results, strict=True):
            result = arguments[number] if kind == "input" else results.get(number)
            if result is None:
                result = results[number] = self._replicated(value)
            values[value.name] = result
        call_results = tuple([results[number] for number in range(len(callee.function.outputs))])
        return Op(CALL, arguments, call_results, {"callee": callee.function.name, **op.task}, op.location)

    def _callee(self, name: str) -> _Callee:
        """Build a function as `propagate` does: only with inputs that it uses, and each output once."""
        if name not in self.callees:
            function = self.module.function(name)
            ops, values = self.body(function)
            names = {item.value.name: number for number, item in enumerate(function.inputs)}
            results = [values[o.value.name] for o in function.outputs]
            outputs = list(dict.fromkeys(v for v in results if v.name not in names))
            used_names = {v.name for op in ops for v in op.operands} | {v.name for v in results}
            inputs = [item for item in function.inputs if item.value.name in used_names]
            index = {item.value.name: number for number, item in enumerate(inputs)}
            self.callees[name] = _Callee(
                Function(
                    name,
                    tuple(replace(item, value=values[item.value.name], layout=None) for item in inputs),
                    ops,
                    tuple(Output(v.name, v) for v in outputs),
                ),
                tuple(names[item.value.name] for item in inputs),
                tuple(("input", index[v.name]) if v.name in index else ("output", outputs.index(v)) for v in results),
            )
        return self.callees[name]
