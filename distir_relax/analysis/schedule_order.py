"""The ops of a pipeline in the order of a schedule: what each place does, task by task.

A schedule says in which order the places do their tasks. All else finds its place among them: what a task needs comes
right before it, what is made for another place is sent at once, and sums and updates come as soon as they can, so that
what they take is let go of.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.analysis.interpreter import Steps
from distir_relax.errors import DistIRError
from distir_relax.ir import Op
from distir_relax.ops import Trait, lookup

_BEFORE, _AT, _BEHIND = range(3)
"""Where an op stands by the task that it belongs to: key ``3 * p + place`` for the task in position p."""


def in_order(steps: Steps, schedule: Sequence[str]) -> list[int]:
    """The numbers of steps in the order of a schedule, which names the tasks.

    Where tasks depend on each other in more ways than stages do (a norm over all microbatches), one that is not ready
    is left for later. Raises `DistIRError` where the schedule lacks a task of the program.
    """
    places = {name: number for number, name in enumerate(schedule)}
    wanted: dict[int, int] = {}
    for number, op in enumerate(steps.ops):
        if op.task:
            if op.task_name not in places:
                raise DistIRError(
                    f"the schedule has no task {op.task_name}, which the program has",
                    hint="a program that trains needs a schedule with backwards",
                )
            wanted[number] = places[op.task_name]
    return _Sorted(steps, wanted).order()


@dataclass(frozen=True, slots=True)
class _Kind:
    is_sent: bool
    is_wait: bool
    is_update: bool


def _kind(op: Op) -> _Kind:
    entry = None if op.callee else lookup(op.name, op.location)
    is_wait = entry is not None and Trait.WAIT in entry.traits
    return _Kind("stream" in op.attrs, is_wait, entry is not None and bool(entry.code.in_place))


@dataclass(slots=True)
class _Sorted:
    steps: Steps
    wanted: Mapping[int, int]
    needs: list[list[int]] = field(default_factory=list)
    """The steps that each step waits for."""
    users: list[list[int]] = field(default_factory=list)
    position: dict[int, int] = field(default_factory=dict)
    """Where each task comes."""
    kinds: dict[int, _Kind] = field(default_factory=dict)

    def order(self) -> list[int]:
        count = len(self.steps.ops)
        self._link()
        self._tasks_in_turn()
        keys = self._keys(self._last_tasks())
        for number, first in self._updates():
            # It comes behind all others that read what it writes.
            keys[number] = max(keys[other] for other in first)
        return sorted(range(count), key=keys.__getitem__)

    def _link(self) -> None:
        steps = self.steps
        made: dict[int, int] = {}
        self.users = [[] for _ in steps.ops]
        users = self.users
        for number, (operands, results) in enumerate(zip(steps.operands, steps.results, strict=True)):
            needs = [made[v] for v in operands if v in made]
            self.needs.append(needs)
            for need in needs:
                users[need].append(number)
            for value in results:
                made[value] = number
        for op in steps.ops:
            if id(op) not in self.kinds:
                self.kinds[id(op)] = _kind(op)

    def _tasks_in_turn(self) -> None:
        """Give tasks their places: in the order of the schedule, but for those that are not ready."""
        wanted, users = self.wanted, self.users
        waiting = [len(needs) for needs in self.needs]
        free = [number for number, count in enumerate(waiting) if not count]
        tasks: list[tuple[int, int]] = []
        while free or tasks:
            number = free.pop() if free else -1
            if number < 0:
                number = heapq.heappop(tasks)[1]
                self.position[number] = len(self.position)
            elif number in wanted:
                heapq.heappush(tasks, (wanted[number], number))
                continue
            for user in users[number]:
                waiting[user] -= 1
                if not waiting[user]:
                    free.append(user)

    def _last_tasks(self) -> list[int]:
        """The position of the last task that each step waits for, -1 where there is none."""
        position = self.position
        after: list[int] = []
        done: list[int] = []
        for number, needs in enumerate(self.needs):
            after.append(max([done[need] for need in needs], default=-1))
            done.append(position.get(number, after[-1]))
        return after

    def _keys(self, after: Sequence[int]) -> list[int]:
        ops, kinds, users, position = self.steps.ops, self.kinds, self.users, self.position
        keys = [0] * len(ops)
        feeding = [False] * len(ops)
        """What is sent, and what becomes that without another task."""
        for number in range(len(ops) - 1, -1, -1):
            place = position.get(number)
            kind = kinds[id(ops[number])]
            feeding[number] = kind.is_sent or (
                place is None and not kind.is_wait and any(map(feeding.__getitem__, users[number]))
            )
            if place is not None:
                keys[number] = 3 * place + _AT
                continue
            found = [3 * position[user] + _BEFORE if user in position else keys[user] for user in users[number]]
            reaches_tasks = any(key % 3 == _BEFORE for key in found)
            if feeding[number] or not (reaches_tasks or kind.is_wait):
                found.append(3 * after[number] + _BEHIND)
            keys[number] = min(found)
        return keys

    def _updates(self) -> list[tuple[int, list[int]]]:
        """The steps that update their operand in place, with all that read it."""
        found = [number for number, op in enumerate(self.steps.ops) if self.kinds[id(op)].is_update]
        if not found:
            return []
        readers: dict[int, list[int]] = {self.steps.operands[number][0]: [] for number in found}
        for number, operands in enumerate(self.steps.operands):
            for value in operands:
                if value in readers:
                    readers[value].append(number)
        return [(number, readers[self.steps.operands[number][0]]) for number in found]
