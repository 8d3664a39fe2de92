"""Sessions in one process: a bundle loaded once and run repeatedly, ranks as threads."""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle, WeightSource
from distir_relax.checkpoints import StateFile
from distir_relax.errors import RunError
from distir_relax.runtime.backends import Load, LoadSequences, RankProgram, find_backend
from distir_relax.runtime.error_messages import name_rank
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.machine import rank_device, release_freed_memory
from distir_relax.runtime.microbatch_io import joined, parts_of
from distir_relax.runtime.program_text import report_trusted
from distir_relax.runtime.sequence_calls import PreparedCall, SequenceCalls
from distir_relax.runtime.sequence_states import SequenceStates
from distir_relax.runtime.state import checked_source, copy_state, joined_state, save_pieces, write_state
from distir_relax.runtime.step import run_step
from distir_relax.runtime.transports.threads import RankReleased, RankThreads, ThreadWorld
from distir_relax.runtime.verification import verify_programs
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT, Watchdog, describe, stall_error

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

# Seconds that ranks have to return after their run has failed, and after the user has interrupted it.
_GRACE = 5.0
_GRACE_INTERRUPTED = 1.0
_MANY_WEIGHTS = 1 << 22
_TORN = "its last run failed and left its state between two steps"


class SessionClosed(RunError):
    """Raised by calls of a closed session: an earlier run failed or did not end."""


