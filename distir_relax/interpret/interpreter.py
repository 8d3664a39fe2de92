"""Abstract interpreter: runs a program of any stage, op by op, over the values of a domain.

Algorithm 1 of the DistIR paper. The domain defines the abstract values and the effect of ops on them: types, tensors,
a tensor per device, partially known values, or handles that account for time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from distir_relax.errors import VerificationError
from distir_relax.interpret.ragged import IntArray, Ragged
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
    """Ops in order, their operands and results as indices of values; there are `values` of them, inputs first, and the
    results of a step are consecutive.

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
    """Steps with values in slots of a list, annotated with last uses.

    `results` and `varying` are those of all steps; `last_use` has for each slot the last step that uses or computes it:
    the number of steps for an output, and -1 for an input (in `unused`) that nothing uses.
    """

    steps: list[SlotStep]
    slots: int
    unused: list[int]
    outputs: list[int]
    results: Ragged
    varying: Ragged
    last_use: IntArray


def allocate_slots(steps: Steps) -> SlotProgram:
    """Assign values to slots, and find their last uses."""
    count, patterns = len(steps.ops), steps.patterns
    results, varying = Ragged(steps.results), Ragged(steps.varying)
    last_of_pattern = dict(zip(patterns, range(count), strict=True))
    # Operands that do not vary are used by all steps of their pattern.
    repeated = [n for n in last_of_pattern.values() if steps.varying[n] is not steps.operands[n]]
    last_use = np.full(steps.values, -1, dtype=np.int64)
    last_use[results.values] = results.rows
    np.maximum.at(last_use, varying.values, varying.rows)
    for number in repeated:
        operands = steps.operands[number]
        last_use[operands] = np.maximum(last_use[operands], number)
    last_use[steps.outputs] = count
    dead = _dead_values(results, varying, last_use)
    for number in repeated:
        used = (*steps.results[number], *steps.operands[number])
        dead[number] = [i for i in dict.fromkeys(used) if last_use[i] == number]
    callee_of = {pattern: steps.ops[number].callee for pattern, number in last_of_pattern.items()}
    callees = map(callee_of.__getitem__, patterns)
    slot_steps = list(map(SlotStep, steps.operands, steps.results, dead, callees, steps.varying, patterns))
    unused = np.flatnonzero(last_use[: steps.inputs] < 0).tolist()
    return SlotProgram(slot_steps, steps.values, unused, steps.outputs, results, varying, last_use)


def _dead_values(results: Ragged, varying: Ragged, last_use: IntArray) -> list[list[int]]:
    """Return for each step the values that no later one uses: results, and then operands, each once."""
    rows, values = (np.concatenate(pair) for pair in ((results.rows, varying.rows), (results.values, varying.values)))
    is_dead = last_use[values] == rows
    rows, values = rows[is_dead], values[is_dead]
    flat = values[np.argsort(rows, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(rows, minlength=len(results.counts))).tolist()
    dead = [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    is_once = bool((np.bincount(values) < 2).all())
    return dead if is_once else [list(dict.fromkeys(row)) for row in dead]


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
