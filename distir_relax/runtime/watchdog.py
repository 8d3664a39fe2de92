"""Ending a run that hangs, with the step of the program in which each rank waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distir_relax.runtime.communicator import Communicator
    from distir_relax.runtime.progress import Point

Steps = Sequence[str] | Mapping[int, str | Sequence[str]]
"""What each step of a program is; of a step in a function that is called several times, what it is each time."""
DEFAULT_TIMEOUT = 120.0


class Watchdog:
    """Watches ranks of this process while its `with` block runs.

    When one waits in a communication for more than `timeout` seconds, or a rank elsewhere has announced that it does,
    calls `on_stall` once with a line for each rank watched. A `timeout` of 0 watches nothing.
    """

    def __init__(
        self,
        ranks: Sequence[tuple[Communicator, Steps]],
        timeout: float,
        on_stall: Callable[[list[str]], None],
        announce: Callable[[], None] = lambda: None,
        announced: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._on_stall = on_stall
        self._announce = announce
        self._announced = announced
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distir-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._timeout > 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._timeout > 0 and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def interval(self) -> float:
        """Seconds between two looks at the ranks."""
        return min(0.5, self._timeout / 8)

    def _watch(self) -> None:
        while not self._over.wait(self.interval):
            stalled = any(comm.progress.waiting() > self._timeout for comm, _ in self._ranks)
            if stalled:
                self._announce()
            if stalled or self._announced():
                self._on_stall([describe(comm, steps) for comm, steps in self._ranks])
                return


def describe(comm: Communicator, steps: Steps) -> str:
    """Where a rank is: `rank 3 waits in step #127 %h = recv (model.py:42); it last finished step #126 ...`."""
    current, last = comm.progress.current, comm.progress.last
    if current is not None:
        doing = f"waits in {_name(current, steps)}"
    elif comm.progress.finished:
        doing = "has finished its program"
    else:
        doing = "computes" if last is not None else "has not come to its first communication"
    done = f"; it last finished {_name(last, steps)}" if last is not None else ""
    return f"rank {comm.rank} {doing}{done}"


def _name(point: Point, steps: Steps) -> str:
    step = point.step
    if isinstance(step, str):
        return step
    known = step in steps if isinstance(steps, Mapping) else step < len(steps)
    what = steps[step] if known else point.kind
    return f"step #{step} {what if isinstance(what, str) else what[point.time % len(what)]}"
