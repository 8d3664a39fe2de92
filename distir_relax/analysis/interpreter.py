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
from distir_relax.ir import Function, Module, Op, Value, verify_no_recursion

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

    def release(self, value: Value, element: A) -> None:
        """`value` is used no more in its function."""


@dataclass(slots=True)
class Steps:
    """Ops in order, their operands and results as numbers of values. `values` has each value, inputs first."""

    ops: list[Op]
    operands: list[list[int]]
    results: list[list[int]]
    values: list[Value]
    inputs: int
    outputs: list[int]


def steps_of(function: Function) -> Steps:
    """The steps of a function. Raises `VerificationError` where a value is used before it is made."""
    values = [item.value for item in function.inputs]
    place = {value.name: i for i, value in enumerate(values)}
    found = Steps(list(function.ops), [], [], values, len(values), [])
    for op in function.ops:
        try:
            found.operands.append([place[v.name] for v in op.operands])
        except KeyError as missing:
            raise VerificationError(f"%{missing.args[0]} is used before it is defined", op.location) from None
        found.results.append(list(range(len(values), len(values) + len(op.results))))
        for value in op.results:
            place[value.name] = len(values)
            values.append(value)
    found.outputs = [place[o.value.name] for o in function.outputs]
    return found


@dataclass(slots=True)
class _Step:
    op: Op
    operands: list[int]
    results: list[int]
    dead: list[tuple[Value, int]]
    callee: Function | None
    last: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class _Code:
    """A function with values as slots of a list, and what is used for the last time where."""

    steps: list[_Step]
    slots: int
    unused: list[tuple[Value, int]]
    outputs: list[int]


@dataclass
class Interpreter(Generic[A]):
    """Interprets the functions of `module` over `domain`. Raises `VerificationError` when one calls itself."""

    module: Module
    domain: Domain[A]
    _codes: dict[str, _Code] = field(default_factory=dict)

    def __post_init__(self) -> None:
        verify_no_recursion(self.module)

    def run(self, inputs: Sequence[A], function: Function | None = None) -> list[A]:
        """What a function gives, its entry function by default, for these inputs in order.

        Raises `VerificationError` for another number of inputs, and what the domain raises.
        """
        chosen = function or self.module.main
        if len(inputs) != len(chosen.inputs):
            raise VerificationError(f"@{chosen.name} takes {len(chosen.inputs)} inputs, found {len(inputs)}")
        code = self._codes.get(chosen.name)
        if code is None:
            code = self._codes[chosen.name] = _compile(self.module, steps_of(chosen))
        return self._run(code, inputs)

    def run_steps(self, steps: Steps, inputs: Sequence[A]) -> list[A]:
        """What steps give that are not those of a function. Raises what the domain raises."""
        return self._run(_compile(self.module, steps), inputs)

    def _run(self, code: _Code, inputs: Sequence[A]) -> list[A]:
        domain = self.domain
        apply, release = domain.apply, domain.release
        slots: list[A | None] = [*inputs, *([None] * (code.slots - len(inputs)))]
        for value, slot in code.unused:
            release(value, slots[slot])  # type: ignore[arg-type]
        for step in code.steps:
            operands: list[A] = [slots[i] for i in step.operands]  # type: ignore[misc]
            if step.callee is None:
                results = apply(step.op, operands)
            else:
                callee = step.callee
                results = domain.call(step.op, callee, operands, step.last, partial(self._enter, callee))
            for i, result in zip(step.results, results, strict=True):
                slots[i] = result
            for value, i in step.dead:
                release(value, slots[i])  # type: ignore[arg-type]
                slots[i] = None
        return [slots[i] for i in code.outputs]  # type: ignore[misc]

    def _enter(self, callee: Function, inputs: Sequence[A]) -> list[A]:
        return self.run(inputs, callee)


def _compile(module: Module, given: Steps) -> _Code:
    values = given.values
    functions = {f.name: f for f in module.functions}
    seen = set(given.outputs)
    steps: list[_Step] = []
    for op, operands, results in zip(
        reversed(given.ops), reversed(given.operands), reversed(given.results), strict=True
    ):
        callee = functions.get(op.callee) if op.callee else None
        if callee is None and op.callee:
            raise VerificationError(f"there is no function @{op.callee}", op.location)
        # Most operands of a call are weights that all calls of a function have, long seen.
        new = {*results, *operands} - seen
        gone = [i for i in dict.fromkeys((*results, *operands)) if i in new] if new else []
        seen |= new
        last = list(map(new.__contains__, operands)) if callee is not None else []
        steps.append(_Step(op, operands, results, [(values[i], i) for i in gone], callee, last))
    steps.reverse()
    unused = [(values[i], i) for i in range(given.inputs) if i not in seen]
    return _Code(steps, len(values), unused, given.outputs)
