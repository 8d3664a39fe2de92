"""The program that a solution stands for, at the sharded stage: every value laid out, and redistributions between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.op_strategies import Way
from distir_relax.ir import (
    CALL,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    Value,
    called_first,
    fresh_name,
    value_names,
    without_unused_outputs,
)
from distir_relax.layout import print_placements
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation


def lay_out(graph: Graph, chosen: Sequence[int]) -> Module:
    """The module of `graph` with each node done in the way that is chosen for it."""
    module, mesh = graph.module, graph.space.mesh
    ways = [node.ways[number] for node, number in zip(graph.nodes, chosen, strict=True)]
    functions: dict[str, Function] = {}
    for function in called_first(module):
        if function.name not in graph.counts:
            continue
        functions[function.name] = _Layout(graph, ways, function, functions).run()
    main = functions.pop(module.main.name)
    return without_unused_outputs(Module("sharded", (main, *functions.values()), (mesh,), records=module.records))


@dataclass(slots=True)
class _Layout:
    graph: Graph
    ways: Sequence[Way]
    function: Function
    laid_out: Mapping[str, Function]
    values: dict[str, Value] = field(default_factory=dict)
    """The sharded value that stands for each global one."""
    moved: dict[tuple[str, Placed], Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def run(self) -> Function:
        self.names = value_names(self.function)
        inputs = []
        for item in self.function.inputs:
            way = self.ways[self.graph.inputs[self.function.name, item.value.name]]
            value = self.values[item.value.name] = _placed(item.value, way.rests[0])
            inputs.append(Input(value, item.role, item.location))
        for number, op in enumerate(self.function.ops):
            if op.callee:
                self._call(op)
            else:
                self._op(op, self.ways[self.graph.places[self.function.name, number]])
        outputs = tuple(Output(o.name, self.values[o.value.name]) for o in self.function.outputs)
        return Function(self.function.name, tuple(inputs), tuple(self.ops), outputs)

    def _op(self, op: Op, way: Way) -> None:
        operands = [
            self._move(self.values[v.name], need, f"{v.name}.{op.name.rsplit('.', 1)[-1]}", op.location)
            for v, need in zip(op.operands, way.needs, strict=True)
        ]
        if is_annotation(op):
            self.values[op.results[0].name] = operands[0]
            return
        results = []
        for value, gives, rests in zip(op.results, way.gives, way.rests, strict=True):
            partial = gives != rests
            name = fresh_name(f"{value.name}.partial", self.names) if partial else value.name
            results.append(Value(name, _placed(value, gives).type))
        self.ops.append(Op(op.name, tuple(operands), tuple(results), op.attrs, op.location))
        for value, made, rests in zip(op.results, results, way.rests, strict=True):
            self.values[value.name] = made
            if made.name != value.name:
                self.values[value.name] = self._redistributed(made, rests, value.name, op.location)

    def _call(self, op: Op) -> None:
        callee = self.laid_out[op.callee]
        operands = tuple(
            self._move(self.values[v.name], item.value.dtensor.placements, f"{v.name}.{op.callee}", op.location)
            for v, item in zip(op.operands, callee.inputs, strict=True)
        )
        results = tuple(
            replace(output.value, name=value.name) for value, output in zip(op.results, callee.outputs, strict=True)
        )
        self.values.update((v.name, v) for v in results)
        self.ops.append(Op(CALL, operands, results, {"callee": callee.name, **op.task}, op.location))

    def _move(self, value: Value, target: Placed, name: str, where: str) -> Value:
        """`value` in another layout, which is made once."""
        if value.dtensor.placements == target:
            return value
        key = (value.name, target)
        if key not in self.moved:
            self.moved[key] = self._redistributed(value, target, fresh_name(name, self.names), where)
        return self.moved[key]

    def _redistributed(self, value: Value, target: Placed, name: str, where: str) -> Value:
        result = Value(name, replace(value.dtensor, placements=target))
        self.ops.append(Op("redistribute", (value,), (result,), {"placements": print_placements(target)}, where))
        return result


def _placed(value: Value, lies: Placed) -> Value:
    kind = value.tensor
    return Value(value.name, DTensorType(kind.shape, kind.dtype, lies))
