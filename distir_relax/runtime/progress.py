"""What a rank is doing and has sent: the record that the watchdog and the reports read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Calls and bytes sent by one rank, per kind of communication.

    Bytes are what the rank sends under a ring algorithm, for a group of n ranks: an all-reduce of B
    bytes sends 2 (n-1) B / n; an all-gather every shard but the next rank's; a reduce-scatter all of its input but
    its own part; an all-to-all every piece that is not its own; a send the whole message. A receive counts nothing.
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


@dataclass(frozen=True, slots=True)
class Point:
    """A communication of `kind`: its `step`, an index or words where it has none, for the n-th `time` of the run."""

    step: int | str
    kind: str
    time: int = 0


class Progress:
    """Where a rank is in its program. Written by the rank's thread, read by the watchdog's."""

    def __init__(self) -> None:
        self.current: Point | None = None
        self.last: Point | None = None
        self.since = time.monotonic()
        self.finished = False
        self.task = ""
        """The task of a pipeline that the rank does, or else did last: ``1F0`` is a forward of stage 1."""
        self.tasks: list[tuple[str, float, float]] = []
        """The tasks that the rank has done, each with when it began and ended, in seconds from `start`."""
        self._start = self._began = 0.0
        self._times: dict[int | str, int] = {}

    def enter(self, step: int | str, kind: str) -> None:
        """The rank starts to wait in communication `kind` of `step` (an index, or words for what has no index)."""
        self.since = time.monotonic()
        times = self._times[step] = self._times.get(step, -1) + 1
        self.current = Point(step, kind, times)

    def leave(self) -> None:
        """The rank has done what it entered."""
        self.last, self.current = self.current, None

    def start(self) -> None:
        """The rank starts its program."""
        self._start = time.perf_counter()

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """The rank begins a task."""
        self.task = f"{stage}{kind}{microbatch}"
        self._began = time.perf_counter()

    def end(self) -> None:
        """The rank has done its task."""
        self.tasks.append((self.task, self._began - self._start, time.perf_counter() - self._start))

    @property
    def doing(self) -> str:
        """In which task the rank is, or behind which; nothing where there are none."""
        if not self.task:
            return ""
        return f"behind task {self.task}" if self.tasks and self.tasks[-1][0] == self.task else f"in task {self.task}"

    def waiting(self) -> float:
        """Seconds that the rank has been waiting in its current communication; 0 when it is in none."""
        return time.monotonic() - self.since if self.current is not None else 0.0
