"""Worker processes that simulate candidates, each with programs similar to its previous ones.

They are forked, so the model needs no serialization; outcomes return one by one. Remaining items of a group are
redistributed to idle workers. A forked process has none of the threads of its parent's OpenMP pool, which it would wait
for in torch's first parallel loop: workers run torch on one thread.
"""

from __future__ import annotations

import gc
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import psutil

from distir_relax.errors import RunError

T = TypeVar("T")
R = TypeVar("R")

Pieces = deque[list[Any]]
"""Items of similar programs, a few at a time."""

STALL_SECONDS = 60.0
"""Seconds without any computation after which a worker with an item is stalled: it waits for something forever."""
_POLL_SECONDS = 1.0


def run_in_processes(outcome: Callable[[T], R], groups: Sequence[Sequence[list[T]]], workers: int) -> Iterator[R]:
    """Yield the outcomes of items, such as candidates, as they complete; `groups` are pieces of similar programs.

    No outcome is None. Raises `RunError` with the item if a process died, or has computed nothing for `STALL_SECONDS`.
    """
    unassigned = deque(deque(group) for group in groups)
    # No more processes than pieces.
    pool = [_Worker(process, parent) for process, parent in _fork(outcome, min(workers, sum(map(len, groups))))]
    try:
        busy = {worker.connection: worker for worker in pool if worker.send_next(pool, unassigned)}
        while busy:
            for connection in wait(list(busy), _POLL_SECONDS):
                worker = busy[connection]  # type: ignore[index]
                result = worker.receive()
                if result is not None:
                    yield result
                elif not worker.send_next(pool, unassigned):
                    del busy[worker.connection]
            for worker in busy.values():
                worker.check_progress()
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    """A worker process, its connection, the pieces that it is to process, and the items that it has."""

    def __init__(self, process: ForkProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection
        self.queue: Pieces = deque()
        self.items: deque[Any] = deque()
        # The processor time at the last check, when that was, and the seconds for which it has not changed.
        self._used, self._checked, self._idle = 0.0, time.monotonic(), 0.0

    def send_next(self, pool: Sequence[_Worker], unassigned: deque[Pieces]) -> bool:
        """Send the next piece: of this queue, a new group, or the longest queue. Return whether there was one."""
        if not self.queue:
            if unassigned:
                self.queue = unassigned.popleft()
            elif longest := max((worker.queue for worker in pool), key=len):
                self.queue.append(longest.pop())
        if not self.queue:
            return False
        piece = self.queue.popleft()
        self.items.extend(piece)
        self.connection.send(piece)
        return True

    def receive(self) -> Any:
        """Return the outcome of the next item, or None after the last. Raises `RunError` if the process died."""
        try:
            result = self.connection.recv()
        except EOFError:
            raise RunError(
                f"a process of the search died{self._position()}", hint="it may have been out of memory"
            ) from None
        self._idle = 0.0
        if result is not None:
            self.items.popleft()
        return result

    def check_progress(self) -> None:
        """Raise `RunError` if the process has used no processor time for `STALL_SECONDS`."""
        elapsed = time.monotonic() - self._checked
        if elapsed < _POLL_SECONDS:
            return
        self._checked += elapsed
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:  # It has ended: `receive` reports it.
            return
        used = times.user + times.system
        # A longer time is one in which this process was stopped itself, or its caller was busy.
        self._idle = 0.0 if used > self._used else self._idle + min(elapsed, 2 * _POLL_SECONDS)
        self._used = used
        if self._idle > STALL_SECONDS:
            raise RunError(
                f"process {self.process.pid} of the search has computed nothing for {STALL_SECONDS:g} s"
                f"{self._position()}",
                hint="search with --workers 1 (workers=1), which starts no processes",
            )

    def end(self) -> None:
        """Kill the process."""
        self.connection.close()
        self.process.kill()
        self.process.join()

    def _position(self) -> str:
        return f", at {self.items[0]}" if self.items else ""


def _fork(outcome: Callable[[Any], object], count: int) -> list[tuple[ForkProcess, Connection]]:
    """Start worker processes, with a connection to each."""
    context = get_context("fork")
    started: list[tuple[ForkProcess, Connection]] = []
    for _ in range(count):
        parent, child = context.Pipe()
        others = [*(connection for _, connection in started), parent]
        process = context.Process(target=_serve, args=(outcome, child, others), daemon=True)
        process.start()
        child.close()
        started.append((process, parent))
    return started


def _serve(outcome: Callable[[Any], object], connection: Connection, others: Sequence[Connection]) -> None:
    """Serve items until the parent closes the connection; the parent handles interrupts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    # Otherwise this end would stay open in other workers, which would wait for a parent that has ended.
    for other in others:
        other.close()
    import torch

    torch.set_num_threads(1)
    # Programs and simulations have no cycles.
    gc.disable()
    try:
        while True:
            for item in connection.recv():
                connection.send(outcome(item))
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
