"""Order of a pipeline's ops by a schedule: the ops of each place, task by task.

A schedule only orders the tasks of the places. All other ops are ordered relative to tasks: the operands of a task come
right before it, sends come right after the producer, and sums and updates come as soon as possible, so that their
operands are freed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.analysis.interpreter import Steps
from distir_relax.errors import DistIRError
from distir_relax.ir import Op
from distir_relax.ops import Trait, lookup

_BEFORE, _AT, _AFTER = range(3)
"""Position of an op relative to the task that it belongs to: key ``3 * p + place`` for the task in position p."""


def order_ops(steps: Steps, schedule: Sequence[str]) -> list[int]:
    """Order steps by a schedule, given as task names; return their numbers.

    If tasks depend on each other in more ways than stages do (a norm over all microbatches), a task that is not ready
    is delayed. Raises `DistIRError` if the schedule lacks a task of the program.
    """
    index_of = {name: number for number, name in enumerate(schedule)}
    priorities: dict[int, int] = {}
    for number, op in enumerate(steps.ops):
        if op.task:
            if op.task_name not in index_of:
                raise DistIRError(
                    f"the schedule has no task {op.task_name}, which the program has",
                    hint="a program that trains needs a schedule with backwards",
                )
            priorities[number] = index_of[op.task_name]
    return _TaskSorter(steps, priorities).order()


@dataclass(frozen=True, slots=True)
class _OpFlags:
    is_sent: bool
    is_wait: bool
    is_update: bool


def _op_flags(op: Op) -> _OpFlags:
    entry = None if op.callee else lookup(op.name, op.location)
    is_wait = entry is not None and Trait.WAIT in entry.traits
    return _OpFlags("stream" in op.attrs, is_wait, entry is not None and bool(entry.code.in_place))


@dataclass(slots=True)
class _TaskSorter:
    steps: Steps
    priorities: Mapping[int, int]
    needs: list[list[int]] = field(default_factory=list)
    """The producers of each step's operands."""
    users: list[list[int]] = field(default_factory=list)
    position: dict[int, int] = field(default_factory=dict)
    """The position of each task."""
    flags: dict[int, _OpFlags] = field(default_factory=dict)

    def order(self) -> list[int]:
        count = len(self.steps.ops)
        self._link()
        self._order_tasks()
        keys = self._keys(self._last_tasks())
        for number, readers in self._in_place_updates():
            # An update comes after all others that read the operand.
            keys[number] = max(keys[other] for other in readers)
        return sorted(range(count), key=keys.__getitem__)

    def _link(self) -> None:
        steps = self.steps
        producer_of: dict[int, int] = {}
        self.users = [[] for _ in steps.ops]
        users = self.users
        for number, (operands, results) in enumerate(zip(steps.operands, steps.results, strict=True)):
            needs = [producer_of[v] for v in operands if v in producer_of]
            self.needs.append(needs)
            for need in needs:
                users[need].append(number)
            for value in results:
                producer_of[value] = number
        for op in steps.ops:
            if id(op) not in self.flags:
                self.flags[id(op)] = _op_flags(op)

    def _order_tasks(self) -> None:
        """Determine the positions of tasks: in schedule order, except for tasks that are not ready."""
        priorities, users = self.priorities, self.users
        pending = [len(needs) for needs in self.needs]
        ready_ops = [number for number, count in enumerate(pending) if not count]
        tasks: list[tuple[int, int]] = []
        while ready_ops or tasks:
            number = ready_ops.pop() if ready_ops else -1
            if number < 0:
                number = heapq.heappop(tasks)[1]
                self.position[number] = len(self.position)
            elif number in priorities:
                heapq.heappush(tasks, (priorities[number], number))
                continue
            for user in users[number]:
                pending[user] -= 1
                if not pending[user]:
                    ready_ops.append(user)

    def _last_tasks(self) -> list[int]:
        """Return the position of the last task that each step depends on, -1 if there is none."""
        position = self.position
        last_tasks: list[int] = []
        last_including: list[int] = []
        for number, needs in enumerate(self.needs):
            last_tasks.append(max([last_including[need] for need in needs], default=-1))
            last_including.append(position.get(number, last_tasks[-1]))
        return last_tasks

    def _keys(self, last_tasks: Sequence[int]) -> list[int]:
        ops, flags, users, position = self.steps.ops, self.flags, self.users, self.position
        keys = [0] * len(ops)
        feeding = [False] * len(ops)
        """Ops that send, and ops that sends depend on without a task in between."""
        for number in range(len(ops) - 1, -1, -1):
            task = position.get(number)
            op_flags = flags[id(ops[number])]
            feeding[number] = op_flags.is_sent or (
                task is None and not op_flags.is_wait and any(map(feeding.__getitem__, users[number]))
            )
            if task is not None:
                keys[number] = 3 * task + _AT
                continue
            bounds = [3 * position[user] + _BEFORE if user in position else keys[user] for user in users[number]]
            reaches_tasks = any(key % 3 == _BEFORE for key in bounds)
            if feeding[number] or not (reaches_tasks or op_flags.is_wait):
                bounds.append(3 * last_tasks[number] + _AFTER)
            keys[number] = min(bounds)
        return keys

    def _in_place_updates(self) -> list[tuple[int, list[int]]]:
        """Return the steps that update an operand in place, with all readers of it."""
        updates = [number for number, op in enumerate(self.steps.ops) if self.flags[id(op)].is_update]
        if not updates:
            return []
        readers: dict[int, list[int]] = {self.steps.operands[number][0]: [] for number in updates}
        for number, operands in enumerate(self.steps.operands):
            for value in operands:
                if value in readers:
                    readers[value].append(number)
        return [(number, readers[self.steps.operands[number][0]]) for number in updates]
