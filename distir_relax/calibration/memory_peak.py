"""Memory peak of a rank's tensors in a step, from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from distir_relax.bundle import local_bytes
from distir_relax.runtime.call_shapes import CallShapes
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.microbatch_io import in_parts
from distir_relax.runtime.session import Session

if TYPE_CHECKING:
    import torch


def step_peak(session: Session, inputs: Mapping[str, torch.Tensor], outputs: Collection[str] | None = None) -> int:
    """Return the bytes of this rank's weights, state and inputs plus the peak of a step's allocations.

    All ranks call this together, with the same global `inputs`; `outputs` are gathered as in a call of the session.
    """
    manifest, comm = session.bundle.manifest, session.communicator
    call = CallShapes(manifest).of(inputs)
    local = local_inputs(call.manifest, in_parts(call.manifest, inputs), comm.rank, comm.device)
    resident = sum(local_bytes(tensor, manifest.mesh, comm.rank) for tensor in manifest.weights)
    resident += sum(t.numel() * t.element_size() for t in local)

    def run() -> None:
        session.run_local(call, lambda rank, device: local, outputs)

    run()
    return resident + (host_peak(run) if comm.device == "cpu" else _device_peak(run, comm.device))


def _device_peak(run: Callable[[], None], device: str) -> int:
    """Return the bytes that a run adds to those allocated before, at most."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def host_peak(run: Callable[[], None]) -> int:
    """Return the largest sum of a run's allocations on the CPU; torch's profiler records them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = peak = 0
    for event in events:
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak
