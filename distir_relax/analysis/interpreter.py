"""Abstract interpreter: runs a program of any stage, op by op, over the values of a domain.

Algorithm 1 of the DistIR paper. The domain defines the abstract values and the effect of ops on them: types, tensors,
a tensor per device, partially known values, or handles that account for time and memory.
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
    """Abstract values and the effect of ops on them. Subclasses override `apply`, and other methods as needed."""

    def apply(self, op: Op, operands: Sequence[A]) -> Sequence[A]:
        """Return the results of `op`, which is not a call."""
        raise NotImplementedError

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[A],
        last: Sequence[bool],
        run: Callable[[Sequence[A]], list[A]],
    ) -> list[A]:
        """Return the results of a call. `last` tells which operands have no later use.

        `run` interprets the callee; a domain that has the results already need not run it.
        """
        return run(operands)

    def release(self, element: A) -> None:
        """Called after the last use of a value in its function."""


@dataclass(slots=True)
class Steps:
    """Ops in order, their operands and results as indices of values; there are `values` of them, inputs first.

    Steps of one pattern (`patterns`) repeat an op: they have the same operands, inputs of the function, where these are
    not among their `varying` ones; varying ones in the same place are inputs, or the same results of steps that also
    repeat one op. Of other steps, all operands are varying.
    """

    ops: list[Op]
    operands: list[list[int]]
    results: list[list[int]]
    values: int
    inputs: int
    outputs: list[int]
    varying: list[list[int]]
    patterns: list[int]


def list_steps(function: Function) -> Steps:
    """List the steps of a function. Raises `VerificationError` if a value is used before it is defined."""
    slot_of = {item.value.name: i for i, item in enumerate(function.inputs)}
    count = len(function.inputs)
    operands: list[list[int]] = []
    steps = Steps(list(function.ops), operands, [], 0, count, [], operands, list(range(len(function.ops))))
    for op in function.ops:
        try:
            steps.operands.append([slot_of[v.name] for v in op.operands])
        except KeyError as missing:
            raise VerificationError(f"%{missing.args[0]} is used before it is defined", op.location) from None
        steps.results.append(list(range(count, count + len(op.results))))
        for value in op.results:
            slot_of[value.name] = count
            count += 1
    steps.values, steps.outputs = count, [slot_of[o.value.name] for o in function.outputs]
    return steps


@dataclass(slots=True)
class SlotStep:
    """The operands and results of an op, as slots of a list, and the slots that are `dead` after it.

    `varying` and `pattern` are as in `Steps`. For a call, `callee` is the name of the function.
    """

    operands: list[int]
    results: list[int]
    dead: list[int]
    callee: str
    varying: list[int]
    pattern: int

    @property
    def last(self) -> list[bool]:
        """Whether each operand has no later use."""
        dead = set(self.dead)
        return [slot in dead for slot in self.operands]


@dataclass(slots=True)
class SlotProgram:
    """Steps with values in slots of a list, annotated with last uses."""

    steps: list[SlotStep]
    slots: int
    unused: list[int]
    outputs: list[int]


def allocate_slots(steps: Steps) -> SlotProgram:
    """Assign values to slots, and find their last uses."""
    is_used = bytearray(steps.values)
    """Whether each value is used by a later step."""
    for i in steps.outputs:
        is_used[i] = True
    result: list[SlotStep] = []
    callees: dict[int, str] = {}
    rows = zip(steps.ops, steps.operands, steps.results, steps.varying, steps.patterns, strict=True)
    for op, operands, results, varying, pattern in reversed(list(rows)):
        callee, candidates = callees.get(pattern), varying
        if callee is None:
            # Operands that do not vary are used by all steps of the pattern, the last of which is this.
            callee, candidates = callees.setdefault(pattern, op.callee), operands
        dead = [i for i in (*results, *candidates) if not is_used[i]]
        for i in dead:
            is_used[i] = True
        result.append(SlotStep(operands, results, list(dict.fromkeys(dead)), callee, varying, pattern))
    result.reverse()
    return SlotProgram(result, steps.values, [i for i in range(steps.inputs) if not is_used[i]], steps.outputs)


@dataclass
class Interpreter(Generic[A]):
    """Interprets the functions of `module` over `domain`. Raises `VerificationError` if one is recursive.

    `programs` caches slot programs of functions by name; modules that differ only in types may share it.
    """

    module: Module
    domain: Domain[A]
    programs: dict[str, SlotProgram] = field(default_factory=dict)
    _functions: dict[str, Function] = field(init=False)

    def __post_init__(self) -> None:
        if not self.programs:
            verify_no_recursion(self.module)
        self._functions = {f.name: f for f in self.module.functions}

    def run(self, inputs: Sequence[A], function: Function | None = None) -> list[A]:
        """Return the results of a function, by default the entry function, for these inputs in order.

        Raises `VerificationError` for another number of inputs, and the errors of the domain.
        """
        target = function or self.module.main
        if len(inputs) != len(target.inputs):
            raise VerificationError(f"@{target.name} takes {len(target.inputs)} inputs, found {len(inputs)}")
        program = self.programs.get(target.name)
        if program is None:
            program = self.programs[target.name] = allocate_slots(list_steps(target))
        return self._run(program, target.ops, inputs)

    def enter(self, callee: str) -> tuple[Function, Callable[[Sequence[A]], list[A]]]:
        """Return a callee, and a function that runs it."""
        function = self._functions[callee]
        return function, partial(self._enter, function)

    def _run(self, program: SlotProgram, ops: Sequence[Op], inputs: Sequence[A]) -> list[A]:
        domain = self.domain
        apply, release = domain.apply, domain.release
        slots: list[A | None] = [*inputs, *([None] * (program.slots - len(inputs)))]
        for slot in program.unused:
            release(slots[slot])  # type: ignore[arg-type]
        results: Sequence[A]
        for op, step in zip(ops, program.steps, strict=True):
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
        return [slots[i] for i in program.outputs]  # type: ignore[misc]

    def _enter(self, callee: Function, inputs: Sequence[A]) -> list[A]:
        return self.run(inputs, callee)
