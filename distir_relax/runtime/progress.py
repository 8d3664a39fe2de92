"""Progress and traffic of a rank, as read by the watchdog and the reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Traffic:
    """Calls and bytes sent by one rank, per kind of communication.

    Bytes are those that the rank sends under a ring algorithm, for a group of n ranks: an all-reduce of B bytes
    sends 2 (n-1) B / n; an all-gather every shard but the next rank's; a reduce-scatter its whole input except its own
    part; an all-to-all every piece except its own; a send the whole message. A receive counts nothing.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, sent: int) -> None:
        """Count one call of `kind` that sent `sent` bytes."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + sent

    @property
    def total_bytes(self) -> int:
        """Bytes sent by communication of every kind."""
        return sum(self.bytes.values())


class Point(NamedTuple):
    """The n-th execution (`time`) of a communication of `kind` in a run; `step` is an index, or words without one."""

    step: int | str
    kind: str
    time: int = 0


class Progress:
    """Position of a rank in its program. Written by the rank's thread, read by the watchdog's."""

    def __init__(self) -> None:
        self.current: Point | None = None
        self.last: Point | None = None
        self.since = time.monotonic()
        self.waited = 0.0
        """Seconds in communication that has finished: its transfers, and waiting for peers."""
        self.finished = False
        self.task = ""
        """The current or last pipeline task of the rank: ``1F0`` is a forward of stage 1."""
        self.tasks: list[tuple[str, float, float]] = []
        """The finished tasks of the rank, each with its begin and end, in seconds from `start`."""
        self._start = self._began = 0.0
        self._times: dict[int | str, int] = {}

    def enter(self, step: int | str, kind: str) -> None:
        """Record that the rank starts to wait in communication `kind` of `step` (an index, or words if it has none)."""
        self.since = time.monotonic()
        times = self._times[step] = self._times.get(step, -1) + 1
        self.current = Point(step, kind, times)

    def leave(self) -> None:
        """Record that the communication has finished."""
        self.last, self.current = self.current, None
        self.waited += time.monotonic() - self.since

    def start(self) -> None:
        """Record that the rank starts its program."""
        self._start = time.perf_counter()

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Record the begin of a task."""
        self.task = f"{stage}{kind}{microbatch}"
        self._began = time.perf_counter()

    def end(self) -> None:
        """Record the end of the task."""
        self.tasks.append((self.task, self._began - self._start, time.perf_counter() - self._start))

    @property
    def doing(self) -> str:
        """Return the current or last task of the rank as text; empty if there are no tasks."""
        if not self.task:
            return ""
        return f"after task {self.task}" if self.tasks and self.tasks[-1][0] == self.task else f"in task {self.task}"

    def waiting(self) -> float:
        """Return the seconds that the rank has waited in its current communication; 0 when it is in none."""
        return time.monotonic() - self.since if self.current is not None else 0.0
