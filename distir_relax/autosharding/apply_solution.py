"""Write the program of a solution at the sharded stage: every value with a layout, and redistributions between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.op_strategies import OpStrategy
from distir_relax.ir import (
    CALL,
    PLACEMENTS,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Value,
    callees_first,
    fresh_name,
    remove_unused_outputs,
    value_names,
)
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation


def apply_solution(graph: Graph, chosen: Sequence[int]) -> Module:
    """Return the module of `graph` in which each node uses its chosen strategy."""
    module, mesh = graph.module, graph.space.mesh
    strategies = [node.strategies[number] for node, number in zip(graph.nodes, chosen, strict=True)]
    functions: dict[str, Function] = {}
    for function in callees_first(module):
        if function.name not in graph.call_counts:
            continue
        functions[function.name] = _FunctionSharding(graph, strategies, function, functions).run()
    main = functions.pop(module.main.name)
    return remove_unused_outputs(Module("sharded", (main, *functions.values()), (mesh,), records=module.records))


@dataclass(slots=True)
class _FunctionSharding:
    graph: Graph
    strategies: Sequence[OpStrategy]
    function: Function
    callees: Mapping[str, Function]
    values: dict[str, Value] = field(default_factory=dict)
    """By global name: the sharded value."""
    reshards: dict[tuple[str, Placed], Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def run(self) -> Function:
        self.names = value_names(self.function)
        inputs = []
        for item in self.function.inputs:
            strategy = self.strategies[self.graph.input_nodes[self.function.name, item.value.name]]
            value = self.values[item.value.name] = _with_layout(item.value, strategy.final_layouts[0])
            inputs.append(Input(value, item.role, item.location))
        for number, op in enumerate(self.function.ops):
            if op.callee:
                self._call(op)
            else:
                self._op(op, self.strategies[self.graph.op_nodes[self.function.name, number]])
        outputs = tuple(replace(o, value=self.values[o.value.name], layout=None) for o in self.function.outputs)
        return Function(self.function.name, tuple(inputs), tuple(self.ops), outputs)

    def _op(self, op: Op, strategy: OpStrategy) -> None:
        operands = [
            self._reshard(self.values[v.name], layout, f"{v.name}.{op.name.rsplit('.', 1)[-1]}", op.location)
            for v, layout in zip(op.operands, strategy.in_layouts, strict=True)
        ]
        if is_annotation(op):
            self.values[op.results[0].name] = operands[0]
            return
        results = []
        for value, out, final in zip(op.results, strategy.out_layouts, strategy.final_layouts, strict=True):
            is_partial = out != final
            name = fresh_name(f"{value.name}.partial", self.names) if is_partial else value.name
            results.append(Value(name, _with_layout(value, out).type))
        self.ops.append(Op(op.name, tuple(operands), tuple(results), op.attrs, op.location))
        for value, result, final in zip(op.results, results, strategy.final_layouts, strict=True):
            self.values[value.name] = result
            if result.name != value.name:
                self.values[value.name] = self._redistribute(result, final, value.name, op.location)

    def _call(self, op: Op) -> None:
        callee = self.callees[op.callee]
        operands = tuple(
            self._reshard(self.values[v.name], item.value.dtensor.placements, f"{v.name}.{op.callee}", op.location)
            for v, item in zip(op.operands, callee.inputs, strict=True)
        )
        results = tuple(
            replace(output.value, name=value.name) for value, output in zip(op.results, callee.outputs, strict=True)
        )
        self.values.update((v.name, v) for v in results)
        self.ops.append(Op(CALL, operands, results, {"callee": callee.name, **op.task}, op.location))

    def _reshard(self, value: Value, target: Placed, name: str, where: str) -> Value:
        """Return `value` in another layout; each layout is made once."""
        if value.dtensor.placements == target:
            return value
        key = (value.name, target)
        if key not in self.reshards:
            self.reshards[key] = self._redistribute(value, target, fresh_name(name, self.names), where)
        return self.reshards[key]

    def _redistribute(self, value: Value, target: Placed, name: str, where: str) -> Value:
        result = Value(name, replace(value.dtensor, placements=target))
        self.ops.append(Op("redistribute", (value,), (result,), {PLACEMENTS: target}, where))
        return result


def _with_layout(value: Value, layout: Placed) -> Value:
    tensor = value.tensor
    return Value(value.name, DTensorType(tensor.shape, tensor.dtype, layout))
