"""Grid search: every candidate simulated, on all cores or all ranks of a launch; what is done is kept.

Candidates whose programs are alike go to one worker together, for they share most of the compiler's work. A file of
results has a line of JSON for each, written as it comes: a search that is given it again goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from distir_relax.analysis.simulation import Simulation
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError, RunError
from distir_relax.ir import print_module
from distir_relax.strategy_search.evaluate import Draw, Evaluator
from distir_relax.strategy_search.outcome import Outcome
from distir_relax.strategy_search.process_workers import in_processes
from distir_relax.strategy_search.search_space import Candidate, Space
from distir_relax.support import parse_json, read_text

Told = Callable[[Outcome, int], None]
"""Hears of each outcome when it is there, and of how many there will be."""

_PIECE = 24
"""How many candidates of alike programs are done at once, at most: few enough that all workers end together."""
_SEARCHED = 4
"""So of those whose placements are looked for, which take longer."""


@dataclass(frozen=True)
class Search:
    """What a search found: the `outcomes` of all candidates, `known` of which were from a file, in `seconds`."""

    space: Space
    profile: Profile
    outcomes: tuple[Outcome, ...]
    known: int = 0
    seconds: float = 0.0
    evaluator: Evaluator | None = field(default=None, repr=False, compare=False)
    untried: int = 0
    """How many more candidates there are, of a search that does not try all."""

    def simulate(self, candidate: Candidate) -> Simulation:
        """The simulation of one of the candidates, with its time line, as the search made it. Raises as that does."""
        assert self.evaluator is not None, "a search that is known from its outcomes alone has no model"
        return self.evaluator.simulate(candidate)

    @property
    def ranked(self) -> list[Outcome]:
        """Those that fit, the fastest first; of equally fast ones the one that needs less memory."""
        fitting = [outcome for outcome in self.outcomes if outcome.fits]
        return sorted(fitting, key=lambda o: (-o.throughput, o.memory, o.strategy))

    @property
    def too_large(self) -> list[Outcome]:
        """Those that need more memory than a device has, the smallest first."""
        return sorted((o for o in self.outcomes if o.seconds and not o.fits), key=lambda o: o.memory)

    @property
    def refused(self) -> list[Outcome]:
        """Those of which there is no prediction."""
        return [outcome for outcome in self.outcomes if outcome.refused]

    def best_by_batch(self) -> dict[int, Outcome]:
        """The fastest that fits for each number of samples."""
        found: dict[int, Outcome] = {}
        for outcome in self.ranked:
            found.setdefault(outcome.samples, outcome)
        return dict(sorted(found.items()))

    def as_json(self, top: int = 10) -> dict[str, Any]:
        """For machines: how many there were, how many were discarded, the best."""
        discarded = len(self.too_large) + len(self.refused)
        best = [outcome.as_json() for outcome in self.ranked[:top]]
        return {"configurations": len(self.outcomes), "discarded": discarded, "best": best}


@dataclass
class _Kept:
    """Outcomes in a file: those of a search before, and new ones as they come."""

    path: Path
    key: str
    known: dict[Candidate, Outcome] = field(default_factory=dict)
    file: TextIO | None = None

    def open(self) -> None:
        """Read what is there. Raises `DistIRError` for a file of anything else, and where none can be written."""
        if self.path.exists():
            self._read(read_text(self.path, DistIRError).splitlines())
        try:
            # A line that was being written when the last search ended is left out.
            partial = self.path.with_name(f".{self.path.name}.partial")
            rows = [{"search": self.key}, *(outcome.as_row() for outcome in self.known.values())]
            partial.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            partial.replace(self.path)
            self.file = self.path.open("a")
        except OSError as wrong:
            message = f"results of a search cannot be kept here: {wrong.strerror}"
            raise DistIRError(message, str(self.path)) from None

    def _read(self, lines: Sequence[str]) -> None:
        where = str(self.path)
        for number, line in enumerate(lines):
            if number and number == len(lines) - 1 and not line.endswith("}"):
                break
            row = parse_json(line, DistIRError, f"{where}:{number + 1}")
            if not isinstance(row, dict) or (not number and "search" not in row):
                raise DistIRError("these are not the results of a search", where, "name a file that there is not yet")
            if number:
                outcome = Outcome.from_row(row, f"{where}:{number + 1}")
                self.known[outcome.candidate] = outcome
            elif row["search"] != self.key:
                message = "these are results of another model, or for another machine"
                raise DistIRError(message, where, "name another file")

    def add(self, outcome: Outcome) -> None:
        """Write one."""
        assert self.file is not None
        self.file.write(json.dumps(outcome.as_row()) + "\n")
        self.file.flush()


def search_grid(
    source: Source,
    profile: Profile,
    space: Space,
    *,
    workers: int | None = None,
    resume: str | Path | None = None,
    executor: Executor | None = None,
    told: Told | None = None,
    draw: Draw | None = None,
) -> Search:
    """Simulate all candidates of a space.

    `source` has a batch larger than any of the space. They are worked through by `workers` processes (as many as there
    are cores), or by an `executor`, for whose workers `begin_worker` was called. `told` hears of each outcome, `draw`
    makes their time lines. `resume` is a file that keeps outcomes, whatever ends the search, and from which it goes on.

    Raises `DistIRError` for a file of another search, `RunError` where a process of it was ended.
    """
    start = time.perf_counter()
    candidates = space.candidates()
    kept = None if resume is None else _Kept(Path(resume), _key(source, profile))
    if kept is not None:
        kept.open()
    found = {c: kept.known[c] for c in candidates if kept is not None and c in kept.known}
    known = len(found)
    for outcome in found.values():
        if told is not None:
            told(outcome, len(candidates))
    waiting = [candidate for candidate in candidates if candidate not in found]
    evaluator = Evaluator(source, profile, candidates, draw)
    for outcome in outcomes_of(evaluator, waiting, workers or os.cpu_count() or 1, executor):
        found[outcome.candidate] = outcome
        if kept is not None:
            kept.add(outcome)
        if told is not None:
            told(outcome, len(candidates))
    outcomes = tuple(found[candidate] for candidate in candidates)
    return Search(space, profile, outcomes, known, time.perf_counter() - start, evaluator)


_EVALUATOR: Evaluator | None = None


def begin_worker(evaluator: Evaluator) -> None:
    """Let this process work for a search."""
    global _EVALUATOR
    _EVALUATOR = evaluator


def work(candidates: Sequence[Candidate]) -> list[Outcome]:
    """The outcomes of candidates, in a process that `begin_worker` was called in."""
    assert _EVALUATOR is not None, "a worker begins with begin_worker"
    return [_EVALUATOR.outcome(candidate) for candidate in candidates]


def outcomes_of(
    evaluator: Evaluator, candidates: Sequence[Candidate], workers: int, executor: Executor | None
) -> Iterator[Outcome]:
    """The outcomes of candidates, as they come: by so many processes, or an executor. Raises as `search_grid` does."""
    if executor is not None:
        yield from _done(executor, list(chain.from_iterable(_groups(candidates))))
    elif workers == 1 or len(candidates) <= 1:
        for piece in chain.from_iterable(_groups(candidates)):
            yield from map(evaluator.outcome, piece)
    else:
        yield from in_processes(evaluator.outcome, _groups(candidates), workers)


def _done(executor: Executor, pieces: Sequence[Sequence[Candidate]]) -> Iterator[Outcome]:
    futures = [executor.submit(work, piece) for piece in pieces]
    try:
        for future in as_completed(futures):
            yield from future.result()
    except BrokenExecutor:
        raise RunError("a process of the search was ended", hint="it may have been out of memory") from None
    finally:
        for future in futures:
            future.cancel()


def _groups(candidates: Iterable[Candidate]) -> list[list[list[Candidate]]]:
    """Candidates of alike programs together, those that take longest first, each group in small pieces."""
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        s = candidate.strategy
        options = s.pipeline, s.schedule, s.chunks, s.zero, s.checkpoint, s.sequence_parallel, s.placements
        # What placements are looked for of is the same on every mesh.
        group = options if s.placements == "auto" else (s.data, s.tensor, *options)
        groups.setdefault(group, []).append(candidate)
    found = []
    for alike in groups.values():
        # So meshes follow each other.
        alike.sort(key=lambda c: (c.strategy.microbatches, c.samples))
        size = _PIECE if alike[0].strategy.placements != "auto" else _SEARCHED
        found.append([alike[i : i + size] for i in range(0, len(alike), size)])
    return sorted(found, key=lambda g: -sum(c.strategy.microbatches * c.strategy.pipeline for p in g for c in p))


def _key(source: Source, profile: Profile) -> str:
    """What results depend on besides their candidates."""
    text = json.dumps([print_module(source.imported.module), asdict(profile), str(source.training)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()
