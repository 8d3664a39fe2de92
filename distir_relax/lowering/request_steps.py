"""Distributed programs of steps of several requests, for simulation: the ops of a step of the engine.

Ops that are parallel along the new positions are there once, with the rows of all requests; the others for each
request, with its own sizes (`request_rows`). Where the two meet, rows are joined by a `concat`, and taken apart by a
`split`. Values that ranks compute when they load, or take from a cache for each choice of sizes, are inputs. Requests
of equal sizes run equal ops, which the program has once, with their number (`StepProgram.repeats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from distir_relax.cost.profile import Profile
from distir_relax.executable.lasting_values import fixed_values, sized_values
from distir_relax.executable.request_rows import Rows, row_ops, rows_of
from distir_relax.ir import Attribute, Function, Input, Module, Op, Output, Value, fresh_name, value_names
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.kernels.requests import are_recorded
from distir_relax.layout import assuming
from distir_relax.lowering.project import Project
from distir_relax.lowering.ranked.one_sequence import OneSequence
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table.spmd_inference import infer_placed
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's part of a step: `new` tokens after `past` ones, with outputs for the `last` of them."""

    past: int
    new: int
    last: int

    @property
    def sizes(self) -> dict[str, int]:
        """The values of the program's sizes."""
        return {"past": self.past, "new": self.new, "last": self.last}


@dataclass(frozen=True)
class StepProgram:
    """A step as a module of the distributed stage; `repeats` has how often an op runs, by its first result.

    `is_recorded` is whether a CPU backend records it (`runtime.requests.recorded_steps`): it has one token for each
    request. `requests` is the number of its requests, 0 for a program that is no step of text generation.
    """

    module: Module
    repeats: Mapping[str, int] = field(default_factory=dict)
    is_recorded: bool | None = None
    requests: int = 0

    def simulate(self, profile: Profile) -> Simulation:
        """Simulate the step on a machine. Raises as `simulate_module` does."""
        return simulate_module(
            self.module, profile, repeats=self.repeats, is_recorded=self.is_recorded, requests=self.requests
        )  # fmt: skip


class Runs(IntEnum):
    """How often an op runs, from the least on."""

    AT_LOAD = 0
    FOR_SIZES = 1
    ONCE = 2
    FOR_EACH = 3


class RequestSteps:
    """Steps of a distributed program that continues sequences. `states` maps its states to their next values' outputs.

    `single` is the program of one sequence, and `ranked` those of its ranks. `runs` has how often each op runs, by its
    first result; ops that only rename a value are not in it.
    """

    def __init__(self, module: Module, states: Mapping[str, str]) -> None:
        with assuming(module.guards):
            self.single = OneSequence().run(module)
            self.states = states
            self.runs: dict[str, Runs] = {}
            self.joined: dict[str, Rows] = {}
            self.rows: dict[str, Rows | None] = {}
            self.ranked = Project().run(self.single)
            for name in dict.fromkeys(self.ranked.ranks):
                self._classify(self.ranked.function(name))
        self._symbols = module_symbols(self.single).keys()
        self._specialized: dict[Chunk, Module] = {}

    def program(self, chunks: Mapping[Chunk, int]) -> StepProgram:
        """Return the program of a step in which requests compute `chunks`, each chunk as many requests as it maps to.

        Inputs and outputs with the rows of all requests keep their names; what belongs to the requests of a chunk has
        its number after the name. Raises `DistIRError` for sizes out of bounds.
        """
        return _StepBuilder(self, chunks).build()

    def specialized(self, chunk: Chunk) -> Module:
        """Return the program of one request."""
        if chunk not in self._specialized:
            sizes = {name: size for name, size in chunk.sizes.items() if name in self._symbols}
            self._specialized[chunk] = specialize(self.single, sizes)
        return self._specialized[chunk]

    def _classify(self, function: Function) -> None:
        """Add the ops of a rank: where ranks differ, the one that runs an op most often counts."""
        fixed = fixed_values(function, {i.value.name for i in function.inputs if i.role != "input"})
        sized = sized_values(function, fixed)
        found = row_ops(function, fixed)
        self.joined |= found.joined
        for item in function.inputs:
            self.rows[item.value.name] = rows_of(item.value.tensor)
        for op in function.ops:
            self.rows |= {v.name: rows_of(v.tensor) for v in op.results}
            first = op.results[0].name
            runs = Runs.ONCE if first in found.once else Runs.FOR_EACH
            runs = Runs.AT_LOAD if first in fixed else Runs.FOR_SIZES if first in sized else runs
            self.runs[first] = max(runs, self.runs.get(first, runs))


