"""List scheduling: a free rank runs the ready task of highest priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from distir_relax.schedules.search.problem import Problem, Rows
from distir_relax.schedules.task_times import Number


@dataclass(frozen=True, slots=True)
class Policy:
    """Task priorities: the smallest of `keys` comes first.

    If `patient`, a rank with only weight gradients ready waits for another task that arrives before they would end.
    """

    keys: Sequence[Number]
    patient: bool = False


def list_schedule(problem: Problem, policy: Policy) -> Rows:
    """Return an order that fits in memory, as rows of tasks (`Problem.infeasibility` reports whether one exists).

    A rank is never idle if it may run a task, unless the policy is patient. It may run a forward if enough memory
    remains for the remaining forwards of its oldest incomplete microbatch. This prevents deadlock: the oldest
    microbatch that is not complete on all ranks always has room, finishes, and frees as much as the next one needs.
    """
    state = _State(problem, policy)
    ranks = range(problem.shape.ranks)
    events: list[tuple[Number, int]] = []
    for microbatch in range(problem.shape.microbatches):
        state.release(microbatch, 0, events)
    while events:
        now, rank = heappop(events)
        if state.available[rank] > now:
            continue
        chosen = state.choose(rank, now)
        if chosen >= 0:
            state.run(rank, chosen, now, events)
    return [state.rows[rank] for rank in ranks]


class _State:
    """Progress of the ranks, their ready tasks, and those that will arrive."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        self.stages, self.m = problem.shape.stages, problem.shape.microbatches
        self.kind_size = self.stages * self.m
        ranks = problem.shape.ranks
        self.available: list[Number] = [0] * ranks
        self.allocated: list[Number] = [0] * ranks
        self.rows: Rows = [[] for _ in range(ranks)]
        # By rank: tasks that arrive later, by time; ready forwards; other ready tasks.
        self.arriving: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.forwards: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        self.others: list[list[tuple[Number, int]]] = [[] for _ in range(ranks)]
        # By rank: the oldest microbatch with forwards left there; by microbatch, the stages left.
        self.oldest = [0] * ranks
        stages = [problem.stages_of(rank) for rank in range(ranks)]
        self.remaining = [[list(stages[rank]) for _ in range(self.m)] for rank in range(ranks)]
        self.started = [False] * self.kind_size

    def release(self, task: int, time: Number, events: list[tuple[Number, int]]) -> None:
        """Make a task ready from `time` on."""
        rank = self.problem.rank_of[task // self.m % self.stages]
        heappush(self.arriving[rank], (time, task))
        heappush(events, (time, rank))

    def choose(self, rank: int, now: Number) -> int:
        """Return the task that a rank runs now, or -1."""
        arriving, keys = self.arriving[rank], self.policy.keys
        while arriving and arriving[0][0] <= now:
            _, task = heappop(arriving)
            heappush((self.others if task >= self.kind_size else self.forwards)[rank], (keys[task], task))
        forward = self._next_forward(rank)
        others = self.others[rank]
        if forward >= 0 and (not others or keys[forward] <= others[0][0]):
            return forward
        if not others:
            return -1
        task = others[0][1]
        if (
            self.policy.patient
            and task >= 2 * self.kind_size
            and self._arrives_before(rank, now + self.problem.durations[task])
        ):
            return -1
        heappop(others)
        return task

    def run(self, rank: int, task: int, now: Number, events: list[tuple[Number, int]]) -> None:
        """Run a task, and release its dependents."""
        problem, kind_size, m = self.problem, self.kind_size, self.m
        self.rows[rank].append(task)
        end = self.available[rank] = now + problem.durations[task]
        heappush(events, (end, rank))
        stage = task // m % self.stages
        if task < kind_size:
            self._allocate(rank, stage, task % m)
            self.started[task] = True
            next_task = task + m if stage < self.stages - 1 else task + kind_size
            self.release(next_task, end + (problem.delays[next_task] if next_task < kind_size else 0), events)
        elif task < 2 * kind_size:
            if stage:
                self.release(task - m, end + problem.delays[task - m], events)
            if problem.split:
                self.release(task + kind_size, end, events)
        if task >= (2 * kind_size if problem.split else kind_size):
            self.allocated[rank] -= problem.sizes[stage]

    def _next_forward(self, rank: int) -> int:
        """Return the first forward that fits in memory, or -1. Completed ones are dropped."""
        ready = self.forwards[rank]
        while ready and self.started[ready[0][1]]:
            heappop(ready)
        if not ready:
            return -1
        task = ready[0][1]
        if self._fits(rank, task):
            return task
        oldest = [t for _, t in ready if t % self.m == self.oldest[rank] and not self.started[t]]
        return next((t for t in oldest if self._fits(rank, t)), -1)

    def _fits(self, rank: int, task: int) -> bool:
        """Return whether a forward fits, with room left for the oldest microbatch."""
        oldest, size = self.oldest[rank], self.problem.sizes[task // self.m % self.stages]
        if task % self.m != oldest:
            size += sum(self.problem.sizes[s] for s in self.remaining[rank][oldest])
        return self.allocated[rank] + size <= self.problem.caps[rank]

    def _allocate(self, rank: int, stage: int, microbatch: int) -> None:
        """Allocate the activations of a forward."""
        self.allocated[rank] += self.problem.sizes[stage]
        remaining = self.remaining[rank]
        remaining[microbatch].remove(stage)
        while self.oldest[rank] < self.m - 1 and not remaining[self.oldest[rank]]:
            self.oldest[rank] += 1

    def _arrives_before(self, rank: int, end: Number) -> bool:
        """Return whether another task arrives at the rank before `end`."""
        return bool(self.arriving[rank]) and self.arriving[rank][0][0] < end
