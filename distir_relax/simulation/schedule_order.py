"""Order of a pipeline's ops by a schedule: the ops of each place, task by task.

A schedule only orders the tasks of the places. All other ops are ordered relative to tasks: the operands of a task come
right before it, sends come right after the producer, and sums and updates come as soon as possible, so that their
operands are freed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.errors import DistIRError
from distir_relax.interpret.interpreter import Steps
from distir_relax.ir import Op
from distir_relax.ops import Trait, lookup

_BEFORE, _AT, _AFTER = range(3)
"""Position of an op relative to the task that it belongs to: key ``3 * p + place`` for the task in position p."""


def order_ops(steps: Steps, tasks: Sequence[str], schedule: Sequence[str]) -> list[int]:
    """Order steps by a schedule, given as task names; return their numbers.

    `tasks` has the name of each step's task, empty for other ops. If tasks depend on each other in more ways than
    stages do (a norm over all microbatches), a task that is not ready is delayed. Raises `DistIRError` if the schedule
    lacks a task of the program.
    """
    index_of = {name: number for number, name in enumerate(schedule)}
    priorities: dict[int, int] = {}
    for number, name in enumerate(tasks):
        if name:
            if name not in index_of:
                raise DistIRError(
                    f"the schedule has no task {name}, which the program has",
                    hint="a program that trains needs a schedule with backwards",
                )
            priorities[number] = index_of[name]
    return _TaskSorter(steps, priorities).order()


@dataclass(frozen=True, slots=True)
class _OpFlags:
    is_sent: bool
    is_wait: bool
    is_update: bool


def _op_flags(op: Op) -> _OpFlags:
    entry = None if op.callee else lookup(op.name, op.location)
    is_wait = entry is not None and Trait.WAIT in entry.traits
    return _OpFlags("stream" in op.attrs, is_wait, entry is not None and entry.updates)


@dataclass(slots=True)
class _TaskSorter:
    steps: Steps
    priorities: Mapping[int, int]
    needs: list[list[int]] = field(default_factory=list)
    """The producers of each step's operands."""
    users: list[list[int]] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    """The position of each step that is a task, -1 for others."""
    flags: dict[int, _OpFlags] = field(default_factory=dict)
    """Flags of each pattern of steps."""

    def order(self) -> list[int]:
        self._link()
        self._place_tasks(sorted(self.priorities, key=self.priorities.__getitem__))
        last_tasks = self._last_tasks()
        if any(last_tasks[number] >= self.position[number] for number in self.priorities):
            # A task that the schedule has earlier is not ready then.
            self._place_tasks(self._delay_tasks())
            last_tasks = self._last_tasks()
        keys = self._keys(last_tasks)
        for number, readers in self._in_place_updates():
            # An update comes after all others that read the operand.
            keys[number] = max(keys[other] for other in readers)
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _link(self) -> None:
        steps = self.steps
        producer_of = [-1] * steps.values
        self.users = [[] for _ in steps.ops]
        users = self.users
        selected: dict[int, list[int]] = {}
        """For each pattern of steps, the places of operands of different producers."""
        rows = zip(steps.varying, steps.results, steps.patterns, strict=True)
        for number, (operands, results, pattern) in enumerate(rows):
            if pattern not in selected:
                places = {producer_of[value]: i for i, value in enumerate(operands) if producer_of[value] >= 0}
                selected[pattern] = list(places.values())
            needs = [producer_of[operands[i]] for i in selected[pattern]]
            self.needs.append(needs)
            for need in needs:
                users[need].append(number)
            if results:
                producer_of[results[0] : results[-1] + 1] = [number] * len(results)
            if pattern not in self.flags:
                self.flags[pattern] = _op_flags(steps.ops[number])

    def _place_tasks(self, tasks: Sequence[int]) -> None:
        self.position = [-1] * len(self.steps.ops)
        for position, number in enumerate(tasks):
            self.position[number] = position

    def _delay_tasks(self) -> list[int]:
        """Return the tasks in schedule order, except for tasks that are not ready."""
        priorities, users = self.priorities, self.users
        pending = [len(needs) for needs in self.needs]
        ready_ops = [number for number, count in enumerate(pending) if not count]
        tasks: list[tuple[int, int]] = []
        order: list[int] = []
        while ready_ops or tasks:
            number = ready_ops.pop() if ready_ops else -1
            if number < 0:
                number = heapq.heappop(tasks)[1]
                order.append(number)
            elif number in priorities:
                heapq.heappush(tasks, (priorities[number], number))
                continue
            for user in users[number]:
                pending[user] -= 1
                if not pending[user]:
                    ready_ops.append(user)
        return order

    def _last_tasks(self) -> list[int]:
        """Return the position of the last task that each step depends on, -1 if there is none."""
        last_tasks: list[int] = []
        last_including: list[int] = []
        for needs, position in zip(self.needs, self.position, strict=True):
            last = max([last_including[need] for need in needs], default=-1)
            last_tasks.append(last)
            last_including.append(last if position < 0 else max(last, position))
        return last_tasks

    def _keys(self, last_tasks: Sequence[int]) -> list[int]:
        """Return the keys of steps to sort them by."""
        users, position, count = self.users, self.position, len(last_tasks)
        flags = [self.flags[pattern] for pattern in self.steps.patterns]
        keys = [3 * task + _AT for task in position]
        bounds = [3 * task + _BEFORE for task in position]
        """The latest keys of steps that a step uses."""
        feeding = [False] * count
        """Ops that send, and ops that sends depend on without a task in between."""
        for number in range(count - 1, -1, -1):
            op_flags, is_task = flags[number], position[number] >= 0
            feeding[number] = op_flags.is_sent or (
                not is_task and not op_flags.is_wait and any(map(feeding.__getitem__, users[number]))
            )
            if is_task:
                continue
            limits = [bounds[user] for user in users[number]]
            if feeding[number] or not (op_flags.is_wait or _BEFORE in [limit % 3 for limit in limits]):
                limits.append(3 * last_tasks[number] + _AFTER)
            keys[number] = bounds[number] = min(limits)
        return keys

    def _in_place_updates(self) -> list[tuple[int, list[int]]]:
        """Return the steps that update an operand in place, with all readers of it."""
        flags = self.flags
        updates = [number for number, pattern in enumerate(self.steps.patterns) if flags[pattern].is_update]
        if not updates:
            return []
        readers: dict[int, list[int]] = {self.steps.operands[number][0]: [] for number in updates}
        updated = set(readers)
        for number, operands in enumerate(self.steps.operands):
            if not updated.isdisjoint(operands):
                for value in updated.intersection(operands):
                    readers[value].append(number)
        return [(number, readers[self.steps.operands[number][0]]) for number in updates]
