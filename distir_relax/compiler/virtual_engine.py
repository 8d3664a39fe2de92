"""The engine in virtual time: which steps it runs for requests that arrive together, and when they end.

The scheduler is the engine's own. A step begins as soon as it is planned and no rank is still busy with an earlier one
when the step reaches it; within a step, times are those of the step alone. So in a pipeline the slowest stage sets the
pace, as many steps being in flight as there are stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.serving import Limits, Scheduler, Span
from distir_relax.simulation.request_steps import Chunk

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class StepTime:
    """Duration of a step in seconds, and when each device begins and ends its part: inf and -inf if it has none."""

    seconds: float
    begins: _Array
    ends: _Array


@dataclass(frozen=True)
class Workload:
    """`requests` that arrive together, each of `prompt` tokens, which get `generate` new ones."""

    requests: int
    prompt: int
    generate: int


@dataclass
class VirtualRun:
    """A run of the engine: the times of each request's tokens in seconds, and its number of steps.

    `busy` has the seconds that each device is in a step, from its first op to its last. `held` has, before the end of
    each request, the tokens that the states of all have then: more than at any time since the end before.
    """

    times: list[list[float]]
    steps: int = 0
    busy: _Array | float = 0.0
    held: list[tuple[int, ...]] = field(default_factory=list)


def run_virtually(
    workload: Workload, limits: Limits, depth: int, time_of: Callable[[Sequence[Chunk]], StepTime]
) -> VirtualRun:
    """Run the engine for a workload, with `depth` steps in flight; `time_of` returns the time of a step.

    Raises RunError for requests that never fit into memory.
    """
    scheduler = Scheduler(limits)
    for number in range(workload.requests):
        scheduler.add(number, workload.prompt, workload.prompt + workload.generate)
    run = VirtualRun([[] for _ in range(workload.requests)])
    flight: deque[tuple[dict[int, Span], float]] = deque()
    computed: dict[int, int] = {}
    now: float = 0.0
    free: _Array | float = 0.0
    while True:
        while len(flight) < depth:
            spans = scheduler.plan(busy={number for planned, _ in flight for number in planned}, depth=depth)
            if not spans:
                break
            step = time_of([_chunk(span, workload.prompt + len(run.times[n])) for n, span in spans.items()])
            start = max(now, float(np.max(free - step.begins)))
            free = np.maximum(free, start + step.ends)
            run.busy += np.maximum(step.ends - step.begins, 0.0)
            flight.append((spans, start + step.seconds))
            computed |= {number: span.stop for number, span in spans.items()}
        if not flight:
            return run
        spans, end = flight.popleft()
        now = max(now, end)
        run.steps += 1
        for number, span in spans.items():
            times = run.times[number]
            if span.stop < workload.prompt + len(times):
                continue
            times.append(now)
            if len(times) < workload.generate:
                scheduler.extend(number)
            else:
                run.held.append(tuple(computed.values()))
                scheduler.remove(number)
                del computed[number]


def _chunk(span: Span, known: int) -> Chunk:
    return Chunk(span.start, span.stop - span.start, int(span.stop == known))
