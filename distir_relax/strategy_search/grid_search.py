"""Grid search: simulate every candidate, on all cores or all ranks of a launch, with resumable results.

Candidates of similar programs go to the same worker, since they share most of the compilation. A results file has a
line of JSON per outcome, written as it completes: a search with the same file resumes there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.errors import RunError
from distir_relax.simulation.simulation import Simulation
from distir_relax.strategy_search.evaluate import Draw, Evaluator
from distir_relax.strategy_search.outcome import Outcome
from distir_relax.strategy_search.process_workers import run_in_processes
from distir_relax.strategy_search.results_file import open_results
from distir_relax.strategy_search.search_space import Candidate, Space

OutcomeCallback = Callable[[Outcome, int], None]
"""A callback for each outcome as it completes, with the total number of candidates."""

_PIECE = 24
"""Maximum number of candidates of similar programs per task: small, so that all workers finish together."""
_AUTO_PIECE = 4
"""The same for autosharded candidates, which take longer."""


@dataclass(frozen=True)
class Search:
    """The result of a search: all `outcomes`, the number `resumed` from a file, and the `seconds` it took."""

    space: Space
    profile: Profile
    outcomes: tuple[Outcome, ...]
    resumed: int = 0
    seconds: float = 0.0
    evaluator: Evaluator | None = field(default=None, repr=False, compare=False)
    untried: int = 0
    """The number of candidates that were not tried."""

    def simulate(self, candidate: Candidate) -> Simulation:
        """Return the simulation of a candidate, with its timeline. Raises as the search does."""
        assert self.evaluator is not None, "a search without evaluator has no model"
        return self.evaluator.simulate(candidate)

    @property
    def ranked(self) -> list[Outcome]:
        """Return the outcomes that fit, the fastest first, then by memory."""
        fitting = [outcome for outcome in self.outcomes if outcome.fits]
        return sorted(fitting, key=lambda o: (-o.throughput, o.memory, o.strategy))

    @property
    def too_large(self) -> list[Outcome]:
        """Return the outcomes that do not fit, the smallest first."""
        return sorted((o for o in self.outcomes if o.seconds and not o.fits), key=lambda o: o.memory)

    @property
    def refused(self) -> list[Outcome]:
        """Return the outcomes without prediction."""
        return [outcome for outcome in self.outcomes if outcome.refused]

    def best_by_batch(self) -> dict[int, Outcome]:
        """Return the fastest outcome that fits for each number of samples."""
        best: dict[int, Outcome] = {}
        for outcome in self.ranked:
            best.setdefault(outcome.samples, outcome)
        return dict(sorted(best.items()))

    def as_json(self, top: int = 10) -> dict[str, Any]:
        """Return a JSON object: the number of configurations, the number discarded, and the best."""
        discarded = len(self.too_large) + len(self.refused)
        best = [outcome.as_json() for outcome in self.ranked[:top]]
        return {"configurations": len(self.outcomes), "discarded": discarded, "best": best}


def search_grid(
    source: Source,
    profile: Profile,
    space: Space,
    *,
    workers: int | None = None,
    resume: str | Path | None = None,
    executor: Executor | None = None,
    on_outcome: OutcomeCallback | None = None,
    draw: Draw | None = None,
) -> Search:
    """Simulate all candidates of a space.

    `source` has a batch larger than any of the space. The candidates are processed by `workers` processes (default: the
    number of cores), or by an `executor`, whose workers called `begin_worker`. `on_outcome` is called for each outcome,
    `draw` makes the timelines. `resume` is a file of outcomes, from which an interrupted search resumes.

    Raises `DistIRError` for a file of another search, `RunError` if a worker process died.
    """
    start = time.perf_counter()
    candidates = space.candidates()
    results = open_results(resume, source, profile)
    outcomes = {c: results.outcomes[c] for c in candidates if results is not None and c in results.outcomes}
    resumed = len(outcomes)
    for outcome in outcomes.values():
        if on_outcome is not None:
            on_outcome(outcome, len(candidates))
    remaining = [candidate for candidate in candidates if candidate not in outcomes]
    evaluator = Evaluator(source, profile, candidates, draw)
    for outcome in outcomes_of(evaluator, remaining, workers or os.cpu_count() or 1, executor):
        outcomes[outcome.candidate] = outcome
        if results is not None:
            results.add(outcome)
        if on_outcome is not None:
            on_outcome(outcome, len(candidates))
    ordered = tuple(outcomes[candidate] for candidate in candidates)
    return Search(space, profile, ordered, resumed, time.perf_counter() - start, evaluator)


_EVALUATOR: Evaluator | None = None


def begin_worker(evaluator: Evaluator) -> None:
    """Set the evaluator of this worker process."""
    global _EVALUATOR
    _EVALUATOR = evaluator


def work(candidates: Sequence[Candidate]) -> list[Outcome]:
    """Return the outcomes of candidates, in a process that called `begin_worker`."""
    assert _EVALUATOR is not None, "begin_worker was not called"
    return [_EVALUATOR.outcome(candidate) for candidate in candidates]


def outcomes_of(
    evaluator: Evaluator, candidates: Sequence[Candidate], workers: int, executor: Executor | None
) -> Iterator[Outcome]:
    """Yield the outcomes of candidates as they complete, by processes or an executor. Raises as `search_grid` does."""
    if executor is not None:
        yield from _execute(executor, list(chain.from_iterable(_group_candidates(candidates))))
    elif workers == 1 or len(candidates) <= 1:
        for piece in chain.from_iterable(_group_candidates(candidates)):
            yield from map(evaluator.outcome, piece)
    else:
        yield from run_in_processes(evaluator.outcome, _group_candidates(candidates), workers)


def _execute(executor: Executor, pieces: Sequence[Sequence[Candidate]]) -> Iterator[Outcome]:
    futures = [executor.submit(work, piece) for piece in pieces]
    try:
        for future in as_completed(futures):
            yield from future.result()
    except BrokenExecutor:
        raise RunError("a process of the search died", hint="it may have been out of memory") from None
    finally:
        for future in futures:
            future.cancel()


def _group_candidates(candidates: Iterable[Candidate]) -> list[list[list[Candidate]]]:
    """Return candidates grouped by similar programs, the slowest groups first, each in small pieces."""
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        s = candidate.strategy
        options = s.pipeline, s.options
        # Autosharding shares work across meshes.
        key = options if s.placements == "auto" else (s.data, s.tensor, *options)
        groups.setdefault(key, []).append(candidate)
    pieces = []
    for group in groups.values():
        # Order by microbatch, so that meshes are consecutive.
        group.sort(key=lambda c: (c.strategy.microbatches, c.samples))
        size = _PIECE if group[0].strategy.placements != "auto" else _AUTO_PIECE
        pieces.append([group[i : i + size] for i in range(0, len(group), size)])
    return sorted(pieces, key=lambda g: -sum(c.strategy.microbatches * c.strategy.pipeline for p in g for c in p))
