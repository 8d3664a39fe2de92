"""Finding out what started this process, and joining the launch that it is a rank of."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distir_relax.layout import DeviceMesh
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.world import World, check_size


def detect(environment: Mapping[str, str] = os.environ) -> str | None:
    """What started this process: "mpi" (mpirun, srun), "torch" (torchrun), or None for neither."""
    if any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        return "mpi"
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return "torch"
    return None


def join_world() -> World | None:
    """The launch this process is a rank of, or None when it was started alone.

    Raises RunError when the launcher's library cannot be loaded or the ranks cannot meet.
    """
    kind = detect()
    if kind == "mpi":
        from distir_relax.runtime.transports.mpi import MPIWorld

        return MPIWorld()
    if kind == "torch":
        from distir_relax.runtime.transports.torch_distributed import TorchWorld

        return TorchWorld()
    return None


def connect(mesh: DeviceMesh, device: str = "cpu") -> Communicator | None:
    """This process's communicator over `mesh`, or None when it was started alone (use threads then).

    Raises RunError when the number of ranks is not the mesh's.
    """
    world = join_world()
    if world is None:
        return None
    check_size(mesh, world.size)
    return world.communicator(mesh, device)
