"""Processes of a launch, independent of the mesh: membership, agreement, termination."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from distir_relax.errors import DistIRError, RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.error_messages import error_to_json, user_error_from_json
from distir_relax.runtime.progress import Progress
from distir_relax.runtime.watchdog import Steps


def check_size(mesh: DeviceMesh, size: int) -> None:
    """Raise RunError unless `size` is the number of ranks of `mesh`."""
    if size == mesh.size:
        return
    grid = ", ".join(f"{axis}={extent}" for axis, extent in zip(mesh.axes, mesh.shape, strict=True))
    raise RunError(
        f"expected {mesh.size} ranks for the mesh ({grid}), found {size}",
        hint=f"start {mesh.size}, with the option -n {mesh.size}, or compile for another number of ranks",
    )


class World(ABC):
    """All processes of a launch, seen from one of them.

    `host_of` has for each rank the first rank of its host. `progress` is this rank's position, `step_seconds` the times
    of its last steps, `steps` the descriptions of its program's steps, and `in_run` whether it is running the program.
    Stall detection reads them from its own thread; `report` gets the error of a stall before the launch ends, and
    prints it. `ended` returns a line for each rank of this node that has exited; `announce` tells them that this one
    ends the launch, and is called by `abort`; `finalize` ends the use of the launcher's library.
    """

    kind: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    is_alone = False
    """Whether this process was started alone, and has all ranks of a program as threads."""

    def __init__(self) -> None:
        self.host_of = [0]
        self.progress = Progress()
        self.step_seconds: deque[float] = deque(maxlen=100)
        self.steps: Steps = ()
        self.in_run = False
        self.ended: Callable[[], list[str]] = list
        self.announce: Callable[[], None] = lambda: None
        self.finalize: Callable[[], object] = lambda: None
        self.report: Callable[[DistIRError], None] = _print_error

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Record that this rank waits for others, outside of a program's steps, while the block runs."""
        progress = self.progress
        progress.enter(what, "agreement")
        try:
            yield
        finally:
            progress.leave()

    @contextmanager
    def running(self, progress: Progress, steps: Steps) -> Iterator[None]:
        """Record that this rank runs a program with these `steps` while the block runs, at `progress`."""
        before = self.progress
        self.progress, self.steps, self.in_run = progress, steps, True
        try:
            yield
        finally:
            self.progress, self.steps, self.in_run = before, (), False

    def exchange(self, value: Any, what: str = "an agreement of all ranks") -> list[Any]:
        """Return every rank's `value` (of JSON's types), in rank order; `what` describes the wait."""
        with self.waiting(what):
            return [json.loads(text) for text in self._exchange(json.dumps(value))]

    @abstractmethod
    def communicator(self, mesh: DeviceMesh, device: str = "cpu") -> Communicator:
        """Return a communicator over `mesh`, whose world size must be `size`. Collective: all ranks call it."""

    @abstractmethod
    def _exchange(self, text: str) -> list[str]:
        """Return every rank's `text`, in rank order."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the launch now, with exit code `code`. Does not return."""

    @abstractmethod
    def send_message(self, peer: int, message: str) -> None:
        """Send a short message to another rank, without waiting for it. May be called from any thread."""

    @abstractmethod
    def received_messages(self) -> list[tuple[int, str]]:
        """Return the messages received since the last call, each with its sender. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Shut down in good order; every rank calls this."""

    def exit(self) -> NoReturn:
        """Shut down in good order and end this process with code 0; every rank calls this.

        It leaves out the interpreter's own teardown, which takes a second with torch.
        """
        self.close()
        self.finalize()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def agree(self, error: DistIRError | None) -> None:
        """Raise the same error on every rank if any rank has one; return on every rank if none has."""
        mine = None if error is None else error_to_json(error)
        failures = {
            rank: theirs
            for rank, theirs in enumerate(self.exchange(mine, "the agreement to go on"))
            if theirs is not None
        }
        if not failures:
            return
        first = min(failures)
        raised = user_error_from_json(failures[first])
        if len(failures) < self.size and self.size > 1:
            raised.message += f" (on {_ranks(list(failures))} of {self.size})"
        raise raised

    def agree_equal(self, things: Mapping[str, str]) -> None:
        """Raise RunError on every rank unless all have the same text for each key: `{"the inputs": "3f2a..."}`."""
        everyone = self.exchange(dict(things), "the agreement on what is run")
        for what, mine in everyone[0].items():
            different = [rank for rank, theirs in enumerate(everyone) if theirs.get(what) != mine]
            if different:
                theirs = everyone[different[0]].get(what)
                raise RunError(
                    f"the ranks disagree on {what}: rank 0 has {mine}, {_ranks(different)} {theirs}",
                    hint="every rank must be given the same bundle and inputs, and run the same version",
                )


class Alone(World):
    """A process that was started alone: the only one, with all ranks of a program as threads."""

    kind = "threads"
    rank, size, local_rank, local_size = 0, 1, 0, 1
    is_alone = True

    def exchange(self, value: Any, what: str = "") -> list[Any]:
        """See `World`."""
        return [value]

    def communicator(self, mesh: DeviceMesh, device: str = "cpu") -> Communicator:
        """See `World`: there is no other process."""
        raise NotImplementedError("threads of a process have their own communicators")

    def _exchange(self, text: str) -> list[str]:
        return [text]

    def abort(self, code: int) -> NoReturn:
        """See `World`."""
        raise SystemExit(code)

    def send_message(self, peer: int, message: str) -> None:
        """See `World`: there is nobody to send it to."""

    def received_messages(self) -> list[tuple[int, str]]:
        """See `World`."""
        return []

    def close(self) -> None:
        """See `World`."""


def _print_error(error: DistIRError) -> None:
    # One write, so that it does not mix with the output of other ranks.
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


ALONE = Alone()