class Session:
    """All ranks of `bundle` as threads of this process; weights are loaded on construction.

    `session(inputs)` maps names of inputs to global arrays, and returns global torch tensors on the CPU by output name,
    which the caller owns. Calls are exclusive: a call from another thread waits for the previous one. If a rank raises,
    the others are released and the first error is raised again here, with the rank's number.
    Raises RunError when a rank waits longer than `timeout` seconds (0: never) for others.

    `load_sequences` may load other programs for the torch backend: `requests.sequence_program`. `load` loads the
    programs in place of the backend, of a bundle that another session has verified.

    After a failed or interrupted call the session stays usable if possible. It is `closed` when a rank has not
    returned, or when the program updates state, which may then be inconsistent: calls then raise `SessionClosed`.
    """

    def __init__(
        self, bundle: Bundle, backend: str = "torch", device: str = "cpu", timeout: float = DEFAULT_TIMEOUT,
        load_sequences: LoadSequences | None = None, load: Load | None = None,
    ) -> None:  # fmt: skip
        # Files may have been modified.
        if bundle.path is not None and load is None:
            verify_programs(bundle)
        if load is None:
            report_trusted(bundle)
        self.bundle = bundle
        self.seconds = 0.0
        self._closed = ""
        self._timeout = timeout
        self._load_sequences = load_sequences
        self._load_program = load or find_backend(backend)
        self._world = ThreadWorld(bundle.manifest.mesh)
        ranks = range(bundle.manifest.mesh.size)
        self.communicators = [self._world.communicator(rank, rank_device(device, rank)) for rank in ranks]
        self._programs = self._load(backend, bundle)
        self._encoders = [] if bundle.encoder is None else self._load(backend, bundle.encoder)
        self._running: Sequence[RankProgram] = self._programs
        self._calls = SequenceCalls(bundle)
        self._states = SequenceStates({comm.rank: comm.device for comm in self.communicators})
        self._exclusive = threading.Lock()

    @property
    def closed(self) -> str:
        """The reason why the session takes no more calls; empty while it does, and during a call."""
        # During a call `_closed` holds the reason that an interrupt would leave.
        return "" if self._exclusive.locked() else self._closed

    def __call__(
        self, inputs: Mapping[str, Array], timeout: float | None = None, outputs: Collection[str] | None = None,
        past: int = 0,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Run once, with the session's time-out unless another is passed; return the `outputs` named, by default all.

        Other outputs are not gathered. A program that continues a sequence continues that of the last call after its
        first `past` positions, which must be all of them; without any it starts another one, and takes the input of the
        encoder, if there is one. `seconds` is then the time of the slowest rank's program, without slicing and
        gathering.
        """
        most = self._timeout if timeout is None else timeout
        with self._exclusive:
            self._check_open()
            encoding, prepared = self._calls.of(inputs, past)
            manifest = prepared.call.manifest
            parts = parts_of(manifest, outputs)
            if encoding is not None:
                self._run(self._encoders, encoding, most, (), True)
            encoder_seconds = self.seconds if encoding is not None else 0.0
            self._states.start(prepared.call)
            results = self._run(self._programs, prepared, most, parts)
            self.seconds += encoder_seconds
            return joined(manifest, results)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the global tensors of all updated weights, by name, on the CPU; the caller owns them."""
        with self._exclusive:
            self._check_open()
            return joined_state(self.bundle.manifest, self._programs)

    def load_state(self, state: Mapping[str, Array] | WeightSource) -> None:
        """Overwrite all weights that the program updates, from global arrays by name or a source of shards.

        Reopens a session whose last run failed. Raises RunError for arrays that are missing, unknown, or of another
        shape or dtype, before anything is changed.
        """
        with self._exclusive:
            if self._closed != _TORN:
                self._check_open()
            source = checked_source(self.bundle.manifest, state)
            self._closed = _TORN
            for rank, program in enumerate(self._programs):
                write_state(self.bundle.manifest, program, rank, source)
            self._closed = ""

    def replace_state(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights called `names`, of those that the program updates, from global tensors."""
        self.load_state({**self.state(), **{name: tensors[name] for name in names}})

    def copy_state(self, other: Session, suffix: str = "") -> None:
        """Copy the weights that this program updates from those of another one; see `state.copy_state`."""
        with self._exclusive:
            self._check_open()
            for rank, (mine, theirs) in enumerate(zip(self._programs, other.programs, strict=True)):
                copy_state(self.bundle, mine, rank, other.bundle.manifest, theirs, suffix)

    @property
    def programs(self) -> Sequence[RankProgram]:
        """The programs of the ranks."""
        return self._programs

    def save_pieces(self, file: StateFile) -> None:
        """Write the shards of all ranks into a file of the global tensors that the program updates."""
        with self._exclusive:
            self._check_open()
            for rank, program in enumerate(self._programs):
                save_pieces(self.bundle.manifest, program, rank, file)

    def _load(self, backend: str, bundle: Bundle) -> list[RankProgram]:
        programs: list[RankProgram] = []
        if backend == "torch" and self._load_sequences is not None:
            programs = self._load_sequences(bundle, self.communicators)
        if not programs:
            programs = [self._load_program(bundle, comm.rank, comm, comm.device) for comm in self.communicators]
        if sum(math.prod(weight.shape) for weight in bundle.manifest.weights) > _MANY_WEIGHTS:
            # Packed weights leave the memory of their originals.
            release_freed_memory()
        return programs

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"this session is closed: {self._closed}", hint="make a new session")

    def _run(
        self, programs: Sequence[RankProgram], prepared: PreparedCall, timeout: float,
        parts: Collection[str] | None, encodes: bool = False,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        import torch

        outputs: dict[str, torch.Tensor] = {}
        seconds = [0.0] * len(self.communicators)
        self._running = programs
        for comm in self.communicators:
            comm.forget_started()
        self._world.reset()
        before = torch.get_num_threads()
        share = max(1, before // len(self.communicators))
        works = [
            self._work(program, rank, prepared, parts, encodes, share, outputs, seconds)
            for rank, program in enumerate(programs)
        ]
        # Valid until all ranks have ended, since an interrupt may occur at any point from here on.
        self._closed = "a rank did not return from the previous run"
        # A single rank waits for nobody. Two threads of one process would each have a pool of torch's threads, and
        # they get in each other's way: a step of small products takes 1.6 times as long.
        ended = works[0]() is None if len(works) == 1 else self._run_threads(works, timeout)
        failure = self._world.error
        if ended:
            torn = failure is not None and self.bundle.manifest.updates
            self._closed = _TORN if torn else ""
        torch.set_num_threads(before)
        if failure is not None:
            self._states.clear()
            raise failure
        for comm in self.communicators:
            # The encoder runs before the first run of the program, which is checked too.
            comm.checks_steps = comm.checks_steps and encodes
        self.seconds = max(seconds)
        return outputs

    def _run_threads(self, works: Sequence[Callable[[], None]], timeout: float) -> bool:
        """Run all ranks in threads; return whether all have ended."""
        ranks = RankThreads(works)
        try:
            with Watchdog(timeout, lambda: self._detect_stall(timeout)):
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

    def _work(
        self, program: RankProgram, rank: int, prepared: PreparedCall, parts: Collection[str] | None, encodes: bool,
        threads: int, outputs: dict[str, torch.Tensor], seconds: list[float],
    ) -> Callable[[], None]:  # fmt: skip
        """Return the function that a rank's thread runs in one run."""

        def work() -> None:
            import torch

            comm, call = self.communicators[rank], prepared.call
            try:
                torch.set_num_threads(threads)
                comm.start_counting()
                local = local_inputs(call.manifest, prepared.inputs, rank, comm.device)
                states, encoded = (None, self._states.encoded(rank)) if encodes else (self._states.of(rank), None)
                seconds[rank], results = run_step(call, comm, program, local, parts, states, encoded)
                outputs.update(results)
            except RankReleased:
                pass
            except BaseException as error:
                self._world.abort(name_rank(error, rank, len(seconds)))

        return work

    def _detect_stall(self, timeout: float) -> bool:
        if all(comm.progress.waiting() <= timeout for comm in self.communicators):
            return False
        lines = [
            describe(comm.rank, comm.progress, program.steps)
            for comm, program in zip(self.communicators, self._running, strict=True)
        ]
        self._world.abort(stall_error(timeout, lines))
        return True
