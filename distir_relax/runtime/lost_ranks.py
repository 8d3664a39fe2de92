"""Lost ranks: name the killed rank when the launcher ends the others because of it.

A launcher such as mpirun sends SIGTERM to the other ranks and, a fraction of a second later, SIGKILL. Their main
threads wait in MPI, where no signal handler of Python runs, so a thread reads the signal from a pipe.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType

from distir_relax.runtime.local_ranks import has_ended, processes_of_this_node
from distir_relax.runtime.rank_record import write_record
from distir_relax.runtime.watchdog import describe
from distir_relax.runtime.world import World

# Seconds until the exit of a rank is visible, and before this one exits, so that it does not appear lost itself.
_EXIT_VISIBLE, _EXIT_DELAY = 0.1, 1.0


class LostRanks:
    """On SIGTERM, make one rank of this node name the other ranks of the node that have exited.

    A rank that ends the launch itself has printed the reason: it announces that to the others by datagrams, and is not
    named. In a thread other than the main one signals cannot be read, and nothing is named.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._here, self._there = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="distir-lost-ranks", daemon=True)
        self._before: tuple[int, object] | None = None
        self._post = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._post.setblocking(False)

    def __enter__(self) -> LostRanks:
        self._processes = processes_of_this_node()
        self._world.ended, self._world.announce = self.ended, self.announce
        with suppress(OSError):
            self._post.bind(_address(self._world.rank))
        if threading.current_thread() is threading.main_thread():
            self._there.setblocking(False)
            handler = signal.getsignal(signal.SIGTERM)
            if handler is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _ends_in_thread)
            self._before = signal.set_wakeup_fd(self._there.fileno(), warn_on_full_buffer=False), handler
            self._thread.start()
        return self

    def ended(self) -> list[str]:
        """Return a line for each rank of this node that has exited: "rank 1 has ended (process 1234)"."""
        return [self._line(rank) for rank, process in sorted(self._processes.items()) if has_ended(process)]

    def announce(self) -> None:
        """Tell the agent, and the other ranks of this node, that this one ends the launch."""
        write_record(self._world)
        for rank in set(self._processes) - {self._world.rank}:
            with suppress(OSError):
                self._post.sendto(str(self._world.rank).encode(), _address(rank))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.set_wakeup_fd(self._before[0])
            if signal.getsignal(signal.SIGTERM) is _ends_in_thread:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._there.close()
            self._thread.join()
        self._here.close()
        self._post.close()

    def _watch(self) -> None:
        while numbers := self._here.recv(64):
            if signal.SIGTERM in numbers:
                self._terminated()

    def _terminated(self) -> None:
        write_record(self._world)
        lost = sorted(set(self._lost()) - self._announced())
        if lost:
            if self._world.rank == min(set(self._processes) - set(lost), default=None):
                sys.stderr.write(self._report(lost))
                sys.stderr.flush()
        elif signal.getsignal(signal.SIGTERM) is not _ends_in_thread:
            return
        time.sleep(_EXIT_DELAY)
        os._exit(128 + signal.SIGTERM)

    def _lost(self) -> list[int]:
        until = time.monotonic() + _EXIT_VISIBLE
        while True:
            lost = [rank for rank, process in self._processes.items() if has_ended(process)]
            if lost or time.monotonic() > until:
                return lost
            time.sleep(0.01)

    def _announced(self) -> set[int]:
        """Return the ranks that have announced the end of the launch."""
        ranks = set()
        with suppress(OSError, ValueError):
            while True:
                ranks.add(int(self._post.recv(32)))
        return ranks

    def _report(self, lost: list[int]) -> str:
        world = self._world
        lines = [
            *(f"error: {self._line(rank)}: killed, or crashed" for rank in lost),
            f"  {describe(world.rank, world.progress, world.steps)}",
            "  hint: the launcher names the signal; signal 9 often comes from the system when memory runs out "
            "(dmesg shows it), and distir simulate predicts the memory of a rank",
        ]
        return "".join(f"{line}\n" for line in lines)

    def _line(self, rank: int) -> str:
        return f"rank {rank} has ended (process {self._processes[rank].pid})"


def _address(rank: int) -> str:
    """Return the name of a rank's socket in Linux's abstract namespace, which leaves no file.

    The launcher's process id makes it unique.
    """
    return f"\0distir-{os.getppid()}-{rank}"


def _ends_in_thread(number: int, frame: FrameType | None) -> None:
    """Leave exiting to the thread, which also runs while the main thread cannot run handlers."""
