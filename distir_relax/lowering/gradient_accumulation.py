"""Gradient accumulation inside the functions that produce the gradients.

A step of many microbatches adds up the gradients of each weight, with one op per weight and microbatch in the entry
function: most of its ops. This pass moves these ops into the functions that produce the terms, right after those::

    %dw.1 = call @backward(%x.1, …)           %sum.1 = call @backward_1(%x.1, …, %dw.0)
    %sum.1 = add(%dw.0, %dw.1)                @backward_1: %dw = matmul(…); %sum = add(%dw.0, %dw)

Results are bitwise equal, since the ops are the same. Each term is freed as soon as it is added, whereas a call would
return the terms of all its weights.
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
    producers,
    value_names,
)
from distir_relax.ops import Trait, lookup
from distir_relax.schedules import Order, order_of, schedule_named
from distir_relax.sharding.replicated import is_fully_replicated

Additions = tuple[tuple[int, str, bool], ...]
"""Additions to outputs of a function: (output number, op name, whether the sum is operand 0)."""


@dataclass(frozen=True, slots=True)
class AccumulateInCalls:
    """Pass: global or distributed stage, in and out. Functions add their results to running sums that they take.

    At the global stage only if the program is fully replicated: a partial sum would have to be reduced in each call.
    `schedule`, `ranks`, `microbatches` and `chunks` are those of a pipeline: if its order depends on times, or does not
    keep the order of microbatches, the sums are left to `Pipeline`.
    """

    takes: ClassVar[tuple[str, ...]] = ("global", "distributed")
    gives: ClassVar[str] = ""
    schedule: str = ""
    ranks: int = 1
    microbatches: int = 1
    chunks: int = 1

    def run(self, module: Module) -> Module:
        """See `accumulate_in_calls`."""
        if module.stage == "global" and not (module.meshes and is_fully_replicated(module, module.meshes[0])):
            return module
        if self.schedule:
            if schedule_named(self.schedule).weights == "either":
                return module
            if not is_microbatch_order(order_of(self.schedule, self.ranks, self.microbatches, self.chunks)):
                return module
        return accumulate_in_calls(module)


def is_microbatch_order(order: Order) -> bool:
    """Whether each stage does its tasks of each kind in the order of microbatches.

    A task with an accumulator waits for the same task of the preceding microbatch.
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
    """Move additions of call results into the functions called, where possible; global or distributed stage.

    An addition moves if one operand is a call result without other uses, and the other is the same result of an earlier
    call, or a sum of those. Tasks of different stages are not made to depend on each other.
    """
    sums = _find_sums(module.main)
    if not sums:
        return module
    program = _Program(module, {f.name for f in module.functions})
    sums_of_call: dict[int, dict[int, _Sum]] = {}
    for item in sums.values():
        sums_of_call.setdefault(item.call, {})[item.number] = item
    removed = {id(item.op) for item in sums.values()}
    ops: list[Op] = []
    for number, op in enumerate(module.main.ops):
        if number in sums_of_call:
            ops.append(program.call(op, sums_of_call[number]))
        elif id(op) not in removed:
            ops.append(op)
    main = replace(module.main, ops=tuple(ops))
    called = {op.callee for function in (main, *program.variants.values()) for op in function.ops if op.callee}
    reachable = _called_functions(module, called)
    functions = (f for f in module.functions[1:] if f.name in reachable)
    return replace(module, functions=(main, *functions, *program.variants.values()))


def _called_functions(module: Module, names: set[str]) -> set[str]:
    """Return the names of all functions that are called, directly or not."""
    functions = {f.name: f for f in module.functions}
    reached: set[str] = set()
    worklist = [name for name in names if name in functions]
    while worklist:
        name = worklist.pop()
        if name not in reached:
            reached.add(name)
            worklist += [op.callee for op in functions[name].ops if op.callee]
    return reached


@dataclass(frozen=True, slots=True)
class _Sum:
    """An op that adds result `number` of the call that is op `call` of the entry to an accumulator."""

    op: Op
    call: int
    number: int
    sum_first: bool

    @property
    def accumulator(self) -> Value:
        return self.op.operands[not self.sum_first]

    @property
    def key(self) -> tuple[int, str, bool]:
        return self.number, self.op.name, self.sum_first


