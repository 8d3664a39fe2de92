"""One run of one rank's program."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.errors import RunError
from distir_relax.runtime.backends import RankProgram
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.outputs import collect_output

if TYPE_CHECKING:
    import torch


def run_step(
    bundle: Bundle, comm: Communicator, program: RankProgram, local: list[torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Run `program` on this rank's shards of the inputs: its seconds, and the global outputs on rank 0.

    Raises RunError where the results are not those that the bundle names.
    """
    start = time.perf_counter()
    results = program(*local)
    if comm.device != "cpu":
        import torch

        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    expected = [tensor for tensor in bundle.manifest.outputs if tensor.is_on(comm.rank)]
    if len(results) != len(expected):
        raise RunError(
            f"the program of rank {comm.rank} gives {len(results)} outputs, the bundle names {len(expected)}"
        )
    outputs = {}
    found = {tensor.name: result for tensor, result in zip(expected, results, strict=True)}
    for tensor in bundle.manifest.outputs:
        whole = collect_output(comm, tensor, found.get(tensor.name))
        if whole is not None:
            outputs[tensor.name] = whole
    comm.progress.finished = True
    return seconds, outputs
