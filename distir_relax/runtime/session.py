"""A bundle loaded once and called many times, ranks as threads of this process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle, WeightSource
from distir_relax.checkpoints import StateFile
from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.backends import load_program
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.microbatch_io import in_parts, joined, parts_of
from distir_relax.runtime.progress import Progress, Traffic
from distir_relax.runtime.state import checked_source, joined_state, save_pieces, write_state
from distir_relax.runtime.step import run_step
from distir_relax.runtime.transports.threads import RankReleased, RankThreads, ThreadWorld
from distir_relax.runtime.verification import verify_programs
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT, Watchdog, describe, stall_error

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

# Seconds that ranks have to come back once their run has failed, and once the user has interrupted it.
_GRACE = 5.0
_GRACE_INTERRUPTED = 1.0
_TORN = "its last run failed, which has left its state between two steps"


class SessionClosed(RunError):
    """A call of a session that takes no more calls: an earlier run failed or did not end."""


class Session:
    """All ranks of `bundle` as threads of this process; weights are loaded when it is made.

    `session(inputs)` maps names of inputs to global arrays, and gives names of outputs to global torch tensors
    on the CPU, which are the caller's own. Calls are exclusive: one from another thread waits for the one before it. If
    a rank raises, the others are released and the first error is raised again here, with the rank's number.
    Raises RunError when a rank waits longer than `timeout` seconds (0: never) for others.

    After a call that failed or was interrupted the session goes on where it can. It is `closed` when a rank has not
    come back, or when the program changes state, which ranks may then have changed or not: calls then raise
    `SessionClosed`.
    """

    def __init__(
        self, bundle: Bundle, backend: str = "torch", device: str = "cpu", timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        # What was read from files may be what somebody changed.
        if bundle.path is not None:
            verify_programs(bundle)
        self.bundle = bundle
        self.seconds = 0.0
        self._closed = ""
        self._timeout = timeout
        self._world = ThreadWorld(bundle.manifest.mesh)
        ranks = range(bundle.manifest.mesh.size)
        self.communicators = [self._world.communicator(rank, rank_device(device, rank)) for rank in ranks]
        self._programs = [load_program(backend, bundle, comm.rank, comm, comm.device) for comm in self.communicators]
        self._exclusive = threading.Lock()

    @property
    def closed(self) -> str:
        """The reason why the session takes no more calls; empty while it does, and during a call."""
        # During a call `_closed` holds the reason that an interrupt would leave behind.
        return "" if self._exclusive.locked() else self._closed

    def __call__(
        self, inputs: Mapping[str, Array], timeout: float | None = None, outputs: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run once, with the session's time-out unless another is given; the `outputs` named, by default all.

        What is not named is not brought together. `seconds` is then how long the slowest rank's program took, without
        slicing and assembling.
        """
        with self._exclusive:
            self._check_open()
            manifest = self.bundle.manifest
            parts, wanted = in_parts(manifest, inputs), parts_of(manifest, outputs)
            return joined(manifest, self._run(parts, self._timeout if timeout is None else timeout, wanted))

    def state(self) -> dict[str, torch.Tensor]:
        """The global tensors of all weights that the program changes, by name: the caller's own, on the CPU."""
        with self._exclusive:
            self._check_open()
            return joined_state(self.bundle.manifest, self._programs)

    def load_state(self, state: Mapping[str, Array] | WeightSource) -> None:
        """Give all weights that the program changes new values: global arrays by name, or what reads pieces of them.

        A session whose last run failed goes on from there. Raises RunError for arrays that are missing, unknown, or of
        another shape or dtype, before anything is changed.
        """
        with self._exclusive:
            if self._closed != _TORN:
                self._check_open()
            source = checked_source(self.bundle.manifest, state)
            self._closed = _TORN
            for rank, program in enumerate(self._programs):
                write_state(self.bundle.manifest, program, rank, source)
            self._closed = ""

    def save_pieces(self, file: StateFile) -> None:
        """Write the pieces of all ranks into a file of the global tensors that the program changes."""
        with self._exclusive:
            self._check_open()
            for rank, program in enumerate(self._programs):
                save_pieces(self.bundle.manifest, program, rank, file)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"this session is closed: {self._closed}", hint="make a new session")

    def _run(
        self, inputs: Mapping[str, Array], timeout: float, wanted: Collection[str] | None
    ) -> dict[str, torch.Tensor]:
        import torch

        outputs: dict[str, torch.Tensor] = {}
        seconds = [0.0] * len(self.communicators)
        self._world.reset()
        before = torch.get_num_threads()
        share = max(1, before // len(self.communicators))
        works = [self._work(rank, inputs, wanted, share, outputs, seconds) for rank in range(len(seconds))]
        ranks = RankThreads(works)
        # Until all ranks are known to have ended: an interrupt may come anywhere from here.
        self._closed = "a rank did not come back from the run before"
        try:
            with Watchdog(timeout, lambda: self._look(timeout)):
                ranks.start()
                ended = self._wait(ranks)
        except BaseException as error:
            self._world.abort(error)
            ended = ranks.wait(_GRACE_INTERRUPTED)
        if not ended:
            # Python would end the threads in the midst of a computation, which C++ does not survive.
            atexit.register(ranks.wait, _GRACE)
        failure = self._world.error
        if ended:
            torn = failure is not None and self.bundle.manifest.updates
            self._closed = _TORN if torn else ""
        torch.set_num_threads(before)
        if failure is not None:
            raise failure
        for comm in self.communicators:
            comm.checks_steps = False
        self.seconds = max(seconds)
        return outputs

    def _wait(self, ranks: RankThreads) -> bool:
        """Wait for all ranks, and once one has failed only for so long; whether all have ended."""
        while not ranks.wait(0.2):
            if self._world.error is not None:
                return ranks.wait(_GRACE)
        return True

    def _work(
        self, rank: int, inputs: Mapping[str, Array], wanted: Collection[str] | None, threads: int,
        outputs: dict[str, torch.Tensor], seconds: list[float],
    ) -> Callable[[], None]:  # fmt: skip
        """What the thread of a rank does in one run."""

        def work() -> None:
            import torch

            comm = self.communicators[rank]
            try:
                torch.set_num_threads(threads)
                comm.progress, comm.traffic = Progress(), Traffic()
                local = local_inputs(self.bundle.manifest, inputs, rank, comm.device)
                seconds[rank], found = run_step(self.bundle, comm, self._programs[rank], local, wanted)
                outputs.update(found)
            except RankReleased:
                pass
            except BaseException as error:
                self._world.abort(_of_rank(error, rank, len(seconds)))

        return work

    def _look(self, timeout: float) -> bool:
        if all(comm.progress.waiting() <= timeout for comm in self.communicators):
            return False
        lines = [
            describe(comm.rank, comm.progress, program.steps)
            for comm, program in zip(self.communicators, self._programs, strict=True)
        ]
        self._world.abort(stall_error(timeout, lines))
        return True


def _of_rank(error: BaseException, rank: int, size: int) -> BaseException:
    """`error` with the rank that it was raised on."""
    if size > 1:
        if isinstance(error, DistIRError):
            if f"rank {rank}" not in error.message:
                error.message += f" (on rank {rank} of {size})"
        else:
            error.add_note(f"raised on rank {rank} of {size}")
    return error
