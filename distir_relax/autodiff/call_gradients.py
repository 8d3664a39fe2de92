"""Differentiation of functions, each once regardless of its number of calls.

``@layer`` becomes ``@layer_forward``, which also returns the values that the backward needs, and a backward in two
slices: ``@layer_backward`` returns the gradients of computed inputs, ``@layer_backward_weights`` those of weights.
Preceding layers wait only for the first, so the second can be scheduled freely, as zero-bubble pipeline schedules do
(Qi et al., Zero Bubble Pipeline Parallelism, 2023).

Values that the backward needs and the forward does not save are recomputed (activation checkpointing). With ``block``,
nothing inside of a function called by the entry is saved: its forward is called again (Chen et al., Training Deep Nets
with Sublinear Memory Cost, 2016). With ``selective``, backwards recompute the results of cheap ops (Korthikanti et al.,
2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from distir_relax.autodiff.backward import BackwardStep, depends_on, gradients, is_differentiable
from distir_relax.cost.roofline import flops
from distir_relax.ir import (
    CALL,
    Attribute,
    Function,
    Input,
    Module,
    Op,
    Output,
    Value,
    callees_first,
    fresh_name,
    required_ops,
)
from distir_relax.ops import Builder, Trait, filled, lookup


@dataclass(frozen=True)
class _Slice:
    """A part of a backward: the function, and the names in the body of its inputs and outputs."""

    kind: str
    function: Function
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]


@dataclass(frozen=True)
class _Vjp:
    """The forward of a function, and the slices of its backward, in order.

    `saved` are the values that the forward returns besides its results, `seeds` the gradients of its results that the
    backward takes (by output number), `grads` the gradients of inputs (by input number); all by name in the body.
    """

    forward: Function
    saved: tuple[Value, ...]
    seeds: Mapping[int, str]
    grads: Mapping[int, str]
    slices: tuple[_Slice, ...]


class Functions:
    """Differentiates the functions of a module; `checkpoint` is none, block, or selective."""

    def __init__(self, module: Module, checkpoint: str = "none") -> None:
        self._checkpoint = checkpoint
        self._functions = {f.name: f for f in module.functions}
        self._names = set(self._functions)
        self._module = module
        self._stages = {op.callee for op in module.main.ops if op.task}
        self._wrt_inputs: dict[str, set[int]] = defaultdict(set)
        self._vjps: dict[str, _Vjp] = {}
        self._by_forward: dict[str, _Vjp] = {}

    def forward(self, ops: Sequence[Op], wrt: Collection[str]) -> tuple[Op, ...]:
        """Return the ops of the entry, with each call that needs gradients of operands replaced by one of the forward.

        Calls of checkpointed blocks are not replaced; `step` calls their forward.
        """
        self._request_gradients(ops, wrt)
        for function in reversed(callees_first(self._module)):
            if function.name in self._wrt_inputs:
                self._request_gradients(function.ops, self._wrt(function).values())
        return self._with_forwards(ops)

    def _request_gradients(self, ops: Sequence[Op], wrt: Collection[str]) -> None:
        """Record the operands that need gradients in some call of each function."""
        active = depends_on(ops, wrt)
        for op in ops:
            indices = {i for i, v in enumerate(op.operands) if v.name in active} if op.callee else ()
            if indices:
                self._wrt_inputs[op.callee].update(indices)

    def _wrt(self, function: Function) -> dict[int, str]:
        indices = ((i, function.inputs[i].value) for i in sorted(self._wrt_inputs[function.name]))
        return {i: value.name for i, value in indices if is_differentiable(value)}

    def _with_forwards(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """Replace the calls in the entry or a stage with calls of forwards, except for checkpointed blocks."""
        forward_ops = self._call_forwards(ops)
        if self._checkpoint != "block":
            return forward_ops
        return tuple(new if op.task else op for op, new in zip(ops, forward_ops, strict=True))

    def _call_forwards(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        names = {v.name for op in ops for v in (*op.operands, *op.results)}
        return tuple(self._call_forward(op, names) if op.callee in self._wrt_inputs else op for op in ops)

    def step(self, g: Builder) -> BackwardStep:
        """Return the backward step of calls, built with `g`."""

        def step(op: Op, grads: tuple[Value | None, ...], indices: frozenset[int]) -> tuple[Value | None, ...]:
            task = {**op.task}
            op, vjp = self._saved_call(g, op)
            inputs = (item.value.name for item in vjp.forward.inputs)
            value_of: dict[str, Value] = dict(zip(inputs, op.operands, strict=True))
            saved = op.results[len(op.results) - len(vjp.saved) :]
            value_of.update(zip((v.name for v in vjp.saved), saved, strict=True))
            for number, name in vjp.seeds.items():
                type_ = op.results[number].tensor
                value_of[name] = grads[number] or filled(g, type_.shape, 0.0, type_.dtype)
            for part in vjp.slices:
                results = tuple(
                    Value(g.fresh(f"{op.results[0].name}.{output.name}"), output.value.type)
                    for output in part.function.outputs
                )
                operands = tuple(value_of[name] for name in part.input_names)
                g.ops.append(
                    Op(CALL, operands, results, {"callee": part.function.name, **_task(task, part.kind)}, op.location)
                )
                value_of.update(zip(part.output_names, results, strict=True))
            return tuple(
                value_of[vjp.grads[i]] if i in indices and i in vjp.grads else None for i in range(len(op.operands))
            )

        return step

    def _saved_call(self, g: Builder, op: Op) -> tuple[Op, _Vjp]:
        """Return the call of a forward that saves values for the backward: `op`, or a recomputation of it."""
        if op.callee in self._by_forward:
            return op, self._by_forward[op.callee]
        vjp = self._vjps[op.callee]
        results = tuple(Value(g.fresh(f"{op.results[0].name}.again"), o.value.type) for o in vjp.forward.outputs)
        recomputed = Op(CALL, op.operands, results, {"callee": vjp.forward.name, **_task(op.task, "F")}, op.location)
        g.ops.append(recomputed)
        return recomputed, vjp

    def used(self) -> tuple[Function, ...]:
        """Return the functions that are called now: not differentiated ones, forwards, and backwards."""
        derived = (f for vjp in self._vjps.values() for f in (vjp.forward, *(part.function for part in vjp.slices)))
        first = next(iter(self._functions))
        return (*(f for name, f in self._functions.items() if name != first), *derived)

    def _call_forward(self, op: Op, names: set[str]) -> Op:
        if op.callee not in self._vjps:
            vjp = self._differentiate(self._functions[op.callee])
            self._vjps[op.callee] = self._by_forward[vjp.forward.name] = vjp
        vjp = self._vjps[op.callee]
        saved = tuple(Value(fresh_name(f"{op.results[0].name}.{v.name}", names), v.type) for v in vjp.saved)
        return replace(op, results=(*op.results, *saved), attrs={"callee": vjp.forward.name, **_task(op.task, "F")})

    def _differentiate(self, function: Function) -> _Vjp:
        wrt = self._wrt(function)
        ops = self._with_forwards(function.ops) if function.name in self._stages else self._call_forwards(function.ops)
        active = depends_on(ops, wrt.values())
        g = Builder.of(replace(function, ops=ops))
        seeds = {
            number: g.input(f"{output.name}.grad", output.value.tensor)
            for number, output in enumerate(function.outputs)
            if output.value.name in active
        }
        seed_of: dict[str, Value] = {}
        for number, seed in seeds.items():
            name = function.outputs[number].value.name
            seed_of[name] = g.emit("add", seed_of[name], seed) if name in seed_of else seed
        roots = self._roots(function, ops, wrt)
        grads = gradients(g, ops, seed_of, [*wrt.values(), *roots], self.step(g))
        backward = tuple(g.ops[len(ops) :])
        repeats = _repeating_ops(ops)
        should_recompute = _has_few_flops if self._checkpoint == "selective" else lambda op: _is_free(op, repeats)
        backward = (*_recomputed_ops(ops, _names_used(backward), should_recompute), *backward)
        recomputed = {v.name for op in backward for v in op.results}
        grad_names = {i: grads[name].name for i, name in wrt.items() if name in grads}
        computed = [name for i, name in grad_names.items() if function.inputs[i].role == "input"]
        input_ops = required_ops(backward, [*computed, *(grads[name].name for name in roots if name in grads)])
        first_results = {v.name for op in input_ops for v in op.results}
        weight_ops = [
            op for op in required_ops(backward, grad_names.values()) if op.results[0].name not in first_results
        ]
        used_later = {v.name for op in weight_ops for v in op.operands}
        values = {v.name: v for op in ops for v in op.results}
        used_names = dict.fromkeys(_names_used(input_ops, weight_ops))
        saved = tuple(values[name] for name in used_names if name in values and name not in recomputed)
        forward = Function(
            fresh_name(f"{function.name}_forward", self._names),
            function.inputs,
            ops,
            (*function.outputs, *(Output(v.name, v) for v in saved)),
        )
        carried = [v.name for op in input_ops for v in op.results if v.name in used_later]
        slices = []
        for kind, end, part_ops, output_names in (
            ("I", "backward", input_ops, [*grad_names.values(), *carried]),
            ("W", "backward_weights", weight_ops, [*grad_names.values()]),
        ):
            defined = {v.name for op in part_ops for v in op.results}
            defined_outputs = [n for n in dict.fromkeys(output_names) if n in defined]
            if part_ops:
                slices.append(self._slice(kind, f"{function.name}_{end}", g, part_ops, defined_outputs))
        return _Vjp(forward, saved, {i: v.name for i, v in seeds.items()}, grad_names, tuple(slices))

    def _roots(self, function: Function, ops: Sequence[Op], wrt: Mapping[int, str]) -> list[str]:
        """Return the first activations of a stage whose inputs have no gradients: values computed from weights.

        Their gradients count as its gradients of inputs, so that all pipeline stages have the same structure.
        """
        weights = {name for i, name in wrt.items() if function.inputs[i].role != "input"}
        if function.name not in self._stages or len(weights) < len(wrt):
            return []
        active = depends_on(ops, weights)
        roots = []
        for op in ops:
            operands = [v.name for v in op.operands if v.name in active]
            if operands and all(name in weights for name in operands):
                roots += [v.name for v in op.results if v.name in active]
        return roots

    def _slice(self, kind: str, name: str, g: Builder, ops: Sequence[Op], output_names: Sequence[str]) -> _Slice:
        defined = {v.name: v for op in ops for v in op.results}
        input_of = {item.value.name: item for item in g.inputs}
        values = {v.name: v for op in ops for v in op.operands}
        input_names = [n for n in dict.fromkeys(v.name for op in ops for v in op.operands) if n not in defined]
        inputs = tuple(input_of.get(n) or Input(values[n]) for n in input_names)
        outputs = tuple(Output(n, defined[n]) for n in output_names)
        function = Function(fresh_name(name, self._names), inputs, tuple(ops), outputs)
        return _Slice(kind, function, tuple(input_names), tuple(output_names))


def _task(task: Mapping[str, Attribute], kind: str) -> dict[str, Attribute]:
    """Return the attributes of a task with this `kind`; empty for a call that is not a task."""
    return {**task, "kind": kind} if task else {}


def _names_used(*parts: Iterable[Op]) -> list[str]:
    return [v.name for part in parts for op in part for v in op.operands]


MAX_RECOMPUTE_FLOPS = 32.0
"""Maximum operations per element of the results of an op that is recomputed rather than saved."""


def _recomputed_ops(ops: Sequence[Op], names: Iterable[str], should_recompute: Callable[[Op], bool]) -> tuple[Op, ...]:
    """Return the cheap ops that `names` depend on, up to results of other ops, in order: these are recomputed."""
    producer_of = {v.name: op for op in ops for v in op.results}
    recomputed: set[int] = set()
    worklist = [name for name in names if name in producer_of]
    while worklist:
        op = producer_of[worklist.pop()]
        if id(op) not in recomputed and not op.callee and should_recompute(op):
            recomputed.add(id(op))
            worklist += [v.name for v in op.operands if v.name in producer_of]
    return tuple(op for op in ops if id(op) in recomputed)


def _is_free(op: Op, repeats: Set[str]) -> bool:
    return not op.operands or op.results[0].name in repeats


def _repeating_ops(ops: Sequence[Op]) -> set[str]:
    """Return the results of ops that only move elements, from fewer: keys that are repeated for heads of queries."""
    least: dict[str, int] = {}
    found: set[str] = set()
    for op in ops:
        if op.callee or len(op.operands) != 1 or Trait.MOVES not in lookup(op.name, op.location).traits:
            continue
        source, result = op.operands[0], op.results[0]
        elements = result.tensor.typical.elements
        least[result.name] = min(elements, least.get(source.name, source.tensor.typical.elements))
        if least[result.name] < elements:
            found.add(result.name)
    return found


def _has_few_flops(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    elements = max(sum(t.typical.elements for t in results), sum(t.typical.elements for t in operands))
    return entry.cost.product is None and flops(entry, operands, op.attrs, results) <= MAX_RECOMPUTE_FLOPS * elements
