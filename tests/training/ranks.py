"""One rank of a launch that trains several bundles, one after the other: ``python ranks.py FOLDER``.

With ``apart`` as another argument, each rank is as if it was on a machine of its own.

FOLDER has for each job a bundle ``NAME.dist`` and its batches ``NAME.pt``; rank 0 writes losses and state beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from distir_relax.bundle import read_bundle
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.join import joined_world
from distir_relax.runtime.machine import limit_threads
from distir_relax.runtime.replicas import difference
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import numbers, training_of
from distir_relax.runtime.transports.mpi import MPICommunicator


def main(folder: Path, apart: bool) -> None:
    if apart:
        MPICommunicator._is_on_one_machine = lambda self, axis: False  # type: ignore[method-assign]
        MPICommunicator._sum_in_shared_memory = Communicator._sum_in_shared_memory  # type: ignore[method-assign]
    with joined_world() as world:
        limit_threads(world.local_size)
        for path in sorted(folder.glob("*.dist")):
            bundle = read_bundle(path)
            session, loss = Session(bundle, world=world), training_of(bundle.manifest).loss
            losses = []
            for step, batch in enumerate(torch.load(path.with_suffix(".pt"))):
                found = session({**batch, **numbers(bundle.manifest, step)}, outputs=(loss,))
                losses += [found[loss].item()] if found else []
            assert (error := difference(session, world.exchange, len(losses))) is None, error
            state = session.state()
            if world.rank == 0:
                torch.save((losses, state), path.with_suffix(".found"))
    world.exit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "apart" in sys.argv[2:])
