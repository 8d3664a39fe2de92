"""Executor of training steps, for the loop of a training run."""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from distir_relax.bundle import Bundle, Tensor, WeightSource
from distir_relax.bundle.weights import SharedWeights
from distir_relax.checkpoints import StateFile
from distir_relax.errors import LostError
from distir_relax.runtime.call_shapes import Call
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.handshake import agreed
from distir_relax.runtime.replicas import difference
from distir_relax.runtime.session import Session

if TYPE_CHECKING:
    import torch


def whole(tensor: Tensor) -> list[list[tuple[int, int]]]:
    """Return the intervals of all of a tensor, for `WeightSource.read`."""
    return [[(0, size)] for size in tensor.shape]


class Batch(Protocol):
    """The inputs of one step."""

    @property
    def call(self) -> Call:
        """The sizes of the step."""
        ...

    def checksums(self, rank: int) -> dict[str, int]:
        """Return checksums of the data that a rank reads: the name of an input, and after a space the rows, if not all.

        Ranks with equal keys must have equal checksums.
        """
        ...

    def local(self, rank: int, device: str) -> list[torch.Tensor]:
        """Return a rank's shards, in the manifest's order, on its device."""
        ...

    def with_rates(self, factor: float) -> Batch:
        """Return the batch with its learning rates times a factor."""
        ...


class Executor:
    """Interface of a training run to the ranks of a `session`. All processes of a launch call the same methods.

    `bundle` is the training step's, if that of the session lacks its part. `load` loads another session of the same
    ranks; `with_weights` returns that of a program in memory with other weights, in place of `load`. `held` are the
    weights that the program does not change, and that have the values of a checkpoint, not the bundle's.
    """

    def __init__(
        self, session: Session, load: Callable[[Bundle], Session] | None = None, bundle: Bundle | None = None,
        with_weights: Callable[[Mapping[str, torch.Tensor]], Session] | None = None,
    ) -> None:  # fmt: skip
        self.bundle = bundle or session.bundle
        self.held: tuple[Tensor, ...] = ()
        self.held_values: WeightSource = session.bundle.weights
        self.frozen: Mapping[str, str] | None = None
        """Hashes of the weights that the program does not change, once a checkpoint needed them."""
        self._session, self._world = session, session.world
        self._load = load or (lambda part: Session(part, world=session.world, verified=True))
        self._with_weights = with_weights
        self._evaluation: Session | None = None

    @property
    def index(self) -> int:
        """The number of this process."""
        return self._world.rank

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self._world.size

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.index == 0

    @property
    def initial_weights(self) -> WeightSource:
        """The weights that the program was loaded with."""
        return self._session.bundle.weights

    def hold(self, tensors: Sequence[Tensor], source: WeightSource) -> None:
        """Load the program again, with the values that a source has of weights that it does not change."""
        self.held, self.held_values = tuple(tensors), source
        names = {tensor.name for tensor in tensors} & {tensor.name for tensor in self.bundle.manifest.weights}

        def holding(bundle: Bundle) -> Bundle:
            return replace(bundle, weights=SharedWeights(bundle.weights, source, names))

        evaluation = None if self.bundle.evaluation is None else holding(self.bundle.evaluation)
        self.bundle = replace(holding(self.bundle), evaluation=evaluation)
        if self._with_weights is None:
            self._session = self._load(self.bundle)
        else:
            self._session = self._with_weights(
                {t.name: source.read(t.name, whole(t)) for t in tensors if t.name in names}
            )
        self._evaluation = None

    @property
    def communicator(self) -> Communicator:
        """The communicator of the first rank of this process."""
        return self._session.communicator

    @property
    def communication_seconds(self) -> float:
        """Seconds of that rank in the communication of the last step, waiting for others included."""
        return self.communicator.progress.waited

    @property
    def peak_memory(self) -> int:
        """Largest memory in bytes so far: that of the rank's GPU, or else the resident memory of this process."""
        if self.communicator.device != "cpu":
            import torch

            return torch.cuda.max_memory_allocated(self.communicator.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB

    def checksums(self, batch: Batch | None) -> dict[str, int]:
        """Return checksums of a batch, which other processes compare with theirs (`difference`)."""
        return {} if batch is None or self.processes == 1 else batch.checksums(self.index)

    def begin_evaluation(self, suffix: str = "") -> None:
        """Copy the weights that the step has at present to the bundle's evaluation, which is loaded at first.

        Those that the step has under their name and `suffix`, too, are copied from there.
        """
        if self._evaluation is None:
            assert self.bundle.evaluation is not None, "the bundle has an evaluation"
            self._evaluation = self._load(self.bundle.evaluation)
        self._evaluation.copy_state(self._session, suffix)

    def evaluate(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """Run the evaluation once; return the outputs named on the first process, nothing on the others."""
        assert self._evaluation is not None, "it has begun"
        return _run(self._evaluation, batch, outputs)

    def step(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """Run once; return the outputs named on the first process, nothing on the others."""
        return _run(self._session, batch, outputs)

    def exchange(self, value: Any) -> list[Any]:
        """Return the value, of JSON's types, of each process."""
        return self._world.exchange(value, "the agreement between two steps")

    def agreed(self) -> AbstractContextManager[None]:
        """Return a context that raises an error of one process inside of it on all processes."""
        return agreed(self._world)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the global tensors that the step updates, on the CPU of the first process; nothing on the others."""
        return {name: tensor.cpu() for name, tensor in self._session.state().items()}

    def replace_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite some of the tensors that the step updates by those of the first process."""
        if names := self.exchange(list(tensors))[0]:
            self._session.replace_state(names, tensors)

    def difference_of_replicas(self, steps: int, hint: str) -> LostError | None:
        """Return the error of replicas of the state that differ after `steps` steps; see `replicas.difference`."""
        return difference(self._session, self.exchange, steps, hint)

    def save_pieces(self, file: StateFile) -> None:
        """Write the state shards of this process's ranks."""
        self._session.save_pieces(file)

    def load_state(self, source: WeightSource) -> None:
        """Load the state shards of this process's ranks."""
        self._session.load_state(source)


def _run(session: Session, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
    # Here, not in the threads of ranks: it may read from the user's data set.
    shards = {comm.rank: batch.local(comm.rank, comm.device) for comm in session.communicators}
    return session.run_local(batch.call, lambda rank, device: shards[rank], outputs)
