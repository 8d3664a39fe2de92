"""Processes that simulate candidates: each goes on with programs like those that it has made.

They are forked, so they have the model without a word; what they find comes back one by one. What is left of the last
programs is shared out between those that would have nothing to do.
"""

from __future__ import annotations

import gc
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from distir_relax.errors import RunError
from distir_relax.ir import uncollected
from distir_relax.strategy_search.outcome import Outcome
from distir_relax.strategy_search.search_space import Candidate

Pieces = deque[list[Candidate]]
"""Candidates of alike programs, a few at a time."""


def in_processes(
    outcome: Callable[[Candidate], Outcome], groups: Sequence[Sequence[list[Candidate]]], workers: int
) -> Iterator[Outcome]:
    """The outcomes of candidates as they come, by so many processes; `groups` are pieces of alike programs.

    Raises `RunError` where a process was ended.
    """
    waiting = deque(deque(group) for group in groups)
    # None has more than it can use.
    team = _Team(outcome, min(workers, sum(map(len, groups))))
    mine: dict[Connection, Pieces] = {connection: deque() for connection in team.connections}
    try:
        busy = [connection for connection in mine if _next(connection, mine, waiting)]
        while busy:
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                try:
                    found = connection.recv()
                except EOFError:
                    raise RunError("a process of the search was ended", hint="it may have been out of memory") from None
                if found is not None:
                    yield found
                elif not _next(connection, mine, waiting):
                    busy.remove(connection)
    finally:
        team.end()


def _next(connection: Connection, mine: dict[Connection, Pieces], waiting: deque[Pieces]) -> bool:
    """Give a process a piece: of what it is at, or of what nobody has begun, or of what another would do later."""
    if not mine[connection]:
        if waiting:
            mine[connection] = waiting.popleft()
        elif longest := max(mine.values(), key=len):
            mine[connection].append(longest.pop())
    if not mine[connection]:
        return False
    connection.send(mine[connection].popleft())
    return True


class _Team:
    """Processes, with a connection to each."""

    def __init__(self, outcome: Callable[[Candidate], Outcome], count: int) -> None:
        context = get_context("fork")
        self.connections: list[Connection] = []
        self.processes: list[ForkProcess] = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(outcome, there, [*self.connections, here]), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def end(self) -> None:
        """End all, whatever they are at."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()


def _serve(outcome: Callable[[Candidate], Outcome], connection: Connection, others: Sequence[Connection]) -> None:
    """Work until there is nothing more; it is left to the parent to end when a person says so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    # Else this end would stay open for others, who would wait for a parent that is no more.
    for other in others:
        other.close()
    # What the parent made stays, and is not gone through again.
    gc.freeze()
    try:
        while True:
            with uncollected():
                for candidate in connection.recv():
                    connection.send(outcome(candidate))
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