@dataclass(slots=True)
class _StepBuilder:
    """Builds the program of one step."""

    steps: RequestSteps
    chunks: Mapping[Chunk, int]
    inputs: list[Input] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    whole: dict[str, Value] = field(default_factory=dict)
    """Values that are the same for all requests, or have the rows of all, by their name for one request."""
    parts: dict[str, list[Value]] = field(default_factory=dict)
    """The value of a request of each chunk."""
    renamed: dict[str, str] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    taken: set[str] = field(init=False)
    total: Function = field(init=False)
    each: list[Function] = field(init=False)

    def __post_init__(self) -> None:
        pairs = self.chunks.items()
        total = Chunk(0, sum(n * c.new for c, n in pairs), sum(n * c.last for c, n in pairs))
        self.total = self.steps.specialized(total).main
        self.each = [self.steps.specialized(chunk).main for chunk in self.chunks]
        self.taken = value_names(self.total)

    def build(self) -> StepProgram:
        """Return the program."""
        for number, item in enumerate(self.total.inputs):
            if item.value.name in self.steps.states:
                items = [function.inputs[number] for function in self.each]
                values = [Value(self._fresh(i.value.name, n), i.value.type) for n, i in enumerate(items)]
                self.parts[item.value.name] = values
                self.inputs += [replace(i, value=v) for i, v in zip(items, values, strict=True)]
            else:
                self.whole[item.value.name] = item.value
                self.inputs.append(item)
        for number, op in enumerate(self.total.ops):
            self._add(number, op)
        outputs: list[Output] = []
        for number, output in enumerate(self.total.outputs):
            if output.name in self.steps.states.values():
                of_each = [function.outputs[number] for function in self.each]
                outputs += [
                    replace(o, name=f"{o.name}.{n}", value=self._part(o.value, n)) for n, o in enumerate(of_each)
                ]
            else:
                outputs.append(replace(output, value=self._whole(output.value)))
        used = {v.name for op in self.ops for v in op.operands} | {o.value.name for o in outputs}
        inputs = tuple(i for i in self.inputs if i.role == "input" or i.value.name in used)
        function = Function(self.total.name, inputs, tuple(self.ops), tuple(outputs))
        requests = sum(self.chunks.values())
        is_recorded = are_recorded(requests, ((chunk.new, chunk.last) for chunk in self.chunks))
        module = Module("distributed", (function,), self.steps.single.meshes)
        return StepProgram(module, self.repeats, is_recorded, requests)

    def _add(self, number: int, op: Op) -> None:
        first = op.results[0].name
        runs = self.steps.runs.get(first)
        if runs is None and len(op.operands) > 1:
            runs = Runs.FOR_EACH
        is_number = Trait.SCALAR in lookup(op.name, op.location).traits
        if runs is None:
            self.renamed[first] = op.operands[0].name
        elif runs is Runs.ONCE or (runs is Runs.AT_LOAD and is_number):
            self.ops.append(replace(op, operands=tuple(map(self._whole, op.operands))))
            self.whole |= {v.name: v for v in op.results}
        elif runs is Runs.AT_LOAD:
            self.whole |= {v.name: v for v in op.results}
            self.inputs += [Input(v, "parameter", op.location) for v in op.results]
        else:
            self._add_for_each(number, runs is Runs.FOR_SIZES and not is_number)

    def _add_for_each(self, number: int, is_input: bool) -> None:
        """Add an op for each chunk; with `is_input`, only its results, as inputs."""
        for n, (function, count) in enumerate(zip(self.each, self.chunks.values(), strict=True)):
            op = function.ops[number]
            results = tuple(Value(self._fresh(v.name, n), v.type) for v in op.results)
            if is_input:
                self.inputs += [Input(v, "input", op.location) for v in results]
            else:
                operands = tuple(self._part(v, n) for v in op.operands)
                self.ops.append(replace(op, operands=operands, results=results))
                if count > 1:
                    self.repeats[results[0].name] = count
            for value, result in zip(op.results, results, strict=True):
                self.parts.setdefault(value.name, []).append(result)

    def _whole(self, value: Value) -> Value:
        """Return a value with the rows of all requests, which are joined first."""
        name = self._source(value)
        if name not in self.whole:
            parts, rows = self.parts[name], self.steps.rows[name]
            of_each = [v for v, count in zip(parts, self.chunks.values(), strict=True) for _ in range(count)]
            # A value without rows is the same for all requests.
            self.whole[name] = (
                self._emit("concat", of_each, name, axis=rows[0])[0] if rows and len(of_each) > 1 else parts[0]
            )
        return self.whole[name]

    def _part(self, value: Value, chunk: int) -> Value:
        """Return what a request of a chunk has of a value, which is split first."""
        name = self._source(value)
        if name not in self.parts:
            whole, rows = self.whole[name], self.steps.joined.get(name)
            counts = list(self.chunks.values())
            if rows is None or sum(counts) == 1:
                return whole
            sizes = tuple(c.sizes[rows[1]] for c, count in self.chunks.items() for _ in range(count))
            of_each = self._emit("split", [whole], name, sizes=sizes, axis=rows[0])
            self.parts[name] = [of_each[sum(counts[:n])] for n in range(len(counts))]
        return self.parts[name][chunk]

    def _source(self, value: Value) -> str:
        name = value.name
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def _emit(self, name: str, operands: Sequence[Value], hint: str, **attrs: Attribute) -> tuple[Value, ...]:
        kinds = infer_placed(name, [v.placed for v in operands], attrs, operands[0].placed.devices)
        results = tuple(Value(self._fresh(hint, n), kind) for n, kind in enumerate(kinds))
        self.ops.append(Op(name, tuple(operands), results, attrs))
        return results

    def _fresh(self, name: str, number: int) -> str:
        return fresh_name(f"{name}.{number}", self.taken)
