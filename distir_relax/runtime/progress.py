"""Progress and traffic of a rank, as read by the watchdog and the reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from distir_relax.runtime.native_waits import NativeWaits


@dataclass
class Traffic:
    """Calls and bytes sent by one rank, per kind of communication.

    Bytes are those that the rank sends under a ring algorithm, for a group of n ranks: an all-reduce of B bytes
    sends 2 (n-1) B / n; an all-gather every shard but the next rank's; a reduce-scatter its whole input except its own
    part; an all-to-all every piece except its own; a send the whole message. A receive counts nothing.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, sent: int, calls: int = 1) -> None:
        """Count calls of `kind` that sent `sent` bytes together."""
        self.calls[kind] = self.calls.get(kind, 0) + calls
        self.bytes[kind] = self.bytes.get(kind, 0) + sent

    def merge(self, other: Traffic) -> None:
        """Count what another has counted."""
        for kind, calls in other.calls.items():
            self.add(kind, other.bytes[kind], calls)

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
    """Position of a rank in its program. Written by the rank's thread, read by the watchdog's.

    `native` is what kernels record that wait for other ranks, in all-reduces.
    """

    def __init__(self, native: NativeWaits | None = None) -> None:
        self._native = NativeWaits() if native is None else native
        self._native.forget()
        self._native_before = self._native.waited
        self._current: Point | None = None
        self._last: Point | None = None
        self.since = time.monotonic()
        self._waited = 0.0
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
        self._current = Point(step, kind, times)

    def resume(self, step: int | str, kind: str) -> None:
        """Record that the rank starts to wait for the communication that it last started as `step`."""
        self.since = time.monotonic()
        self._current = Point(step, kind, self._times.get(step, 0))

    def leave(self) -> None:
        """Record that the communication has finished."""
        self._last, self._current = self._current, None
        self._native.forget()
        self._waited += time.monotonic() - self.since

    def forget_last(self) -> None:
        """Forget the last communication."""
        self._last = None
        self._native.forget()

    @property
    def current(self) -> Point | None:
        """The communication in which the rank waits."""
        if self._current is None and (native := self._native.step) is not None:
            return _all_reduce(native)
        return self._current

    @property
    def last(self) -> Point | None:
        """The last communication that has finished."""
        return self._last if (native := self._native.last) is None else _all_reduce(native)

    @property
    def waited(self) -> float:
        """Seconds in communication that has finished: its transfers, and waiting for peers."""
        return self._waited + self._native.waited - self._native_before

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
        if self.current is None:
            return 0.0
        since = self.since if self._current is not None else max(self.since, self._native.since)
        return time.monotonic() - since


def _all_reduce(native: tuple[int, int]) -> Point:
    step, time = native
    return Point(step, "all_reduce", time)
