"""A bundle loaded once and called many times by one rank of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.runtime.backends import RankProgram, load_program
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.progress import Progress, Traffic
from distir_relax.runtime.step import run_step
from distir_relax.runtime.verification import verify_programs
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


class RankSession:
    """One rank of a launch: its program loaded, its weights in place. Every rank of `world` makes one and calls it.

    What it waits for is told to `world`, whose roll call ends a launch that hangs.
    """

    def __init__(self, world: World, bundle: Bundle, backend: str = "torch", device: str = "cpu") -> None:
        self.bundle = bundle
        self._world = world
        with world.waiting("meeting the other ranks"):
            self.communicator = world.communicator(bundle.manifest.mesh, rank_device(device, world.local_rank))
        self.communicator.local_size = world.local_size
        self._program: RankProgram | None = None
        self._backend = backend
        self.seconds = 0.0

    def load(self) -> None:
        """Load the program and this rank's slices of the weights. Raises BundleError or RunError on this rank alone."""
        comm = self.communicator
        # One rank of a node looks at the programs of all.
        if self.bundle.path is not None and self._world.local_rank == 0:
            verify_programs(self.bundle)
        self._program = load_program(self._backend, self.bundle, comm.rank, comm, comm.device)

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Run once on global arrays: the global outputs on rank 0, nothing on the others."""
        if self._program is None:
            self.load()
        assert self._program is not None
        comm = self.communicator
        comm.progress, comm.traffic = Progress(), Traffic()
        local = local_inputs(self.bundle.manifest, inputs, comm.rank, comm.device)
        with self._world.running(comm.progress, self._program.steps):
            self._wait_at("the start of the run")
            comm.progress.last = None
            self.seconds, outputs = run_step(self.bundle, comm, self._program, local)
            # A rank that left early could not say, in a stall of the others, that it has finished.
            self._wait_at("the end of the run")
        comm.checks_steps = False
        return outputs

    def _wait_at(self, place: str) -> None:
        self.communicator.progress.enter(place, "barrier")
        self.communicator._barrier()
        self.communicator.progress.leave()
