"""Processes of a search: everything is done once, by some process; none outlives the search, and none is waited for."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import active_children

import pytest
import torch

from distir_relax.errors import RunError
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search import Candidate, Outcome, process_workers
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

    with pytest.raises(RunError, match=r"a process of the search died, at .* with 7 samples"):
        list(run_in_processes(dies, groups((3, 3), (3, 3)), 2))
    assert not active_children()


def test_none_outlives_a_search_that_is_left() -> None:
    found = run_in_processes(by_this_process, groups((300,), (300,)), 2)
    next(found)
    found.close()
    assert not active_children()


def test_workers_run_torch_after_its_threads_ran_here() -> None:
    def reduces(candidate: Candidate) -> Outcome:
        finite = bool(torch.zeros(1 << 20).isfinite().all())
        return Outcome(str(candidate.strategy), candidate.samples, 1.0, torch.get_num_threads(), finite)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.zeros(1 << 20).isfinite().all()
        outcomes = list(run_in_processes(reduces, groups((2,), (2,)), 2))
    finally:
        torch.set_num_threads(threads)
    assert [outcome.memory for outcome in outcomes] == [1] * 4


def test_stalled_worker_is_named_with_its_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(candidate: Candidate) -> Outcome:
        if candidate.samples == 2:
            signal.pause()
        return by_this_process(candidate)

    monkeypatch.setattr(process_workers, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(process_workers, "_POLL_SECONDS", 0.1)
    with pytest.raises(RunError, match=r"has computed nothing for 0.3 s, at .* with 2 samples"):
        list(run_in_processes(waits, groups((3,), (300,)), 2))
    assert not active_children()
