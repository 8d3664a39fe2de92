"""Runs of a plan's ranks that record inner values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distir_relax.bisection.taps import Recorded, tapped
from distir_relax.bundle import Bundle
from distir_relax.runtime.arrays import dtype_name, torch_dtype
from distir_relax.runtime.backends import Load
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.session import Session
from distir_relax.runtime.world import ALONE, World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

Wanted = Mapping[int, Collection[str]]
"""Names of values to record, by rank."""


@dataclass(frozen=True)
class Run:
    """A run of all ranks: the global outputs, by name, and the recorded values of each rank."""

    outputs: Mapping[str, torch.Tensor]
    taps: Recorded


class Subject:
    """A bundle on a backend, with one choice of inputs. Each run starts from the bundle's weights.

    `open` returns a session that loads its programs by another loader, or as `distir run` does. In a launch, whose
    `world` it is, the first rank gets the outputs and all recorded values; the others `serve` it.
    """

    def __init__(
        self, bundle: Bundle, backend: str, open: Callable[[Load | None], Session], inputs: Mapping[str, Array],
        world: World = ALONE,
    ) -> None:  # fmt: skip
        self.bundle, self.backend = bundle, backend
        self._open, self._inputs, self._world = open, inputs, world

    def run(self, wanted: Wanted | None = None) -> Run:
        """Run once, and record the `wanted` values; without these, exactly as `distir run` does.

        Values that the programs do not compute by themselves, such as fused ones, are left out. Raises what a session
        raises.
        """
        plain = None if wanted is None else {str(rank): sorted(names) for rank, names in wanted.items()}
        self._world.exchange([True, plain], "the next run")
        return self._run(wanted)

    def close(self) -> None:
        """End the runs: release the other ranks."""
        self._world.exchange([False, None], "the next run")

    def serve(self) -> None:
        """On a rank other than 0, take part in the runs until the subject is closed."""
        while True:
            is_run, plain = self._world.exchange(None, "the next run, while rank 0 compares values")[0]
            if not is_run:
                return
            self._run(None if plain is None else {int(rank): names for rank, names in plain.items()})

    def _run(self, wanted: Wanted | None) -> Run:
        recorded: Recorded = {}
        session = self._open(None if wanted is None else tapped(self.backend, wanted, recorded))
        outputs = session(self._inputs)
        if wanted is not None and not self._world.is_alone:
            recorded = _gathered(session.communicator, self._world, recorded)
        return Run(outputs, recorded)


def _gathered(comm: Communicator, world: World, recorded: Recorded) -> Recorded:
    """Return the recorded values of all ranks on rank 0, nothing on the others; all ranks call this."""
    import torch

    mine = recorded.get(comm.rank, {})
    listing = [[name, list(tensor.shape), dtype_name(tensor.dtype)] for name, tensor in mine.items()]
    everyone = world.exchange(listing, "the list of recorded values")
    comm.start_counting()
    with world.running(comm.progress, ()):
        comm.progress.enter("collecting recorded values", "gather")
        if comm.rank != 0:
            for tensor in mine.values():
                if tensor.numel():
                    comm._send(tensor.contiguous().view(-1).to(comm.device), 0)
        else:
            for rank, theirs in enumerate(everyone):
                for name, shape, dtype in theirs if rank != 0 else ():
                    buffer = torch.empty(shape, dtype=torch_dtype(dtype), device=comm.device)
                    if buffer.numel():
                        comm._recv(buffer.view(-1), rank)
                    recorded.setdefault(rank, {})[name] = buffer.cpu()
        comm.progress.leave()
    return recorded if comm.rank == 0 else {}
