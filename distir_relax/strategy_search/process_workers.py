"""Worker processes that simulate candidates, each with programs similar to its previous ones.

They are forked, so the model needs no serialization; outcomes return one by one. Remaining items of a group are
redistributed to idle workers.
"""

from __future__ import annotations

import gc
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from distir_relax.errors import RunError

T = TypeVar("T")
R = TypeVar("R")

Pieces = deque[list[Any]]
"""Items of similar programs, a few at a time."""


def run_in_processes(outcome: Callable[[T], R], groups: Sequence[Sequence[list[T]]], workers: int) -> Iterator[R]:
    """Yield the outcomes of items, such as candidates, as they complete; `groups` are pieces of similar programs.

    No outcome is None. Raises `RunError` if a process died.
    """
    unassigned = deque(deque(group) for group in groups)
    # No more processes than pieces.
    pool = _Pool(outcome, min(workers, sum(map(len, groups))))
    queues: dict[Connection, Pieces] = {connection: deque() for connection in pool.connections}
    try:
        busy = [connection for connection in queues if _send_next(connection, queues, unassigned)]
        while busy:
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                try:
                    result = connection.recv()
                except EOFError:
                    raise RunError("a process of the search died", hint="it may have been out of memory") from None
                if result is not None:
                    yield result
                elif not _send_next(connection, queues, unassigned):
                    busy.remove(connection)
    finally:
        pool.end()


def _send_next(connection: Connection, queues: dict[Connection, Pieces], unassigned: deque[Pieces]) -> bool:
    """Send the next piece: of the process's group, a new one, or the longest queue. Return whether there was one."""
    if not queues[connection]:
        if unassigned:
            queues[connection] = unassigned.popleft()
        elif longest := max(queues.values(), key=len):
            queues[connection].append(longest.pop())
    if not queues[connection]:
        return False
    connection.send(queues[connection].popleft())
    return True


class _Pool:
    """Worker processes, with a connection to each."""

    def __init__(self, outcome: Callable[[Any], object], count: int) -> None:
        context = get_context("fork")
        self.connections: list[Connection] = []
        self.processes: list[ForkProcess] = []
        for _ in range(count):
            parent, child = context.Pipe()
            process = context.Process(target=_serve, args=(outcome, child, [*self.connections, parent]), daemon=True)
            process.start()
            child.close()
            self.connections.append(parent)
            self.processes.append(process)

    def end(self) -> None:
        """Kill all processes."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()


def _serve(outcome: Callable[[Any], object], connection: Connection, others: Sequence[Connection]) -> None:
    """Serve items until the parent closes the connection; the parent handles interrupts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    # Otherwise this end would stay open in other workers, which would wait for a parent that has ended.
    for other in others:
        other.close()
    # Programs and simulations have no cycles.
    gc.disable()
    try:
        while True:
            for item in connection.recv():
                connection.send(outcome(item))
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
