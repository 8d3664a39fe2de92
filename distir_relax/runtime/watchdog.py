"""Watchdog: end a run that hangs, reporting the step in which each rank waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from distir_relax.errors import LostError
from distir_relax.runtime.progress import Point, Progress

Steps = Sequence[str] | Mapping[int, str | Sequence[str]]
"""Descriptions of the steps of a program; a step of a function that is called several times has one per call."""
DEFAULT_TIMEOUT = 120.0


class Watchdog:
    """Thread that calls `poll` at least twice a second while the block runs, until it returns True.

    A `timeout` (seconds) of 0 disables it.
    """

    def __init__(self, timeout: float, poll: Callable[[], bool]) -> None:
        self._timeout = timeout
        self._poll = poll
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
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(0.5, self._timeout / 8)):
            if self._poll():
                return


def describe(rank: int, progress: Progress, steps: Steps) -> str:
    """Describe a rank's position: `rank 3 waits in step #127 %h = recv (model.py:42); it last finished step #126 ...`.

    In a pipeline, with its current or last task: `rank 3 (in task 1F0) computes`.
    """
    current, last = progress.current, progress.last
    if current is not None:
        doing = f"waits in {describe_point(current, steps)}"
    elif progress.finished:
        doing = "has finished its program"
    else:
        doing = "computes" if last is not None else "has not reached its first communication"
    done = f"; it last finished {describe_point(last, steps)}" if last is not None else ""
    task = f" ({progress.doing})" if progress.doing else ""
    return f"rank {rank}{task} {doing}{done}"


def stall_error(timeout: float, lines: Sequence[str], silent: bool = False) -> LostError:
    """Return the error of a run in which a rank has waited for more than `timeout` seconds.

    `lines` describe the ranks; `silent` is whether one of them did not answer.
    """
    message = "\n  ".join([f"a rank has waited for more than {timeout:g} s", *lines])
    if silent:
        return LostError(
            message, hint="a rank that does not answer was stopped, or its node is gone: start the launch again"
        )
    return LostError(message, hint="the programs may be deadlocked; --timeout gives slow steps more time")


def describe_point(point: Point, steps: Steps) -> str:
    """Describe a communication: `step #127 %h = recv (model.py:42)`."""
    step = point.step
    if isinstance(step, str):
        return step
    described = step in steps if isinstance(steps, Mapping) else step < len(steps)
    what = steps[step] if described else point.kind
    return f"step #{step} {what if isinstance(what, str) else what[point.time % len(what)]}"
