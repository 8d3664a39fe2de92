"""Programs of which nothing is split: every device has the whole of each value, so there is nothing to choose.

What `propagate` would find by looking at every op with calls written out is known here from the marks alone. A pipeline
on places of one device, unrolled into its microbatches, has tens of thousands of ops and no split.
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
from distir_relax.layout.validate import fit_annotation
from distir_relax.sharding.factors import is_annotation


def asks_for_nothing(module: Module, mesh: DeviceMesh) -> bool:
    """Whether all marks of a module of the global stage say ``R`` along all axes of the mesh.

    Of marks that do not fit it is not known.
    """
    whole = (R,) * len(mesh.shape)
    marks = [op for function in module.functions for op in function.ops if is_annotation(op)]
    try:
        return all(fit_annotation(op.attrs["placements"], mesh, op.results[0].tensor.shape) == whole for op in marks)
    except PlacementError:
        return False


def laid_out_whole(module: Module, mesh: DeviceMesh) -> tuple[Function, ...]:
    """The functions of a module that `asks_for_nothing` at the sharded stage, the entry first, every value whole."""
    program = _Program(module, len(mesh.shape))
    main = module.main
    ops, values = program.body(main)
    outputs = tuple(Output(o.name, values[o.value.name]) for o in main.outputs)
    inputs = tuple(replace(item, value=values[item.value.name], layout=None) for item in main.inputs)
    return (Function(main.name, inputs, ops, outputs), *(callee.function for callee in program.callees.values()))


@dataclass(frozen=True, slots=True)
class _Callee:
    """A function that takes the operands of these numbers, and gives for each result an input or an output."""

    function: Function
    takes: tuple[int, ...]
    gives: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Program:
    module: Module
    axes: int
    callees: dict[str, _Callee] = field(default_factory=dict)
    """The functions that are called, each behind those that it calls."""
    kinds: dict[TensorType, DTensorType] = field(default_factory=dict)
    known: dict[int, tuple[TensorType, DTensorType]] = field(default_factory=dict)
    """The types that were looked up already, by identity: values share them."""

    def body(self, function: Function) -> tuple[tuple[Op, ...], dict[str, Value]]:
        """The ops of a function without its marks, and what stands for each of its values."""
        values = {item.value.name: self._whole(item.value) for item in function.inputs}
        ops: list[Op] = []
        for op in function.ops:
            if op.name == CALL:
                ops.append(self._call(op, values))
            elif is_annotation(op):
                values[op.results[0].name] = values[op.operands[0].name]
            else:
                results = tuple([self._whole(value) for value in op.results])
                operands = tuple([values[v.name] for v in op.operands])
                ops.append(Op(op.name, operands, results, op.attrs, op.location))
                values.update((v.name, v) for v in results)
        return tuple(ops), values

    def _whole(self, value: Value) -> Value:
        found = self.known.get(id(value.type))
        if found is None:
            kind = value.tensor
            if kind not in self.kinds:
                self.kinds[kind] = DTensorType(kind.shape, kind.dtype, (R,) * self.axes)
            found = self.known[id(kind)] = kind, self.kinds[kind]
        return Value(value.name, found[1])

    def _call(self, op: Op, values: dict[str, Value]) -> Op:
        callee = self._callee(op.callee)
        taken = tuple([values[op.operands[number].name] for number in callee.takes])
        results: dict[int, Value] = {}
        for value, (kind, number) in zip(op.results, callee.gives, strict=True):
            found = taken[number] if kind == "input" else results.get(number)
            if found is None:
                found = results[number] = self._whole(value)
            values[value.name] = found
        made = tuple([results[number] for number in range(len(callee.function.outputs))])
        return Op(CALL, taken, made, {"callee": callee.function.name, **op.task}, op.location)

    def _callee(self, name: str) -> _Callee:
        """A function as `propagate` leaves one: with the inputs that it uses, what it makes given once."""
        if name not in self.callees:
            function = self.module.function(name)
            ops, values = self.body(function)
            names = {item.value.name: number for number, item in enumerate(function.inputs)}
            results = [values[o.value.name] for o in function.outputs]
            given = list(dict.fromkeys(v for v in results if v.name not in names))
            used = {v.name for op in ops for v in op.operands} | {v.name for v in results}
            inputs = [item for item in function.inputs if item.value.name in used]
            places = {item.value.name: number for number, item in enumerate(inputs)}
            self.callees[name] = _Callee(
                Function(
                    name,
                    tuple(replace(item, value=values[item.value.name], layout=None) for item in inputs),
                    ops,
                    tuple(Output(v.name, v) for v in given),
                ),
                tuple(names[item.value.name] for item in inputs),
                tuple(("input", places[v.name]) if v.name in places else ("output", given.index(v)) for v in results),
            )
        return self.callees[name]
