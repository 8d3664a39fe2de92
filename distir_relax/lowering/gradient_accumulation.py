"""What calls give is added up where it is made: the sum so far goes into the call, and comes out with its part added.

A step of many microbatches adds up the gradients of each weight, one op for each weight and microbatch in the entry,
most of all ops there. Here such ops move into the functions that make what they add, right behind it::

    %dw.1 = call @backward(%x.1, …)           %sum.1 = call @backward_1(%x.1, …, %dw.0)
    %sum.1 = add(%dw.0, %dw.1)                @backward_1: %dw = matmul(…); %sum = add(%dw.0, %dw)

The numbers are the same, bit for bit, since the ops are. A part is let go of as soon as it is added, where a call would
give those of all of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import (
    Function,
    Input,
    Module,
    Op,
    Output,
    Value,
    count_uses,
    fresh_name,
    makers,
    value_names,
)
from distir_relax.ops import Trait, lookup
from distir_relax.schedules import Order, order_of, schedule_named
from distir_relax.sharding.replicated import asks_for_nothing

Adding = tuple[tuple[int, str, bool], ...]
"""What is added to the outputs of a function: for each its number, the op by name, and whether the sum comes first."""


@dataclass(frozen=True, slots=True)
class AccumulateInCalls:
    """The pass: global or distributed stage, in and out. Sums of what calls give are made by the functions called.

    At the global stage that is done where nothing is split: a sum that is pending along a mesh axis would be reduced in
    each call. For a pipeline, `schedule`, `ranks`, `microbatches` and `chunks` are its own: where its order depends on
    times, or is not that of microbatches, the sums are left to `Pipeline`.
    """

    takes: ClassVar[tuple[str, ...]] = ("global", "distributed")
    gives: ClassVar[str] = ""
    schedule: str = ""
    ranks: int = 1
    microbatches: int = 1
    chunks: int = 1

    def run(self, module: Module) -> Module:
        """See `accumulate_in_calls`."""
        if module.stage == "global" and not (module.meshes and asks_for_nothing(module, module.meshes[0])):
            return module
        if self.schedule:
            if schedule_named(self.schedule).weights == "either":
                return module
            if not is_in_turn(order_of(self.schedule, self.ranks, self.microbatches, self.chunks)):
                return module
        return accumulate_in_calls(module)


def is_in_turn(order: Order) -> bool:
    """Whether each stage does its tasks of each kind one microbatch after the other.

    A task that takes the sum so far waits for the one of the microbatch before.
    """
    last: dict[tuple[int, str], int] = {}
    for tasks in order.tasks:
        for task in tasks:
            key = task.stage, task.kind
            if last.get(key, -1) > task.microbatch:
                return False
            last[key] = task.microbatch
    return True


def accumulate_in_calls(module: Module) -> Module:
    """A module of the global or distributed stage whose entry adds up nothing of what calls give, as far as they can.

    An op goes into a call if one operand is what only it uses of the call, and the other what an earlier call gives at
    the same place, or the sum of such. Tasks of unlike stages are not made to wait for each other.
    """
    moved = _moved(module.main)
    if not moved:
        return module
    program = _Program(module, {f.name for f in module.functions})
    by_call: dict[int, dict[int, _Sum]] = {}
    for found in moved.values():
        by_call.setdefault(found.call, {})[found.number] = found
    gone = {id(found.op) for found in moved.values()}
    ops: list[Op] = []
    for number, op in enumerate(module.main.ops):
        if number in by_call:
            ops.append(program.call(op, by_call[number]))
        elif id(op) not in gone:
            ops.append(op)
    main = replace(module.main, ops=tuple(ops))
    called = {op.callee for function in (main, *program.made.values()) for op in function.ops if op.callee}
    before = _reached(module, called)
    kept = (f for f in module.functions[1:] if f.name in before)
    return replace(module, functions=(main, *kept, *program.made.values()))


def _reached(module: Module, names: set[str]) -> set[str]:
    """The functions of a module that are called, by way of others or not."""
    known = {f.name: f for f in module.functions}
    found: set[str] = set()
    waiting = [name for name in names if name in known]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [op.callee for op in known[name].ops if op.callee]
    return found


@dataclass(frozen=True, slots=True)
class _Sum:
    """An op that adds result `number` of the call that is op `call` of the entry to the sum so far."""

    op: Op
    call: int
    number: int
    sum_first: bool

    @property
    def so_far(self) -> Value:
        return self.op.operands[not self.sum_first]

    @property
    def form(self) -> tuple[int, str, bool]:
        return self.number, self.op.name, self.sum_first


def _moved(main: Function) -> dict[str, _Sum]:
    """The sums that go into calls, by name."""
    uses = count_uses(main)
    added = {v.name for op in main.ops if len(op.operands) == 2 and not op.callee for v in op.operands}
    made: dict[str, tuple[int, int]] = {}
    """Of what calls give, and sums of that: by which op of the entry it is made, and at which place there."""
    plain: set[str] = set()
    """What calls give that is no sum yet."""
    found: dict[str, _Sum] = {}
    for number, op in enumerate(main.ops):
        if op.callee:
            for i, value in enumerate(op.results):
                if value.name in added:
                    made[value.name] = number, i
                    plain.add(value.name)
            continue
        if len(op.operands) != 2 or not all(v.name in made and uses[v.name] == 1 for v in op.operands):
            continue
        one, other = (made[v.name] for v in op.operands)
        term = op.operands[0] if one > other else op.operands[1]
        if one[0] == other[0] or one[1] != other[1] or term.name not in plain or not _is_sum(op):
            continue
        if _kind_of_task(main.ops[one[0]]) != _kind_of_task(main.ops[other[0]]):
            continue
        call, place = made[term.name]
        found[op.results[0].name] = _Sum(op, call, place, term is not op.operands[0])
        made[op.results[0].name] = call, place
    return found


def _kind_of_task(call: Op) -> tuple[object, object]:
    """What the tasks of different microbatches have in common: they follow each other at one place."""
    return call.task.get("stage"), call.task.get("kind")


def _is_sum(op: Op) -> bool:
    """Whether an op takes two values of one type, element by element, and gives one of that type."""
    types = {v.type for v in (*op.operands, *op.results)}
    return len(op.results) == 1 and len(types) == 1 and not op.attrs and Trait.POINTWISE in lookup(op.name).traits


@dataclass(slots=True)
class _Program:
    module: Module
    names: set[str]
    made: dict[str, Function] = field(default_factory=dict)
    """The functions that take sums, by name."""
    known: dict[tuple[str, Adding], str] = field(default_factory=dict)

    def call(self, op: Op, sums: dict[int, _Sum]) -> Op:
        """A call that takes the sums so far, and gives them with its results added."""
        chosen = [sums[number] for number in sorted(sums)]
        callee = self._variant(op.callee, tuple(s.form for s in chosen))
        results = tuple(sums[i].op.results[0] if i in sums else v for i, v in enumerate(op.results))
        operands = (*op.operands, *(s.so_far for s in chosen))
        return replace(op, operands=operands, results=results, attrs={**op.attrs, "callee": callee})

    def _variant(self, name: str, adding: Adding) -> str:
        """The function called `name` that adds to its outputs what further inputs have."""
        if (name, adding) not in self.known:
            given = self.module.function(name)
            self.known[name, adding] = fresh_name(name, self.names)
            function = _with_sums(given, adding, self.known[name, adding])
            self.made[function.name] = function
        return self.known[name, adding]


def _with_sums(function: Function, adding: Adding, name: str) -> Function:
    taken, made = value_names(function), makers(function)
    behind: dict[int, list[Op]] = {}
    inputs, outputs = list(function.inputs), list(function.outputs)
    for number, op, sum_first in adding:
        term = function.outputs[number].value
        so_far = Value(fresh_name(f"{term.name}.so_far", taken), term.type)
        total = Value(fresh_name(f"{term.name}.sum", taken), term.type)
        inputs.append(Input(so_far))
        outputs[number] = Output(total.name, total)
        maker = made.get(term.name)
        location = maker.location if maker else ""
        add = Op(op, (so_far, term) if sum_first else (term, so_far), (total,), {}, location)
        behind.setdefault(id(maker), []).append(add)
    # What passes through the function is added to at its beginning.
    ops = behind.get(id(None), [])
    for op_ in function.ops:
        ops += [op_, *behind.get(id(op_), [])]
    return Function(name, tuple(inputs), tuple(ops), tuple(outputs))
