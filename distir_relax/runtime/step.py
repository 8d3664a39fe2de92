"""Execution of one step of a rank's program: outputs are gathered on rank 0, state is updated in place."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING

from distir_relax.bundle import Manifest
from distir_relax.errors import RunError
from distir_relax.runtime.backends import RankProgram
from distir_relax.runtime.backends.weights import memory, own_memory
from distir_relax.runtime.call_shapes import Call
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.outputs import collect_output

if TYPE_CHECKING:
    import torch


def run_step(
    call: Call, comm: Communicator, program: RankProgram, local: list[torch.Tensor],
    outputs: Collection[str] | None = None, states: MutableMapping[str, torch.Tensor] | None = None,
    encoded: MutableMapping[str, torch.Tensor] | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:  # fmt: skip
    """Run `program` on this rank's shards of a call's inputs; return its seconds, and the global outputs on rank 0.

    Only the `outputs` named are gathered, by default all. `states` are this rank's shards of what a program that
    continues a sequence keeps, by name; they get their next values. `encoded` gets the outputs on this rank. Raises
    RunError if the results are not those that the bundle names.
    """
    comm.progress.start()
    start = time.perf_counter()
    kept = states or {}
    results = program(*local, *kept.values(), sizes=call.sizes)
    comm.finish_sends()
    if comm.device != "cpu":
        import torch

        torch.cuda.synchronize(comm.device)
    seconds = time.perf_counter() - start
    expected = [tensor for tensor in call.manifest.outputs if tensor.is_on(comm.rank)]
    if len(results) != len(expected) + len(kept):
        raise RunError(
            f"the program of rank {comm.rank} gives {len(results)} outputs, the bundle names "
            f"{len(expected) + len(kept)}"
        )
    if states is not None:
        states.update(zip(kept, results[len(expected) :], strict=True))
        results = results[: len(expected)]
    by_name = {tensor.name: result for tensor, result in zip(expected, results, strict=True)}
    _keep_state(call.manifest, program, by_name)
    if encoded is not None:
        encoded.update(by_name)
    gathered = [tensor for tensor in call.manifest.outputs if outputs is None or tensor.name in outputs]
    mine = [tensor.name for tensor in gathered if tensor.name in by_name]
    reserved = [*local, *program.state.values(), *(states or {}).values()]
    own = own_memory([by_name[name] for name in mine], reserved, program.held)
    global_outputs = {}
    for tensor in gathered:
        result = collect_output(comm, tensor, dict(zip(mine, own, strict=True)).get(tensor.name))
        if result is not None:
            global_outputs[tensor.name] = result
    comm.progress.finished = True
    return seconds, global_outputs


def _keep_state(manifest: Manifest, program: RankProgram, results: Mapping[str, torch.Tensor]) -> None:
    """Copy the new value of each state over the old one, unless the program updated it in place."""
    for name, state in program.state.items():
        new = results[manifest.updates[name]]
        if memory([new]) != memory([state]):
            state.copy_(new)
