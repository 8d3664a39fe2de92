"""The most memory that a rank's tensors take in a step, as torch's allocator has it: ``python memory.py FOLDER``.

As one rank of a launch: rank 0 writes ``NAME.peaks``, the bytes on each rank, beside each bundle ``NAME.dist``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from distir_relax.bundle import read_bundle
from distir_relax.runtime.divisions import in_parts
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.join import joined_world
from distir_relax.runtime.machine import limit_threads
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.training.batches import numbers, training_of


def peak(session: RankSession, batch: dict[str, torch.Tensor]) -> int:
    """The bytes of weights, state and inputs, and the most that is allocated above them."""
    manifest, comm = session.bundle.manifest, session.communicator
    local = local_inputs(manifest, in_parts(manifest, {**batch, **numbers(manifest, 0)}), comm.rank, "cpu")
    loss = (training_of(manifest).loss,)
    session.run_local(local, loss)
    program = session._program
    assert program is not None
    held = sum(t.numel() * t.element_size() for t in (*program.state.values(), *local))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        session.run_local(local, loss)
    events = sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    above = most = 0
    for event in events:
        if event.name() == "[memory]":
            above += event.nbytes()
            most = max(most, above)
    return held + most


def main(folder: Path) -> None:
    with joined_world() as world:
        assert world is not None, "mpirun starts this"
        limit_threads(world.local_size)
        for path in sorted(folder.glob("*.dist")):
            session = RankSession(world, read_bundle(path))
            session.load()
            peaks = world.exchange(peak(session, torch.load(folder / "batch.pt")))
            if world.rank == 0:
                path.with_suffix(".peaks").write_text(json.dumps(peaks))
        world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
