"""Executors of training steps: all ranks as threads of this process, or this process as one rank."""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from distir_relax.bundle import Bundle, Tensor, WeightSource
from distir_relax.bundle.weights import SharedWeights
from distir_relax.checkpoints import StateFile
from distir_relax.runtime.call_shapes import Call
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.handshake import agreed
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.session import Session
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


def whole(tensor: Tensor) -> list[list[tuple[int, int]]]:
    """Return the intervals of all of a tensor, for `WeightSource.read`."""
    return [[(0, size)] for size in tensor.shape]


class Batch(Protocol):
    """The inputs of one step."""

    @property
    def call(self) -> Call:
        """The sizes of the step."""
        ...

    def global_arrays(self) -> dict[str, Array]:
        """Return the global arrays, by name."""
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


class Executor(ABC):
    """Interface of a training run to its ranks. Each process of a launch has an executor; all call the same methods.

    `held` are the weights that the program does not change, and that have the values of a checkpoint, not the bundle's.
    """

    _session: Session | RankSession

    def __init__(self, session: Session | RankSession, index: int = 0, processes: int = 1) -> None:
        self.bundle: Bundle = session.bundle
        self.index, self.processes = index, processes
        self.held: tuple[Tensor, ...] = ()
        self.held_values: WeightSource = session.bundle.weights
        self.frozen: Mapping[str, str] | None = None
        """Hashes of the weights that the program does not change, once a checkpoint needed them."""
        self._session = session

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
        self._reload({t.name: source.read(t.name, whole(t)) for t in tensors if t.name in names})

    @abstractmethod
    def _reload(self, held: Mapping[str, torch.Tensor]) -> None:
        """Load the programs of the bundle, in which the weights `held` were replaced."""

    @property
    @abstractmethod
    def communicator(self) -> Communicator:
        """The communicator of the first rank of this process."""

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

    @abstractmethod
    def begin_evaluation(self, suffix: str = "") -> None:
        """Copy the weights that the step has at present to the bundle's evaluation, which is loaded at first.

        Those that the step has under their name and `suffix`, too, are copied from there.
        """

    @abstractmethod
    def evaluate(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """Run the evaluation once; return the outputs named on the first process, nothing on the others."""

    @abstractmethod
    def step(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """Run once; return the outputs named on the first process, nothing on the others."""

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Return the value, of JSON's types, of each process."""

    @abstractmethod
    def agreed(self) -> Any:
        """Return a context that raises an error of one process inside of it on all processes."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the global tensors that the step updates, on the CPU of the first process; nothing on the others."""
        return {name: tensor.cpu() for name, tensor in self._session.state().items()}

    def replace_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite some of the tensors that the step updates by those of the first process."""
        if names := self.exchange(list(tensors))[0]:
            self._session.replace_state(names, tensors)

    def save_pieces(self, file: StateFile) -> None:
        """Write the state shards of this process's ranks."""
        self._session.save_pieces(file)

    def load_state(self, source: WeightSource) -> None:
        """Load the state shards of this process's ranks."""
        self._session.load_state(source)


class ThreadExecutor(Executor):
    """All ranks as threads of this process. `bundle` is the training step's, if that of the session lacks its part.

    `with_weights` returns the session of a program in memory with other weights, in place of `load`.
    """

    _session: Session

    def __init__(
        self, session: Session, load: Callable[[Bundle], Session] = Session, bundle: Bundle | None = None,
        with_weights: Callable[[Mapping[str, torch.Tensor]], Session] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(session)
        self.bundle = bundle or session.bundle
        self._load, self._with_weights = load, with_weights
        self._evaluation: Session | None = None

    @property
    def communicator(self) -> Communicator:
        """See `Executor`."""
        return self._session.communicators[0]

    def _reload(self, held: Mapping[str, torch.Tensor]) -> None:
        self._session = self._load(self.bundle) if self._with_weights is None else self._with_weights(held)
        self._evaluation = None

    def begin_evaluation(self, suffix: str = "") -> None:
        """See `Executor`."""
        if self._evaluation is None:
            assert self.bundle.evaluation is not None, "the bundle has an evaluation"
            self._evaluation = self._load(self.bundle.evaluation)
        self._evaluation.copy_state(self._session, suffix)

    def evaluate(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """See `Executor`."""
        assert self._evaluation is not None, "it has begun"
        return self._evaluation(batch.global_arrays(), outputs=outputs)

    def step(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """See `Executor`."""
        return self._session(batch.global_arrays(), outputs=outputs)

    def exchange(self, value: Any) -> list[Any]:
        """See `Executor`."""
        return [value]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """See `Executor`."""
        yield


class RankExecutor(Executor):
    """This process as one rank of a launch."""

    _session: RankSession

    def __init__(self, world: World, session: RankSession, load: Callable[[Bundle], RankSession] | None = None) -> None:
        super().__init__(session, world.rank, world.size)
        self._world = world
        self._load = load or (lambda bundle: RankSession(world, bundle, verified=True))
        self._evaluation: RankSession | None = None

    def begin_evaluation(self, suffix: str = "") -> None:
        """See `Executor`."""
        if self._evaluation is None:
            assert self.bundle.evaluation is not None, "the bundle has an evaluation"
            self._evaluation = self._load(self.bundle.evaluation)
            self._evaluation.load()
        self._evaluation.copy_state(self._session, suffix)

    def evaluate(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """See `Executor`."""
        assert self._evaluation is not None, "it has begun"
        local = batch.local(self._world.rank, self._evaluation.communicator.device)
        return self._evaluation.run_local(batch.call, local, outputs)

    @property
    def communicator(self) -> Communicator:
        """See `Executor`."""
        return self._session.communicator

    def _reload(self, held: Mapping[str, torch.Tensor]) -> None:
        self._session = self._load(self.bundle)
        self._session.load()
        self._evaluation = None

    def step(self, batch: Batch, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """See `Executor`."""
        local = batch.local(self._world.rank, self._session.communicator.device)
        return self._session.run_local(batch.call, local, outputs)

    def exchange(self, value: Any) -> list[Any]:
        """See `Executor`."""
        return self._world.exchange(value, "the agreement between two steps")

    def agreed(self) -> Any:
        """See `Executor`."""
        return agreed(self._world)
