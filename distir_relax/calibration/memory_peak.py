"""The most memory that a rank's tensors take in a step, as torch's allocator has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from distir_relax.bundle import local_bytes
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.microbatch_io import in_parts
from distir_relax.runtime.rank_session import RankSession

if TYPE_CHECKING:
    import torch


def step_peak(session: RankSession, inputs: Mapping[str, torch.Tensor], outputs: Collection[str] | None = None) -> int:
    """The bytes of this rank's weights, state and inputs, and the most that a step on the CPU allocates above them.

    Every rank calls this, with the same global `inputs`; `outputs` are brought together as in a call of the session.
    """
    from torch.profiler import ProfilerActivity, profile

    manifest, comm = session.bundle.manifest, session.communicator
    local = local_inputs(manifest, in_parts(manifest, inputs), comm.rank, comm.device)
    held = sum(local_bytes(tensor, manifest.mesh, comm.rank) for tensor in manifest.weights)
    held += sum(t.numel() * t.element_size() for t in local)
    session.run_local(local, outputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        session.run_local(local, outputs)
    assert seen.profiler is not None
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    above = most = 0
    for event in events:
        if event.name() == "[memory]":
            above += event.nbytes()
            most = max(most, above)
    return held + most
