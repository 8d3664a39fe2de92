"""The ops of a pipeline in the order of a schedule: what each place does, task by task.

A schedule says in which order the places do their tasks. All else finds its place among them: what a task needs comes
right before it, what is made for another place is sent at once, and sums and updates come as soon as they can, so that
what they take is let go of. The order of the program is one that all places keep: it is written by the times at which
tasks would begin.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace

from distir_relax.errors import DistIRError
from distir_relax.ir import Function, Module, Op
from distir_relax.ops import Trait, lookup
from distir_relax.schedules import Kind, Order, Task, timeline

Key = tuple[int, int]
"""Where an op stands: at the task of this number; before it (0), it itself (1), behind it (2)."""

_BEFORE, _AT, _BEHIND = range(3)


def order_tasks(module: Module, order: Order) -> Module:
    """A module of the distributed stage whose entry's ops are in the order of a schedule; of one that does not train,
    in that of its forwards.

    Where tasks depend on each other in more ways than stages do (a norm over all microbatches), one that is not ready
    is left for later. Raises `DistIRError` where the schedule lacks a task of the program.
    """
    main = _Sorted(module.main, _positions(module.main, order)).function()
    return replace(module, functions=(main, *module.functions[1:]))


def _positions(main: Function, order: Order) -> dict[int, int]:
    """The place in the order of each task of the program, by the number of its op."""
    tasks = timeline(in_two(order)).tasks()
    ordered = sorted(tasks, key=lambda item: (item[1], item[0].kind != "F", item[0].stage))
    wanted = {(task.stage, task.kind, task.microbatch): number for number, (task, _, _) in enumerate(ordered)}
    found: dict[int, int] = {}
    for number, op in enumerate(main.ops):
        if op.task:
            key = (op.task["stage"], op.task["kind"], op.task["microbatch"])
            if key not in wanted:
                raise DistIRError(
                    f"the schedule has no task {op.task_name}, which the program has",
                    hint="a program that trains needs a schedule with backwards",
                )
            found[number] = wanted[key]
    return found


def in_two(order: Order) -> Order:
    """The order with each whole backward in two: the gradients of inputs, which others wait for, and of weights.

    So the first are sent before the second are made: the bubble of 1F1B is ``(p - 1) (F + I)``.
    """
    parts: dict[Kind, tuple[Kind, ...]] = {"B": ("I", "W")}
    rows = (
        tuple(Task(kind, task.stage, task.microbatch) for task in row for kind in parts.get(task.kind, (task.kind,)))
        for row in order.tasks
    )
    return Order(tuple(rows), order.rank_of)


@dataclass(slots=True)
class _Sorted:
    """Sorts a function; `wanted` is the place in the order of each task, by the number of its op."""

    main: Function
    wanted: dict[int, int]
    made: dict[str, int] = field(default_factory=dict)
    users: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, int] = field(default_factory=dict)
    """The last task that each op waits for, -1 where there is none."""
    position: dict[int, int] = field(default_factory=dict)
    """Where each task comes."""
    keys: dict[int, Key] = field(default_factory=dict)
    needs: list[list[int]] = field(default_factory=list)
    """The ops that each op waits for."""

    def function(self) -> Function:
        ops = self.main.ops
        for number, op in enumerate(ops):
            for value in op.results:
                self.made[value.name] = number
            self.needs.append([self.made[v.name] for v in op.operands if v.name in self.made])
            for need in self.needs[-1]:
                self.users[need].append(number)
        self._tasks_in_turn()
        for number in range(len(ops)):
            self.after[number] = max((self._done(need) for need in self.needs[number]), default=-1)
        feeding = {number for number, op in enumerate(ops) if _is_sent_beside(op)}
        """What is sent, and what becomes that without another task."""
        for number in reversed(range(len(ops))):
            if number not in self.wanted and not _is_wait(ops[number]) and feeding & set(self.users[number]):
                feeding.add(number)
        for number in reversed(range(len(ops))):
            self.keys[number] = self._key(number, number in feeding)
        readers: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(ops):
            for value in op.operands:
                readers[value.name].append(number)
        for number, op in enumerate(ops):
            if not op.callee and lookup(op.name, op.location).code.in_place:
                # It comes behind all others that read what it writes.
                self.keys[number] = max(self.keys[other] for other in readers[op.operands[0].name])
        order = sorted(range(len(ops)), key=lambda number: (self.keys[number], number))
        return replace(self.main, ops=tuple(ops[number] for number in order))

    def _tasks_in_turn(self) -> None:
        """Give tasks their places: in the order of the schedule, but for those that are not ready."""
        waiting = {number: len(set(needs)) for number, needs in enumerate(self.needs)}
        ready = [(self.wanted.get(number, -1), number) for number, count in waiting.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, number = heapq.heappop(ready)
            if number in self.wanted:
                self.position[number] = len(self.position)
            for user in dict.fromkeys(self.users[number]):
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (self.wanted.get(user, -1), user))

    def _done(self, number: int) -> int:
        return self.position.get(number, self.after.get(number, -1))

    def _key(self, number: int, is_feeding: bool) -> Key:
        if number in self.position:
            return (self.position[number], _AT)
        users = [self._before(user) for user in self.users[number]]
        reaches_tasks = any(key[1] == _BEFORE for key in users)
        if is_feeding or not (reaches_tasks or _is_wait(self.main.ops[number])):
            return min([(self.after[number], _BEHIND), *users])
        return min(users)

    def _before(self, user: int) -> Key:
        key = self.keys[user]
        return (key[0], _BEFORE) if user in self.position else key


def _is_sent_beside(op: Op) -> bool:
    return "stream" in op.attrs


def _is_wait(op: Op) -> bool:
    return Trait.WAIT in lookup(op.name, op.location).traits
