"""Orders made as time goes on: a rank that is free takes what comes first among the tasks that it can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from distir_relax.schedules.search.problem import Problem, Rows
from distir_relax.schedules.task_times import Number


@dataclass(frozen=True, slots=True)
class Policy:
    """`keys` says for each task what it comes behind: the smallest key comes first.

    Where `patient`, a rank that has weight gradients alone to do waits if another task comes before they would be done.
    """

    keys: Sequence[Number]
    patient: bool = False


def list_schedule(problem: Problem, policy: Policy) -> Rows:
    """An order that fits into memory (`Problem.lack` says whether there is any), as rows of tasks.

    A rank is never idle while it may do something, unless its policy is patient. It may do a forward where, besides,
    there is room left for what is still to come forward of the microbatch that it has begun first: so it always gets to
    an end. For of those that are not done everywhere the oldest has room on all ranks, goes on, and gives back what it
    took, which is as much as the next one needs.
    """
    state = _State(problem, policy)
    ranks = range(problem.shape.ranks)
    events: list[tuple[Number, int]] = []
    for microbatch in range(problem.shape.microbatches):
        state.release(microbatch, 0, events)
    while events:
        now, rank = heappop(events)
        if state.free[rank] > now:
            continue
        chosen = state.choose(rank, now)
        if chosen >= 0:
            state.run(rank, chosen, now, events)
    return [state.rows[rank] for rank in ranks]


class _State:
    """What ranks have done so far, what they can do, and what will come to them."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        self.stages, self.m = problem.shape.stages, problem.shape.microbatches
        self.each = self.stages * self.m
        ranks = problem.shape.ranks
        self.free: list[Number] = [0] * ranks
        self.kept: list[Number] = [0] * ranks
        self.rows: Rows = [[] for _ in range(ranks)]
        # Tasks that come to a rank later, by time; those that are there: forwards, and all others.
        self.coming: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.forwards: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.others: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        # Of each rank: the oldest microbatch whose forwards there are not all done; of all, the stages that they miss.
        self.oldest = [0] * ranks
        stages = [problem.stages_of(rank) for rank in range(ranks)]
        self.missing = [[list(stages[rank]) for _ in range(self.m)] for rank in range(ranks)]
        self.begun = [False] * self.each

    def release(self, task: int, time: Number, events: list[tuple[Number, int]]) -> None:
        """A task can be done from that time on."""
        rank = self.problem.rank_of[task // self.m % self.stages]
        heappush(self.coming[rank], (time, task))
        heappush(events, (time, rank))

    def choose(self, rank: int, now: Number) -> int:
        """The task that a rank does now, or -1."""
        coming, keys = self.coming[rank], self.policy.keys
        while coming and coming[0][0] <= now:
            _, task = heappop(coming)
            heappush((self.others if task >= self.each else self.forwards)[rank], (keys[task], task))
        forward = self._forward(rank)
        others = self.others[rank]
        if forward >= 0 and (not others or keys[forward] <= others[0][0]):
            return forward
        if not others:
            return -1
        task = others[0][1]
        if self.policy.patient and task >= 2 * self.each and self._soon(rank, now + self.problem.durations[task]):
            return -1
        heappop(others)
        return task

    def run(self, rank: int, task: int, now: Number, events: list[tuple[Number, int]]) -> None:
        """Do a task, and release what waits for it."""
        problem, each, m = self.problem, self.each, self.m
        self.rows[rank].append(task)
        end = self.free[rank] = now + problem.durations[task]
        heappush(events, (end, rank))
        stage = task // m % self.stages
        if task < each:
            self._take(rank, stage, task % m)
            self.begun[task] = True
            following = task + m if stage < self.stages - 1 else task + each
            self.release(following, end + (problem.delays[following] if following < each else 0), events)
        elif task < 2 * each:
            if stage:
                self.release(task - m, end + problem.delays[task - m], events)
            if problem.split:
                self.release(task + each, end, events)
        if task >= (2 * each if problem.split else each):
            self.kept[rank] -= problem.sizes[stage]

    def _forward(self, rank: int) -> int:
        """The forward that comes first among those that fit into memory, or -1. Those that are done are dropped."""
        waiting = self.forwards[rank]
        while waiting and self.begun[waiting[0][1]]:
            heappop(waiting)
        if not waiting:
            return -1
        task = waiting[0][1]
        if self._fits(rank, task):
            return task
        oldest = [t for _, t in waiting if t % self.m == self.oldest[rank] and not self.begun[t]]
        return next((t for t in oldest if self._fits(rank, t)), -1)

    def _fits(self, rank: int, task: int) -> bool:
        """Whether there is room, and what is left is enough for the oldest microbatch."""
        oldest, size = self.oldest[rank], self.problem.sizes[task // self.m % self.stages]
        if task % self.m != oldest:
            size += sum(self.problem.sizes[s] for s in self.missing[rank][oldest])
        return self.kept[rank] + size <= self.problem.caps[rank]

    def _take(self, rank: int, stage: int, microbatch: int) -> None:
        """A forward takes its stage's activations."""
        self.kept[rank] += self.problem.sizes[stage]
        missing = self.missing[rank]
        missing[microbatch].remove(stage)
        while self.oldest[rank] < self.m - 1 and not missing[self.oldest[rank]]:
            self.oldest[rank] += 1

    def _soon(self, rank: int, end: Number) -> bool:
        """Whether another task comes to the rank before `end`."""
        return bool(self.coming[rank]) and self.coming[rank][0][0] < end