def _find_sums(main: Function) -> dict[str, _Sum]:
    """Return the sums that can move into calls, by name."""
    uses = count_uses(main)
    added = {v.name for op in main.ops if len(op.operands) == 2 and not op.callee for v in op.operands}
    origin: dict[str, tuple[int, int]] = {}
    """Call results and their sums: the op number of the call, and the index of the result."""
    unsummed: set[str] = set()
    """Call results that are not sums."""
    sums: dict[str, _Sum] = {}
    for number, op in enumerate(main.ops):
        if op.callee:
            for i, value in enumerate(op.results):
                if value.name in added:
                    origin[value.name] = number, i
                    unsummed.add(value.name)
            continue
        if len(op.operands) != 2 or not all(v.name in origin and uses[v.name] == 1 for v in op.operands):
            continue
        first, second = (origin[v.name] for v in op.operands)
        term = op.operands[0] if first > second else op.operands[1]
        if first[0] == second[0] or first[1] != second[1] or term.name not in unsummed or not _is_sum(op):
            continue
        if _task_kind(main.ops[first[0]]) != _task_kind(main.ops[second[0]]):
            continue
        call, index = origin[term.name]
        sums[op.results[0].name] = _Sum(op, call, index, term is not op.operands[0])
        origin[op.results[0].name] = call, index
    return sums


def _task_kind(call: Op) -> tuple[object, object]:
    """Return the stage and kind of a task, common to all microbatches."""
    return call.task.get("stage"), call.task.get("kind")


def _is_sum(op: Op) -> bool:
    """Whether an op is an element-wise op on two values whose types equal that of its result."""
    types = {v.type for v in (*op.operands, *op.results)}
    return len(op.results) == 1 and len(types) == 1 and not op.attrs and Trait.POINTWISE in lookup(op.name).traits


@dataclass(slots=True)
class _Program:
    module: Module
    names: set[str]
    variants: dict[str, Function] = field(default_factory=dict)
    """Variants of functions with accumulators, by name."""
    variant_names: dict[tuple[str, Additions], str] = field(default_factory=dict)

    def call(self, op: Op, sums: dict[int, _Sum]) -> Op:
        """Return a call that takes accumulators, and returns them with its results added."""
        selected = [sums[number] for number in sorted(sums)]
        callee = self._variant(op.callee, tuple(s.key for s in selected))
        results = tuple(sums[i].op.results[0] if i in sums else v for i, v in enumerate(op.results))
        operands = (*op.operands, *(s.accumulator for s in selected))
        return replace(op, operands=operands, results=results, attrs={**op.attrs, "callee": callee})

    def _variant(self, name: str, additions: Additions) -> str:
        """Return the name of the variant of a function that adds further inputs to its outputs."""
        if (name, additions) not in self.variant_names:
            original = self.module.function(name)
            self.variant_names[name, additions] = fresh_name(name, self.names)
            function = _with_sums(original, additions, self.variant_names[name, additions])
            self.variants[function.name] = function
        return self.variant_names[name, additions]


def _with_sums(function: Function, additions: Additions, name: str) -> Function:
    used_names, producer_of = value_names(function), producers(function)
    additions_after: dict[int, list[Op]] = {}
    inputs, outputs = list(function.inputs), list(function.outputs)
    for number, op, sum_first in additions:
        term = function.outputs[number].value
        accumulator = Value(fresh_name(f"{term.name}.so_far", used_names), term.type)
        total = Value(fresh_name(f"{term.name}.sum", used_names), term.type)
        inputs.append(Input(accumulator))
        outputs[number] = Output(total.name, total)
        producer = producer_of.get(term.name)
        location = producer.location if producer else ""
        add = Op(op, (accumulator, term) if sum_first else (term, accumulator), (total,), {}, location)
        additions_after.setdefault(id(producer), []).append(add)
    # An input that is returned unchanged is added to at the beginning.
    ops = additions_after.get(id(None), [])
    for op_ in function.ops:
        ops += [op_, *additions_after.get(id(op_), [])]
    return Function(name, tuple(inputs), tuple(ops), tuple(outputs))
