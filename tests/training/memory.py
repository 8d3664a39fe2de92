"""The most memory that a rank's tensors take in a step, as torch's allocator has it: ``python memory.py FOLDER``.

As one rank of a launch: rank 0 writes ``NAME.peaks``, the bytes on each rank, beside each bundle ``NAME.dist``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from distir_relax.bundle import read_bundle
from distir_relax.calibration.memory_peak import step_peak
from distir_relax.runtime.join import joined_world
from distir_relax.runtime.machine import limit_threads
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import numbers, training_of


def main(folder: Path) -> None:
    with joined_world() as world:
        limit_threads(world.local_size)
        for path in sorted(folder.glob("*.dist")):
            session = Session(read_bundle(path), world=world)
            manifest = session.bundle.manifest
            batch = {**torch.load(folder / "batch.pt"), **numbers(manifest, 0)}
            peaks = world.exchange(step_peak(session, batch, (training_of(manifest).loss,)))
            if world.rank == 0:
                path.with_suffix(".peaks").write_text(json.dumps(peaks))
    world.exit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
