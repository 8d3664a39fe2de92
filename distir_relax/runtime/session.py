"""Sessions: a bundle loaded once and run repeatedly, in one process or on the ranks of a launch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.bundle import Bundle, TensorWeights, WeightSource
from distir_relax.checkpoints import StateFile
from distir_relax.errors import RunError
from distir_relax.runtime.arrays import torch_dtype
from distir_relax.runtime.backends import Load, LoadSequences, RankProgram, find_backend
from distir_relax.runtime.handshake import agreed
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.machine import release_freed_memory
from distir_relax.runtime.microbatch_io import joined, parts_of
from distir_relax.runtime.outputs import collect_output
from distir_relax.runtime.program_text import report_trusted
from distir_relax.runtime.ranks import LaunchedRank, Ranks, ThreadRanks
from distir_relax.runtime.sequence_calls import PreparedCall, SequenceCalls
from distir_relax.runtime.sequence_states import SequenceStates
from distir_relax.runtime.state import changing, checked_source, copy_state, save_pieces, write_state, write_tensor
from distir_relax.runtime.step import run_step
from distir_relax.runtime.verification import verify_programs
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import ALONE, World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array
    from distir_relax.runtime.call_shapes import Call
    from distir_relax.runtime.communicator import Communicator

Local: TypeAlias = "Callable[[int, str], list[torch.Tensor]]"
"""Returns the shards of a rank, in the order of the manifest's inputs, on a device."""

_MANY_WEIGHTS = 1 << 22
_LEFT = "a rank did not return from the previous run"
_TORN = "its last run failed and left its state between two steps"


class SessionClosed(RunError):
    """Raised by calls of a closed session: an earlier run failed or did not end."""


