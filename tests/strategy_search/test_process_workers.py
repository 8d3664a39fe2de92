"""Processes of a search: everything is done once, by some process; none outlives the search, and none is waited for."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import active_children

import pytest

from distir_relax.errors import RunError
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search import Candidate, Outcome
from distir_relax.strategy_search.process_workers import run_in_processes


def groups(*sizes: tuple[int, ...]) -> list[list[list[Candidate]]]:
    """Candidates that differ in their samples, by the sizes of the pieces of each group."""
    numbers = iter(range(1, 1000))
    return [[[Candidate(Strategy(), next(numbers)) for _ in range(size)] for size in group] for group in sizes]


def by_this_process(candidate: Candidate) -> Outcome:
    """Tells who did it, and takes a moment."""
    time.sleep(0.002)
    return Outcome(str(candidate.strategy), candidate.samples, 1.0, os.getpid(), True)


@pytest.mark.parametrize(
    ("sizes", "workers"), [(((5, 5, 1), (3,), (7, 2)), 3), (((1, 1, 1, 1, 1),), 2), (((4,),), 5), ((), 3)]
)
def test_each_is_done_once(sizes: tuple[tuple[int, ...], ...], workers: int) -> None:
    wanted = groups(*sizes)
    found = list(run_in_processes(by_this_process, wanted, workers))
    samples = sorted(candidate.samples for group in wanted for piece in group for candidate in piece)
    assert sorted(outcome.samples for outcome in found) == samples
    pieces = sum(map(len, sizes))
    assert len({outcome.memory for outcome in found}) == min(workers, pieces)
    assert os.getpid() not in {outcome.memory for outcome in found}


def test_a_process_that_is_ended_is_an_error() -> None:
    def dies(candidate: Candidate) -> Outcome:
        if candidate.samples == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return by_this_process(candidate)

    with pytest.raises(RunError, match="a process of the search died"):
        list(run_in_processes(dies, groups((3, 3), (3, 3)), 2))
    assert not active_children()


def test_none_outlives_a_search_that_is_left() -> None:
    found = run_in_processes(by_this_process, groups((300,), (300,)), 2)
    next(found)
    found.close()
    assert not active_children()
