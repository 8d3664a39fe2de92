"""Steps of several requests, for simulation: what the engine runs, for requests of given sizes.

A program of all devices is divided as those of its ranks: what runs when they load, for a choice of sizes, once in a
step, and for each request (`executable.BatchRequests`). Requests of equal sizes run equal ops, which the program of a
step has once, with their number (`StepProgram.repeats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.cost.profile import Profile
from distir_relax.executable.batch_requests import BatchRequests, is_for_each
from distir_relax.executable.hoist import Hoist
from distir_relax.ir import EACH, Attribute, Function, Input, Module, Op, Output, Value, fresh_name, value_names
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.kernels.requests import are_recorded
from distir_relax.layout import assuming
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
    """A step as a program of all devices; `repeats` has how often an op runs, by its first result.

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


class RequestSteps:
    """Steps of a distributed program of one sequence (`lowering.OneSequence`), which continues it.

    `states` maps its states to their next values' outputs. CPUs have `packed` weights.
    """

    def __init__(self, single: Module, states: Mapping[str, str], packed: bool = True) -> None:
        self.single, self.states = single, states
        with assuming(single.guards):
            self.batched = BatchRequests(states).run(Hoist(pack=packed).run(single))
        self._symbols = module_symbols(self.batched).keys()
        self._specialized: dict[Chunk, dict[str, Function]] = {}

    def program(self, chunks: Mapping[Chunk, int]) -> StepProgram:
        """Return the program of a step in which requests compute `chunks`, each chunk as many requests as it maps to.

        Inputs and outputs with the rows of all requests keep their names; what belongs to the requests of a chunk has
        its number after the name. Raises `DistIRError` for sizes out of bounds.
        """
        pairs = chunks.items()
        total = Chunk(0, sum(n * c.new for c, n in pairs), sum(n * c.last for c, n in pairs))
        builder = _StepBuilder(chunks, self.functions(total), [self.functions(chunk) for chunk in chunks])
        main = builder.build(self.batched.main)
        others = (f for f in self.batched.functions[1:] if f.name not in builder.called)
        requests = sum(chunks.values())
        is_recorded = are_recorded(requests, ((chunk.new, chunk.last) for chunk in chunks))
        module = replace(self.batched, functions=(main, *others), records=())
        return StepProgram(module, builder.repeats, is_recorded, requests)

    def functions(self, chunk: Chunk) -> dict[str, Function]:
        """Return the functions of a step for the sizes of one request, by name."""
        if chunk not in self._specialized:
            sizes = {name: size for name, size in chunk.sizes.items() if name in self._symbols}
            self._specialized[chunk] = {f.name: f for f in specialize(self.batched, sizes).functions}
        return self._specialized[chunk]


@dataclass(slots=True)
class _StepBuilder:
    """Builds the program of one step, from functions with the sizes of all requests, and of one of each chunk."""

    chunks: Mapping[Chunk, int]
    total: Mapping[str, Function]
    each: Sequence[Mapping[str, Function]]
    inputs: list[Input] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    values: dict[str, list[Value]] = field(default_factory=dict)
    """The value of a request of each chunk, or of all, by the name in the step for any requests."""
    repeats: dict[str, int] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    """The functions that are called for each request, whose ops are in the step."""
    taken: set[str] = field(default_factory=set)

    def build(self, main: Function) -> Function:
        """Return the entry of the step."""
        total, counts = self.total[main.name], list(self.chunks.values())
        mains = [functions[main.name] for functions in self.each]
        self.taken = value_names(total)
        for number, item in enumerate(total.inputs):
            is_of_each = item.value.local.form == EACH
            items = [function.inputs[number] for function in mains] if is_of_each else [item]
            self.inputs += self._named(items) if is_of_each else items
            self.values[item.value.name] = [i.value for i in self.inputs[-len(items) :]]
        for number, op in enumerate(total.ops):
            if is_for_each(op):
                self._add_call(op, [function.ops[number] for function in mains])
            elif Trait.FOR_EACH in lookup(op.name, op.location).traits:
                self.values[op.results[0].name] = self._converted(op, counts)
            else:
                self.ops.append(replace(op, operands=tuple(self.values[v.name][0] for v in op.operands)))
                self.values |= {v.name: [v] for v in op.results}
        outputs: list[Output] = []
        for output in total.outputs:
            found = self.values[output.value.name]
            if output.value.local.form == EACH:
                outputs += [replace(output, name=f"{output.name}.{n}", value=v) for n, v in enumerate(found)]
            else:
                outputs.append(replace(output, value=found[0]))
        return Function(main.name, tuple(self.inputs), tuple(self.ops), tuple(outputs))

    def _add_call(self, op: Op, calls: Sequence[Op]) -> None:
        """Add the ops of a function that is called for each request, for a request of each chunk."""
        self.called.add(op.callee)
        results: list[list[Value]] = []
        for n, (call, count) in enumerate(zip(calls, self.chunks.values(), strict=True)):
            function = self.each[n][op.callee]
            pairs = zip(function.inputs, call.operands, strict=True)
            inner = {item.value.name: self._one(operand, n) for item, operand in pairs}
            for step in function.ops:
                made = tuple(replace(v, name=fresh_name(f"{v.name}.{n}", self.taken)) for v in step.results)
                self.ops.append(replace(step, operands=tuple(inner[v.name] for v in step.operands), results=made))
                inner |= {v.name: new for v, new in zip(step.results, made, strict=True)}
                if count > 1:
                    self.repeats[made[0].name] = count
            results.append([inner[output.value.name] for output in function.outputs])
        self.values |= {v.name: list(found) for v, found in zip(op.results, zip(*results, strict=True), strict=True)}

    def _one(self, value: Value, chunk: int) -> Value:
        found = self.values[value.name]
        return found[chunk] if len(found) > 1 else found[0]

    def _converted(self, op: Op, counts: Sequence[int]) -> list[Value]:
        """Return the result of an op between the rows of all requests and a tensor of each."""
        operand, axis = self.values[op.operands[0].name], op.attrs.get("axis")
        if axis is None or sum(counts) == 1:
            return operand[:1] if op.results[0].local.form != EACH else operand * len(counts)
        if op.results[0].local.form == EACH:
            lengths = [chunk.sizes[str(op.attrs["size"])] for chunk in self.chunks]
            sizes = tuple(n for n, count in zip(lengths, counts, strict=True) for _ in range(count))
            split = self._emit("split", operand, op.results[0], sizes=sizes, axis=axis)
            return [split[sum(counts[:n])] for n in range(len(counts))]
        parts = [v for v, count in zip(operand, counts, strict=True) for _ in range(count)]
        return list(self._emit("concat", parts, op.results[0], axis=axis))

    def _named(self, items: Sequence[Input]) -> list[Input]:
        """Return the inputs of each chunk, with its number after their names."""
        names = [fresh_name(f"{item.value.name}.{n}", self.taken) for n, item in enumerate(items)]
        return [
            replace(item, value=Value(name, item.value.placed.plain)) for name, item in zip(names, items, strict=True)
        ]

    def _emit(self, name: str, operands: Sequence[Value], like: Value, **attrs: Attribute) -> tuple[Value, ...]:
        kinds = infer_placed(name, [v.placed for v in operands], attrs, operands[0].placed.devices)
        results = tuple(Value(fresh_name(f"{like.name}.{n}", self.taken), kind) for n, kind in enumerate(kinds))
        self.ops.append(Op(name, tuple(operands), results, attrs))
        return results
