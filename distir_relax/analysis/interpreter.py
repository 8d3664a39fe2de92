"""The abstract interpreter: runs a program of any stage, line by line, over the values of a domain.

Algorithm 1 of the DistIR paper. The domain says what a value is and what an op does with it: a type, a tensor, a
tensor for each device, what is known of one, or a handle with which time and memory are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, Op, verify_no_recursion

A = TypeVar("A")


class Domain(Generic[A]):
    """What values are and what ops do with them. A domain overrides `apply`, and the others where it needs to."""

    def apply(self, op: Op, operands: Sequence[A]) -> Sequence[A]:
        """What `op` gives; it is not a call."""
        raise NotImplementedError

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[A],
        last: Sequence[bool],
        run: Callable[[Sequence[A]], list[A]],
    ) -> list[A]:
        """What a call gives. `last` tells which operands are used no more after it.

        `run` interprets the callee; a domain that knows its results already need not run it.
        """
        return run(operands)

    def release(self, element: A) -> None:
        """A value is used no more in its function."""


@dataclass(slots=True)
class Steps:
    """Ops in order, their operands and results as numbers of values, of which there are `values`, inputs first."""

    ops: list[Op]
    operands: list[list[int]]
    results: list[list[int]]
    values: int
    inputs: int
    outputs: list[int]


def steps_of(function: Function) -> Steps:
    """The steps of a function. Raises `VerificationError` where a value is used before it is made."""
    place = {item.value.name: i for i, item in enumerate(function.inputs)}
    count = len(function.inputs)
    found = Steps(list(function.ops), [], [], 0, count, [])
    for op in function.ops:
        try:
            found.operands.append([place[v.name] for v in op.operands])
        except KeyError as missing:
            raise VerificationError(f"%{missing.args[0]} is used before it is defined", op.location) from None
        found.results.append(list(range(count, count + len(op.results))))
        for value in op.results:
            place[value.name] = count
            count += 1
    found.values, found.outputs = count, [place[o.value.name] for o in function.outputs]
    return found


@dataclass(slots=True)
class Step:
    """What an op takes and gives, as slots of a list, and which of these are `dead` behind it.

    Of a call `callee` names the function, and `last` says which operands are used no more; an op has neither.
    """

    operands: list[int]
    results: list[int]
    dead: list[int]
    callee: str
    last: list[bool]


@dataclass(slots=True)
class Code:
    """Steps with values as slots of a list, and what is used for the last time where."""

    steps: list[Step]
    slots: int
    unused: list[int]
    outputs: list[int]


def code_of(given: Steps) -> Code:
    """Find where values are used for the last time."""
    seen = set(given.outputs)
    steps: list[Step] = []
    for op, operands, results in zip(
        reversed(given.ops), reversed(given.operands), reversed(given.results), strict=True
    ):
        # Most operands of a call are weights that all calls of a function have, long seen.
        new = {*results, *operands} - seen
        gone = [i for i in dict.fromkeys((*results, *operands)) if i in new] if new else []
        seen |= new
        callee = op.callee
        steps.append(Step(operands, results, gone, callee, list(map(new.__contains__, operands)) if callee else []))
    steps.reverse()
    return Code(steps, given.values, [i for i in range(given.inputs) if i not in seen], given.outputs)


@dataclass
class Interpreter(Generic[A]):
    """Interprets the functions of `module` over `domain`. Raises `VerificationError` when one calls itself.

    `codes` are of functions by name: interpreters of modules that are the same but for types may share them.
    """

    module: Module
    domain: Domain[A]
    codes: dict[str, Code] = field(default_factory=dict)
    _functions: dict[str, Function] = field(init=False)

    def __post_init__(self) -> None:
        if not self.codes:
            verify_no_recursion(self.module)
        self._functions = {f.name: f for f in self.module.functions}

    def run(self, inputs: Sequence[A], function: Function | None = None) -> list[A]:
        """What a function gives, its entry function by default, for these inputs in order.

        Raises `VerificationError` for another number of inputs, and what the domain raises.
        """
        chosen = function or self.module.main
        if len(inputs) != len(chosen.inputs):
            raise VerificationError(f"@{chosen.name} takes {len(chosen.inputs)} inputs, found {len(inputs)}")
        code = self.codes.get(chosen.name)
        if code is None:
            code = self.codes[chosen.name] = code_of(steps_of(chosen))
        return self._run(code, chosen.ops, inputs)

    def enter(self, callee: str) -> tuple[Function, Callable[[Sequence[A]], list[A]]]:
        """The function that a call names, and what runs it."""
        function = self._functions[callee]
        return function, partial(self._enter, function)

    def _run(self, code: Code, ops: Sequence[Op], inputs: Sequence[A]) -> list[A]:
        domain = self.domain
        apply, release = domain.apply, domain.release
        slots: list[A | None] = [*inputs, *([None] * (code.slots - len(inputs)))]
        for slot in code.unused:
            release(slots[slot])  # type: ignore[arg-type]
        results: Sequence[A]
        for op, step in zip(ops, code.steps, strict=True):
            operands: list[A] = [slots[i] for i in step.operands]  # type: ignore[misc]
            if step.callee:
                callee, run = self.enter(step.callee)
                results = domain.call(op, callee, operands, step.last, run)
            else:
                results = apply(op, operands)
            for i, result in zip(step.results, results, strict=True):
                slots[i] = result
            for i in step.dead:
                release(slots[i])  # type: ignore[arg-type]
                slots[i] = None
        return [slots[i] for i in code.outputs]  # type: ignore[misc]

    def _enter(self, callee: Function, inputs: Sequence[A]) -> list[A]:
        return self.run(inputs, callee)