class Session:
    """The ranks of `bundle` in this process; weights are loaded on construction.

    Without a launch these are all ranks, as threads; in a launch, whose `world` it is, the rank that this process is.
    Every rank of a launch creates and calls sessions alike, with the same arguments. Results for the whole program
    are on the first rank; the others get nothing.

    `session(inputs)` maps names of inputs to global arrays, and returns global torch tensors on the CPU by output name,
    which the caller owns. Calls are exclusive: a call from another thread waits for the previous one. If a rank raises,
    the others are released and the first error is raised again here, with the rank's number.
    Raises RunError when a rank waits longer than `timeout` seconds (0: never) for others; in a launch it is ended.

    `load_sequences` may load other programs for the torch backend: `requests.sequence_program`. `load` loads the
    programs in place of the backend, of a bundle that another session has verified. Programs of files are verified,
    unless they are `verified` already. Unless it `loads`, it has communicators, and no programs.

    After a failed or interrupted call the session stays usable if possible. It is `closed` when a rank has not
    returned, or when the program updates state, which may then be inconsistent: calls then raise `SessionClosed`.
    """

    def __init__(
        self, bundle: Bundle, backend: str = "torch", device: str = "cpu", timeout: float = DEFAULT_TIMEOUT,
        load_sequences: LoadSequences | None = None, load: Load | None = None, world: World = ALONE,
        verified: bool = False, loads: bool = True,
    ) -> None:  # fmt: skip
        self.bundle, self.world = bundle, world
        self.seconds = 0.0
        """The time of the last call, on the slowest rank of this process, without slicing and gathering."""
        self._closed = ""
        self._timeout = timeout
        find_backend(backend)
        mesh = bundle.manifest.mesh
        self._ranks: Ranks = ThreadRanks(mesh, device) if world.is_alone else LaunchedRank(world, mesh, device)
        self.communicators = self._ranks.communicators
        self._programs: list[RankProgram] = []
        self._encoders: list[RankProgram] = []
        if loads:
            self._load(backend, load_sequences, load, verified)
        self._calls = SequenceCalls(bundle)
        self._states = SequenceStates({comm.rank: comm.device for comm in self.communicators})
        self._exclusive = threading.Lock()

    @property
    def closed(self) -> str:
        """The reason why the session takes no more calls; empty while it does, and during a call."""
        # During a call `_closed` holds the reason that an interrupt would leave.
        return "" if self._exclusive.locked() else self._closed

    @property
    def communicator(self) -> Communicator:
        """That of the first rank of this process."""
        return self.communicators[0]

    @property
    def programs(self) -> Sequence[RankProgram]:
        """The programs of the ranks."""
        return self._programs

    def __call__(
        self, inputs: Mapping[str, Array], timeout: float | None = None, outputs: Collection[str] | None = None,
        past: int = 0,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Run once, with the session's time-out unless another is passed; return the `outputs` named, by default all.

        Other outputs are not gathered. A program that continues a sequence continues that of the last call after its
        first `past` positions, which must be all of them; without any it starts another one, and takes the input of the
        encoder, if there is one. `seconds` is then the time of the program, with that of the encoder.
        """
        with self._exclusive:
            self._check_open()
            encoding, prepared = self._calls.of(inputs, past)
            parts = parts_of(prepared.call.manifest, outputs)
            if encoding is not None:
                self._run(self._encoders, encoding.call, _local(encoding), timeout, (), encodes=True)
            encoder_seconds = self.seconds if encoding is not None else 0.0
            results = self._run(self._programs, prepared.call, _local(prepared), timeout, parts)
            self.seconds += encoder_seconds
            return results

    def run_local(
        self, call: Call, local: Local, outputs: Collection[str] | None = None, timeout: float | None = None
    ) -> dict[str, torch.Tensor]:
        """Run once on the shards of the inputs of a call; see `__call__`."""
        with self._exclusive:
            self._check_open()
            return self._run(self._programs, call, local, timeout, parts_of(call.manifest, outputs))

    def on_ranks(self, work: Callable[[Communicator, RankProgram], None], timeout: float | None = None) -> None:
        """Run the programs otherwise than by calls: `work` does, for each rank of this process with its program.

        Errors and time-outs are those of a call.
        """
        with self._exclusive:
            self._check_open()
            self._on_ranks(work, self._programs, timeout)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the global tensors of all updated weights, by name, on the CPU; the caller owns them."""
        tensors: dict[str, torch.Tensor] = {}

        def collect(comm: Communicator, program: RankProgram) -> None:
            for tensor in changing(self.bundle.manifest):
                result = collect_output(comm, tensor, program.state.get(tensor.name))
                if result is not None:
                    # The gather does not copy a tensor that only one rank has.
                    tensors[tensor.name] = result.clone()

        with self._exclusive:
            self._check_open()
            self._on_ranks(collect)
        return tensors

    def load_state(self, state: Mapping[str, Array] | WeightSource) -> None:
        """Overwrite all weights that the program updates, from global arrays by name or a source of shards.

        In a launch every rank passes all of them. Reopens a session whose last run failed. Raises RunError for arrays
        that are missing, unknown, or of another shape or dtype, before anything is changed.
        """
        with self._exclusive:
            if self._closed != _TORN:
                self._check_open()
            source = checked_source(self.bundle.manifest, state)
            self._closed = _TORN
            for comm, program in self._pairs():
                write_state(self.bundle.manifest, program, comm.rank, source)
            self._closed = ""

    def replace_state(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights called `names`, of those that the program updates, from global tensors of rank 0."""
        import torch

        manifest = self.bundle.manifest

        def replace(comm: Communicator, program: RankProgram) -> None:
            for tensor in changing(manifest):
                if tensor.name not in names:
                    continue
                whole = torch.zeros(tensor.shape, dtype=torch_dtype(tensor.dtype), device=comm.device)
                if comm.rank == 0:
                    whole.copy_(tensors[tensor.name])
                # Of the ranks of each group, one has the tensor, and the others zeros.
                for axis in comm.mesh.axes:
                    whole = comm.all_reduce(whole, axis, "sum")
                write_tensor(manifest, program, comm.rank, tensor, TensorWeights({tensor.name: whole}))

        with self._exclusive:
            self._check_open()
            self._on_ranks(replace)

    def copy_state(self, other: Session, suffix: str = "") -> None:
        """Copy the weights that this program updates from those of another one; see `state.copy_state`."""
        with self._exclusive:
            self._check_open()
            for (comm, program), source in zip(self._pairs(), other.programs, strict=True):
                copy_state(self.bundle, program, comm.rank, other.bundle.manifest, source, suffix)

    def save_pieces(self, file: StateFile) -> None:
        """Write the shards of the ranks of this process into a file of the global tensors that the program updates."""
        with self._exclusive:
            self._check_open()
            for comm, program in self._pairs():
                save_pieces(self.bundle.manifest, program, comm.rank, file)

    def _load(self, backend: str, load_sequences: LoadSequences | None, load: Load | None, verified: bool) -> None:
        bundle = self.bundle
        # Files may have been modified. One rank of a node verifies them.
        verifies = bundle.path is not None and not verified and load is None and self.world.local_rank == 0
        if load_sequences is not None and backend == "torch":
            # Others wait, because they emit programs of the text that is verified.
            with agreed(self.world):
                self._verify(verifies, load is None)
            self._programs = load_sequences(bundle, self.communicators, self._collect)
        else:
            self._verify(verifies, load is None)
        load = load or find_backend(backend)
        if not self._programs:
            self._programs = [load(bundle, comm.rank, comm, comm.device) for comm in self.communicators]
        if (encoder := bundle.encoder) is not None:
            self._encoders = [load(encoder, comm.rank, comm, comm.device) for comm in self.communicators]
        if sum(math.prod(weight.shape) for weight in bundle.manifest.weights) > _MANY_WEIGHTS:
            # Packed weights leave the memory of their originals.
            release_freed_memory()

    def _verify(self, verifies: bool, reports: bool) -> None:
        if verifies:
            verify_programs(self.bundle)
        if reports and self.world.rank == 0:
            report_trusted(self.bundle)

    def _collect(self, value: Callable[[], Any]) -> list[Any]:
        """See `Collect`."""
        with agreed(self.world):
            mine = value()
        return self.world.exchange(mine)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"this session is closed: {self._closed}", hint="make a new session")

    def _pairs(self) -> list[tuple[Communicator, RankProgram]]:
        return list(zip(self.communicators, self._programs, strict=True))

    def _run(
        self, programs: Sequence[RankProgram], call: Call, local: Local, timeout: float | None,
        parts: Collection[str] | None, encodes: bool = False,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Run programs, of encoders if it `encodes`; return the global outputs called `parts`."""
        outputs: dict[str, torch.Tensor] = {}
        seconds: list[float] = []
        if not encodes:
            self._states.start(call)

        def work(comm: Communicator, program: RankProgram) -> None:
            states = None if encodes else self._states.of(comm.rank)
            encoded = self._states.encoded(comm.rank) if encodes else None
            ran, results = run_step(call, comm, program, local(comm.rank, comm.device), parts, states, encoded)
            seconds.append(ran)
            outputs.update(results)

        try:
            self._on_ranks(work, programs, timeout)
        except BaseException:
            self._states.clear()
            raise
        for comm in self.communicators:
            # The encoder runs before the first run of the program, which is checked too.
            comm.checks_steps = comm.checks_steps and encodes
        self.seconds = max(seconds)
        return joined(call.manifest, outputs)

    def _on_ranks(
        self, work: Callable[[Communicator, RankProgram], None], programs: Sequence[RankProgram] | None = None,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Run `work` for each rank of this process with its program, of those that run if `programs` are given."""
        steps = [()] * len(self.communicators) if programs is None else [program.steps for program in programs]
        for comm in self.communicators:
            comm.start_counting()
        pairs = zip(self.communicators, programs or self._programs, strict=True)
        works = [partial(work, comm, program) for comm, program in pairs]
        # Valid until all ranks have ended, since an interrupt may occur at any point from here on.
        self._closed = _LEFT
        try:
            self._ranks.run(works, steps, self._timeout if timeout is None else timeout)
        except BaseException:
            torn = _TORN if self.bundle.manifest.updates else ""
            self._closed = _LEFT if self._ranks.are_running else torn
            raise
        self._closed = ""


def _local(prepared: PreparedCall) -> Local:
    return lambda rank, device: local_inputs(prepared.call.manifest, prepared.inputs, rank, device)
