"""The ranks that a process runs: all of a bundle as threads, or one of a launch."""

from __future__ import annotations

import atexit
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distir_relax.layout import DeviceMesh
from distir_relax.runtime.error_messages import name_rank
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.transports.threads import RankReleased, RankThreads, ThreadWorld
from distir_relax.runtime.watchdog import Steps, Watchdog, describe, stall_error

if TYPE_CHECKING:
    from distir_relax.runtime.communicator import Communicator
    from distir_relax.runtime.world import World

# Seconds that ranks have to return after their run has failed, and after the user has interrupted it.
_GRACE = 5.0
_GRACE_INTERRUPTED = 1.0


class Ranks(ABC):
    """The ranks of this process over a mesh, with their `communicators`."""

    communicators: Sequence[Communicator]
    are_running = False
    """Whether a rank has not returned from a run that has failed."""

    @abstractmethod
    def run(self, works: Sequence[Callable[[], None]], steps: Sequence[Steps], timeout: float) -> None:
        """Call a function for each rank, together with those of other processes.

        `steps` describe those of their programs. Raises the first error of a rank, with its number, and `RunError` if a
        rank waits longer than `timeout` seconds (0: never) for others; in a launch its own watchdog does this.
        """


class ThreadRanks(Ranks):
    """All ranks as threads of this process; a single one runs in the thread of its caller."""

    def __init__(self, mesh: DeviceMesh, device: str) -> None:
        self._world = ThreadWorld(mesh)
        self.communicators = [self._world.communicator(rank, rank_device(device, rank)) for rank in range(mesh.size)]

    def run(self, works: Sequence[Callable[[], None]], steps: Sequence[Steps], timeout: float) -> None:
        """See `Ranks`."""
        import torch

        # Valid until all ranks have ended, since an interrupt may occur at any point from here on.
        self.are_running = True
        for comm in self.communicators:
            comm.forget_started()
        self._world.reset()
        before = torch.get_num_threads()
        share = max(1, before // len(works))
        threads = [self._thread(rank, work, share) for rank, work in enumerate(works)]
        # A single rank waits for nobody. Two threads of one process would each have a pool of torch's threads, and
        # they get in each other's way: a step of small products takes 1.6 times as long.
        self.are_running = not (threads[0]() is None if len(works) == 1 else self._run(threads, steps, timeout))
        torch.set_num_threads(before)
        if self._world.error is not None:
            raise self._world.error

    def _thread(self, rank: int, work: Callable[[], None], threads: int) -> Callable[[], None]:
        """Return the function that the thread of a rank runs, with a number of torch's threads."""

        def run() -> None:
            import torch

            try:
                torch.set_num_threads(threads)
                work()
            except RankReleased:
                pass
            except BaseException as error:
                self._world.abort(name_rank(error, rank, len(self.communicators)))

        return run

    def _run(self, works: Sequence[Callable[[], None]], steps: Sequence[Steps], timeout: float) -> bool:
        """Run all ranks in threads; return whether all have ended."""
        ranks = RankThreads(works)
        try:
            with Watchdog(timeout, lambda: self._detect_stall(steps, timeout)):
                ranks.start()
                ended = self._wait(ranks)
        except BaseException as error:
            self._world.abort(error)
            ended = ranks.wait(_GRACE_INTERRUPTED)
        if not ended:
            # Python would kill the threads during a computation, which C++ does not survive.
            atexit.register(ranks.wait, _GRACE)
        return ended

    def _wait(self, ranks: RankThreads) -> bool:
        """Wait for all ranks, for a limited time after one has failed; return whether all have ended."""
        while not ranks.wait(0.2):
            if self._world.error is not None:
                return ranks.wait(_GRACE)
        return True

    def _detect_stall(self, steps: Sequence[Steps], timeout: float) -> bool:
        if all(comm.progress.waiting() <= timeout for comm in self.communicators):
            return False
        lines = [describe(c.rank, c.progress, of_rank) for c, of_rank in zip(self.communicators, steps, strict=True)]
        self._world.abort(stall_error(timeout, lines))
        return True


class LaunchedRank(Ranks):
    """The rank of a launch that this process is. Its waiting is reported to `world`, whose watchdog ends a launch that
    hangs."""

    def __init__(self, world: World, mesh: DeviceMesh, device: str) -> None:
        self._world = world
        with world.waiting("connecting to the other ranks"):
            self._comm = world.communicator(mesh, rank_device(device, world.local_rank))
        self._comm.local_size = world.local_size
        self.communicators = [self._comm]

    def run(self, works: Sequence[Callable[[], None]], steps: Sequence[Steps], timeout: float) -> None:
        """See `Ranks`."""
        (work,), (of_rank,) = works, steps
        with self._world.running(self._comm.progress, of_rank):
            self._wait_at("the start of the run")
            self._comm.progress.forget_last()
            begun = time.perf_counter()
            work()
            # A rank that exited early could not report, in a stall of the others, that it has finished.
            self._wait_at("the end of the run")
            self._world.step_seconds.append(time.perf_counter() - begun)

    def _wait_at(self, place: str) -> None:
        self._comm.progress.enter(place, "barrier")
        self._comm._barrier()
        self._comm.progress.leave()
