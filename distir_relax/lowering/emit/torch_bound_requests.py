"""Torch code that binds a step of several requests with one new token each (`kernels.bound_step`).

Such a step takes so little time that Python and allocations between ops are a good part of it. `bind` is run once for
each number of requests: then the step is a list of native calls with prepared arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.ir import Op, Value
from distir_relax.lowering.emit.torch_bound import Statement, freed, only_computes, step_code
from distir_relax.lowering.emit.torch_function import TorchFunction
from distir_relax.lowering.ranked.request_rows import RowOps, row_ops, rows_of
from distir_relax.ops import cached_states, torch_cached, torch_kind


def bind_text(emitted: TorchFunction, states: Mapping[str, str]) -> str:
    """Return the function ``bind(comm, weights, step, attending, new, *inputs) -> tuple`` of outputs.

    `emitted` is the code of a program after `AllPositions`; `states` are as for `to_torch_requests`. The text is empty
    if some op has to run for each request.
    """
    try:
        return _Binding(emitted, states).text()
    except _RunsForEach:
        return ""


class _RunsForEach(Exception):
    """An op that several requests cannot share."""


class _Binding:
    def __init__(self, emitted: TorchFunction, states: Mapping[str, str]) -> None:
        self.emitted = emitted
        function = emitted.function
        self.rows: RowOps = row_ops(function, emitted.fixed)
        self.sized = {name: number for number, name in enumerate(emitted.sized_results)}
        self.inputs = [i.value for i in function.inputs if i.value.name not in {*emitted.stored, *states}]
        self.outputs = [o.value for o in function.outputs if o.name not in states.values()]
        absent = emitted.fixed | emitted.sized
        self.ops = [op for op in function.ops if op.results[0].name not in absent and not emitted.is_number(op)]
        self.variables = {v.name for v in self.inputs}
        computed = {v.name for op in self.ops if not cached_states(op) for v in op.results}
        if any(o.value.name in computed for o in function.outputs if o.name in states.values()):
            raise _RunsForEach

    def text(self) -> str:
        """Return the function."""
        statements = [statement for op in self.ops for statement in self._statements(op)]
        if any(v.name not in self.variables for v in self.outputs):
            raise _RunsForEach
        names = self.emitted.names
        ends = self.variables - {v.name for v in (*self.inputs, *self.outputs)}
        arguments = ["comm", "weights", "step", "attending", "new", *(names[v.name] for v in self.inputs)]
        results = [names[v.name] for v in self.outputs]
        return (
            f"\n\ndef bind({', '.join(arguments)}):\n"
            + ("" if self.emitted.clocked is None else "    step.do(lambda: clock(-1))\n")
            + "".join(f"    {line}\n" for line in freed(self.emitted, statements, ends))
            + f"    return ({', '.join(results)}{',' * (len(results) == 1)})\n"
        )

    def _statements(self, op: Op) -> list[Statement]:
        """Return the statements of an op, with those of values that depend on sizes if it is the first to read them."""
        states = cached_states(op)
        if not states and (op.results[0].name not in self.rows.once or not only_computes(self.emitted, op)):
            raise _RunsForEach
        masks = self._masks(op) if states else {}
        operands = [value for number, value in enumerate(op.operands) if number not in states]
        reads = [v for v in operands if v.name not in masks and v.name not in self.emitted.numbers]
        statements = []
        for value in reads:
            if value.name in self.sized and value.name not in self.variables:
                statements.append(Statement([self._of_sizes(value)], ()))
                self.variables.add(value.name)
            elif value.name not in self.variables and value.name not in self.emitted.fixed:
                raise _RunsForEach
        code = self._cached(op, masks) if states else step_code(self.emitted, op)
        results = op.results[:1] if states else op.results
        self.variables |= {v.name for v in results}
        clocks = [f"step.do(lambda: {line})" for line in self.emitted.clock_lines(op)]
        return [*statements, Statement([self.emitted.line(op, code, results), *clocks], reads)]

    def _masks(self, op: Op) -> dict[str, str]:
        """Return the number among the values that depend on sizes, as text, of each operand of a request's own."""
        own = [value.name for value in op.operands[cached_states(op)[-1] + 1 :]]
        if not self.sized.keys() >= set(own):
            raise _RunsForEach
        return {name: str(self.sized[name]) for name in own}

    def _of_sizes(self, value: Value) -> str:
        rows = None if value.name in self.rows.shared else rows_of(value.tensor)
        kind = torch_kind(value.tensor)
        name = self.emitted.names[value.name]
        return f"{name} = attending.of_sizes({self.sized[value.name]}, {rows[0] if rows else None}, {kind})"

    def _cached(self, op: Op, masks: Mapping[str, str]) -> str:
        return torch_cached(op, [masks.get(v.name) or self.emitted.names[v.name] for v in op.operands])
