"""Sessions in a launch: a bundle loaded once and run repeatedly by one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle, TensorWeights, WeightSource
from distir_relax.checkpoints import StateFile
from distir_relax.runtime.arrays import torch_dtype
from distir_relax.runtime.backends import Load, LoadSequences, RankProgram, find_backend
from distir_relax.runtime.call_shapes import Call, CallShapes
from distir_relax.runtime.handshake import agreed
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.microbatch_io import joined, parts_of
from distir_relax.runtime.outputs import collect_output
from distir_relax.runtime.program_text import report_trusted
from distir_relax.runtime.sequence_calls import PreparedCall, SequenceCalls
from distir_relax.runtime.sequence_states import SequenceStates
from distir_relax.runtime.state import changing, checked_source, copy_state, save_pieces, write_state, write_tensor
from distir_relax.runtime.step import run_step
from distir_relax.runtime.verification import verify_programs
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


class RankSession:
    """One rank of a launch, with its program and weights loaded. Every rank of `world` creates and calls one.

    It reports its waiting to `world`, whose stall detection ends a launch that hangs. The programs of a bundle of files
    are verified, unless they are `verified` already. `load_sequences` and `load` are as for a `Session`.
    """

    def __init__(
        self, world: World, bundle: Bundle, backend: str = "torch", device: str = "cpu", verified: bool = False,
        load_sequences: LoadSequences | None = None, load: Load | None = None,
    ) -> None:  # fmt: skip
        self.bundle = bundle
        self._verifies = bundle.path is not None and not verified and load is None
        self.calls = CallShapes(bundle.manifest)
        self._sequence_calls = SequenceCalls(bundle)
        self._world = world
        with world.waiting("connecting to the other ranks"):
            self.communicator = world.communicator(bundle.manifest.mesh, rank_device(device, world.local_rank))
        self.communicator.local_size = world.local_size
        self._states = SequenceStates({self.communicator.rank: self.communicator.device})
        self._program: RankProgram | None = None
        self._encoder: RankProgram | None = None
        self._backend = backend
        self._load_program = load
        self._load_sequences = load_sequences
        self.seconds = 0.0

    def load(self) -> None:
        """Load the program and this rank's slices of the weights; every rank calls this.

        Raises BundleError or RunError on this rank alone, or `Agreed`.
        """
        comm = self.communicator
        programs: list[RankProgram] = []
        if self._backend == "torch" and self._load_sequences is not None:
            # Others wait, because they emit programs of the text that is verified.
            with agreed(self._world):
                self._verify()
            programs = self._load_sequences(self.bundle, [comm], self._collect)
        else:
            self._verify()
        load = self._load_program or find_backend(self._backend)
        self._program = programs[0] if programs else load(self.bundle, comm.rank, comm, comm.device)
        if self.bundle.encoder is not None:
            self._encoder = load(self.bundle.encoder, comm.rank, comm, comm.device)

    def __call__(
        self, inputs: Mapping[str, Array], outputs: Collection[str] | None = None, past: int = 0
    ) -> dict[str, torch.Tensor]:
        """Run once on global arrays; return the global outputs (those named, or all) on rank 0, nothing elsewhere.

        `past` is as for `Session.__call__`.
        """
        encoding, prepared = self._sequence_calls.of(inputs, past)
        encoder_seconds = 0.0
        if encoding is not None:
            self._encode(encoding)
            encoder_seconds = self.seconds
        self._states.start(prepared.call)
        results = self.run_local(prepared.call, self._local(prepared), outputs)
        self.seconds += encoder_seconds
        return results

    def run_local(
        self, call: Call, local: list[torch.Tensor], outputs: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run once on this rank's shards of the inputs of a call, in the manifest's order; see `__call__`."""
        parts = parts_of(call.manifest, outputs)
        program = self._loaded()
        results = self._run(program, call, local, parts, self._states.of(self.communicator.rank), None)
        self.communicator.checks_steps = False
        return joined(call.manifest, results)

    def copy_state(self, other: RankSession, suffix: str = "") -> None:
        """Copy the weights that this program updates from those of another one; see `state.copy_state`."""
        rank = self.communicator.rank
        copy_state(self.bundle, self._loaded(), rank, other.bundle.manifest, other.program, suffix)

    @property
    def program(self) -> RankProgram:
        """The program of the rank, loaded on first use."""
        return self._loaded()

    def _encode(self, encoding: PreparedCall) -> None:
        """Run the encoder, whose outputs become states on this rank."""
        self._loaded()
        assert self._encoder is not None, "the bundle has an encoder"
        encoded = self._states.encoded(self.communicator.rank)
        self._run(self._encoder, encoding.call, self._local(encoding), (), None, encoded)

    def _local(self, prepared: PreparedCall) -> list[torch.Tensor]:
        comm = self.communicator
        return local_inputs(prepared.call.manifest, prepared.inputs, comm.rank, comm.device)

    def _run(
        self, program: RankProgram, call: Call, local: list[torch.Tensor], parts: Collection[str] | None,
        states: dict[str, torch.Tensor] | None, encoded: dict[str, torch.Tensor] | None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        comm = self.communicator
        comm.start_counting()
        try:
            with self._world.running(comm.progress, program.steps):
                self._wait_at("the start of the run")
                comm.progress.forget_last()
                self.seconds, results = run_step(call, comm, program, local, parts, states, encoded)
                # A rank that exited early could not report, in a stall of the others, that it has finished.
                self._wait_at("the end of the run")
        except BaseException:
            self._states.clear()
            raise
        return results

    def state(self) -> dict[str, torch.Tensor]:
        """Return the global tensors of all updated weights, by name, on rank 0; nothing on the others."""
        program, comm = self._loaded(), self.communicator
        comm.start_counting()
        tensors = {}
        with self._world.running(comm.progress, ()):
            for tensor in changing(self.bundle.manifest):
                result = collect_output(comm, tensor, program.state.get(tensor.name))
                if result is not None:
                    # The gather does not copy a tensor that only one rank has.
                    tensors[tensor.name] = result.clone()
        return tensors

    def load_state(self, state: Mapping[str, Array] | WeightSource) -> None:
        """Overwrite the weights that the program updates; see `Session.load_state`.

        Every rank gets all of them, and reads its shards. Raises errors on this rank alone.
        """
        source = checked_source(self.bundle.manifest, state)
        write_state(self.bundle.manifest, self._loaded(), self.communicator.rank, source)

    def replace_state(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights called `names`, of those that the program updates, from global tensors of rank 0.

        Every rank calls this with the same names.
        """
        import torch

        program, comm = self._loaded(), self.communicator
        comm.start_counting()
        with self._world.running(comm.progress, ()):
            for tensor in changing(self.bundle.manifest):
                if tensor.name not in names:
                    continue
                whole = torch.zeros(tensor.shape, dtype=torch_dtype(tensor.dtype), device=comm.device)
                if comm.rank == 0:
                    whole.copy_(tensors[tensor.name])
                # Of the ranks of each group, one has the tensor, and the others zeros.
                for axis in comm.mesh.axes:
                    whole = comm.all_reduce(whole, axis, "sum")
                write_tensor(self.bundle.manifest, program, comm.rank, tensor, TensorWeights({tensor.name: whole}))

    def save_pieces(self, file: StateFile) -> None:
        """Write this rank's shards into a file of the global tensors that the program updates."""
        save_pieces(self.bundle.manifest, self._loaded(), self.communicator.rank, file)

    def _verify(self) -> None:
        """Verify the programs of all ranks, if they are not; one rank of a node does."""
        if self._verifies and self._world.local_rank == 0:
            verify_programs(self.bundle)
        if self._world.rank == 0 and self._load_program is None:
            report_trusted(self.bundle)

    def _collect(self, value: Callable[[], Any]) -> list[Any]:
        """See `Collect`."""
        with agreed(self._world):
            mine = value()
        return self._world.exchange(mine)

    def _loaded(self) -> RankProgram:
        if self._program is None:
            self.load()
        assert self._program is not None
        return self._program

    def _wait_at(self, place: str) -> None:
        self.communicator.progress.enter(place, "barrier")
        self.communicator._barrier()
        self.communicator.progress.leave()
