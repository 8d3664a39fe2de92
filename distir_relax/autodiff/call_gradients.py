"""Functions differentiated, each once however often it is called.

``@layer`` becomes ``@layer_forward``, which gives besides its results the values that the backward needs; and the
backward in two slices: ``@layer_backward`` gives the gradients of what is computed, ``@layer_backward_weights`` those
of the weights. The first is what the layers before it wait for, the second may come at any time: what zero-bubble
pipeline schedules need (Qi et al., Zero Bubble Pipeline Parallelism, 2023).

What the backward needs and the forward does not keep is computed again. With ``block``, nothing inside of a function
that the entry calls is kept: its forward is called again (Chen et al., Training Deep Nets with Sublinear Memory Cost,
2016). With ``selective``, backwards begin with the ops that cost little (Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distir_relax.autodiff.backward import StepOf, depends_on, gradients, is_differentiable
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
    called_first,
    fresh_name,
    needed_ops,
)
from distir_relax.ops import Builder, filled, lookup


@dataclass(frozen=True)
class _Slice:
    """A part of a backward: the function, and what its inputs and outputs are, by their names in the body."""

    kind: str
    function: Function
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class _Differentiated:
    """A function's forward, and its backward's slices in their order.

    `kept` are the values that the forward gives besides its results, `seeds` the gradients of its results that the
    backward takes (by output number), `grads` the gradients of inputs (by input number); all by name in the body.
    """

    forward: Function
    kept: tuple[Value, ...]
    seeds: Mapping[int, str]
    grads: Mapping[int, str]
    slices: tuple[_Slice, ...]


class Functions:
    """The functions of a module on the way to being differentiated; `checkpoint` is none, block, or selective."""

    def __init__(self, module: Module, checkpoint: str = "none") -> None:
        self._checkpoint = checkpoint
        self._functions = {f.name: f for f in module.functions}
        self._taken = set(self._functions)
        self._module = module
        self._stages = {op.callee for op in module.main.ops if op.task}
        self._asked: dict[str, set[int]] = defaultdict(set)
        self._found: dict[str, _Differentiated] = {}
        self._by_forward: dict[str, _Differentiated] = {}

    def forward(self, ops: Sequence[Op], wanted: Collection[str]) -> tuple[Op, ...]:
        """The ops of the entry with each call, on whose operands gradients are asked for, as one of the forward.

        Where blocks are checkpointed they stay, and `step` calls the forward.
        """
        self._ask(ops, wanted)
        for function in reversed(called_first(self._module)):
            if function.name in self._asked:
                self._ask(function.ops, self._wanted(function).values())
        return self._outer(ops)

    def _ask(self, ops: Sequence[Op], wanted: Collection[str]) -> None:
        """Note of which operands the gradients are asked for, in some call of each function."""
        active = depends_on(ops, wanted)
        for op in ops:
            asked = {i for i, v in enumerate(op.operands) if v.name in active} if op.callee else ()
            if asked:
                self._asked[op.callee].update(asked)

    def _wanted(self, function: Function) -> dict[int, str]:
        asked = ((i, function.inputs[i].value) for i in sorted(self._asked[function.name]))
        return {i: value.name for i, value in asked if is_differentiable(value)}

    def _outer(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The ops of the entry, or of a stage, with calls of forwards, but for blocks that are checkpointed."""
        found = self._forward(ops)
        if self._checkpoint != "block":
            return found
        return tuple(new if op.task else op for op, new in zip(ops, found, strict=True))

    def _forward(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        taken = {v.name for op in ops for v in (*op.operands, *op.results)}
        return tuple(self._call_forward(op, taken) if op.callee in self._asked else op for op in ops)

    def step(self, g: Builder) -> StepOf:
        """How the step of such a call is written with `g`."""

        def step(op: Op, grads: tuple[Value | None, ...], asked: frozenset[int]) -> tuple[Value | None, ...]:
            task = {**op.task}
            op, one = self._kept(g, op)
            inputs = (item.value.name for item in one.forward.inputs)
            known: dict[str, Value] = dict(zip(inputs, op.operands, strict=True))
            kept = op.results[len(op.results) - len(one.kept) :]
            known.update(zip((v.name for v in one.kept), kept, strict=True))
            for number, name in one.seeds.items():
                kind = op.results[number].tensor
                known[name] = grads[number] or filled(g, kind.shape, 0.0, kind.dtype)
            for part in one.slices:
                results = tuple(
                    Value(g.fresh(f"{op.results[0].name}.{output.name}"), output.value.type)
                    for output in part.function.outputs
                )
                operands = tuple(known[name] for name in part.takes)
                g.ops.append(
                    Op(CALL, operands, results, {"callee": part.function.name, **_task(task, part.kind)}, op.location)
                )
                known.update(zip(part.gives, results, strict=True))
            return tuple(
                known[one.grads[i]] if i in asked and i in one.grads else None for i in range(len(op.operands))
            )

        return step

    def _kept(self, g: Builder, op: Op) -> tuple[Op, _Differentiated]:
        """The call of a forward that kept what the backward needs: `op`, or it called again."""
        if op.callee in self._by_forward:
            return op, self._by_forward[op.callee]
        one = self._found[op.callee]
        results = tuple(Value(g.fresh(f"{op.results[0].name}.again"), o.value.type) for o in one.forward.outputs)
        again = Op(CALL, op.operands, results, {"callee": one.forward.name, **_task(op.task, "F")}, op.location)
        g.ops.append(again)
        return again, one

    def used(self) -> tuple[Function, ...]:
        """The functions that calls name now: those that are not differentiated, forwards, and backwards."""
        made = (f for one in self._found.values() for f in (one.forward, *(part.function for part in one.slices)))
        first = next(iter(self._functions))
        return (*(f for name, f in self._functions.items() if name != first), *made)

    def _call_forward(self, op: Op, taken: set[str]) -> Op:
        if op.callee not in self._found:
            one = self._differentiate(self._functions[op.callee])
            self._found[op.callee] = self._by_forward[one.forward.name] = one
        one = self._found[op.callee]
        kept = tuple(Value(fresh_name(f"{op.results[0].name}.{v.name}", taken), v.type) for v in one.kept)
        return replace(op, results=(*op.results, *kept), attrs={"callee": one.forward.name, **_task(op.task, "F")})

    def _differentiate(self, function: Function) -> _Differentiated:
        wanted = self._wanted(function)
        ops = self._outer(function.ops) if function.name in self._stages else self._forward(function.ops)
        reached = depends_on(ops, wanted.values())
        g = Builder.of(replace(function, ops=ops))
        seeds = {
            number: g.input(f"{output.name}.grad", output.value.tensor)
            for number, output in enumerate(function.outputs)
            if output.value.name in reached
        }
        given: dict[str, Value] = {}
        for number, seed in seeds.items():
            name = function.outputs[number].value.name
            given[name] = g.emit("add", given[name], seed) if name in given else seed
        roots = self._roots(function, ops, wanted)
        grads = gradients(g, ops, given, [*wanted.values(), *roots], self.step(g))
        backward = tuple(g.ops[len(ops) :])
        is_cheap = _is_cheap if self._checkpoint == "selective" else _is_free
        backward = (*_made_again(ops, _names_used(backward), is_cheap), *backward)
        again = {v.name for op in backward for v in op.results}
        found = {i: grads[name].name for i, name in wanted.items() if name in grads}
        computed = [name for i, name in found.items() if function.inputs[i].role == "input"]
        first = needed_ops(backward, [*computed, *(grads[name].name for name in roots if name in grads)])
        made_first = {v.name for op in first for v in op.results}
        rest = [op for op in needed_ops(backward, found.values()) if op.results[0].name not in made_first]
        used_later = {v.name for op in rest for v in op.operands}
        made = {v.name: v for op in ops for v in op.results}
        used = dict.fromkeys(_names_used(first, rest))
        kept = tuple(made[name] for name in used if name in made and name not in again)
        forward = Function(
            fresh_name(f"{function.name}_forward", self._taken),
            function.inputs,
            ops,
            (*function.outputs, *(Output(v.name, v) for v in kept)),
        )
        carried = [v.name for op in first for v in op.results if v.name in used_later]
        slices = []
        for kind, end, part, gives in (
            ("I", "backward", first, [*found.values(), *carried]),
            ("W", "backward_weights", rest, [*found.values()]),
        ):
            made_here = {v.name for op in part for v in op.results}
            given_here = [n for n in dict.fromkeys(gives) if n in made_here]
            if part:
                slices.append(self._slice(kind, f"{function.name}_{end}", g, part, given_here))
        return _Differentiated(forward, kept, {i: v.name for i, v in seeds.items()}, found, tuple(slices))

    def _roots(self, function: Function, ops: Sequence[Op], wanted: Mapping[int, str]) -> list[str]:
        """Where activations begin in a stage whose inputs have no gradients: what is made of its weights.

        Their gradients are its gradients of inputs: all stages of a pipeline then do alike.
        """
        weights = {name for i, name in wanted.items() if function.inputs[i].role != "input"}
        if function.name not in self._stages or len(weights) < len(wanted):
            return []
        active = depends_on(ops, weights)
        roots = []
        for op in ops:
            operands = [v.name for v in op.operands if v.name in active]
            if operands and all(name in weights for name in operands):
                roots += [v.name for v in op.results if v.name in active]
        return roots

    def _slice(self, kind: str, name: str, g: Builder, ops: Sequence[Op], gives: Sequence[str]) -> _Slice:
        made = {v.name: v for op in ops for v in op.results}
        known = {item.value.name: item for item in g.inputs}
        values = {v.name: v for op in ops for v in op.operands}
        takes = [n for n in dict.fromkeys(v.name for op in ops for v in op.operands) if n not in made]
        inputs = tuple(known.get(n) or Input(values[n]) for n in takes)
        outputs = tuple(Output(n, made[n]) for n in gives)
        function = Function(fresh_name(name, self._taken), inputs, tuple(ops), outputs)
        return _Slice(kind, function, tuple(takes), tuple(gives))


def _task(task: Mapping[str, Attribute], kind: str) -> dict[str, Attribute]:
    """The attributes of a task that is of this `kind`; of a call that is none, none."""
    return {**task, "kind": kind} if task else {}


def _names_used(*parts: Iterable[Op]) -> list[str]:
    return [v.name for part in parts for op in part for v in op.operands]


CHEAP = 32.0
"""Operations for each element of its results, up to which an op is computed again rather than kept."""


def _made_again(ops: Sequence[Op], names: Iterable[str], is_cheap: Callable[[Op], bool]) -> tuple[Op, ...]:
    """The ops that make what is called `names` again from what is dear to compute; in order."""
    made = {v.name: op for op in ops for v in op.results}
    found: set[int] = set()
    waiting = [name for name in names if name in made]
    while waiting:
        op = made[waiting.pop()]
        if id(op) not in found and not op.callee and is_cheap(op):
            found.add(id(op))
            waiting += [v.name for v in op.operands if v.name in made]
    return tuple(op for op in ops if id(op) in found)


def _is_free(op: Op) -> bool:
    return not op.operands


def _is_cheap(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    elements = max(sum(t.elements for t in results), sum(t.elements for t in operands))
    return entry.cost.product is None and flops(entry, operands, op.attrs, results) <= CHEAP * elements
