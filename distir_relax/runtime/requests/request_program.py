"""A rank's program for a step of several requests, emitted from the text of the ranked stage when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle
from distir_relax.kernels.requests import Request
from distir_relax.runtime.backends.torch import load_text, prepare_weights
from distir_relax.runtime.backends.weights import RankWeights
from distir_relax.runtime.generation import LanguageProgram
from distir_relax.runtime.requests.recorded_steps import RecordedSteps
from distir_relax.runtime.requests.sized_values import SizedValues
from distir_relax.runtime.verification import read_stage
from distir_relax.runtime.watchdog import Steps

if TYPE_CHECKING:
    import torch

    from distir_relax.lowering.emit.torch import RequestsCode
    from distir_relax.lowering.emit.torch_function import ClockedOp
    from distir_relax.runtime.communicator import Communicator

_NONE: Mapping[str, list[ClockedOp]] = MappingProxyType({})


class RequestProgram:
    """A rank's program for steps of several requests. `steps` is as for a `RankProgram`."""

    def __init__(self, main: Callable[..., Any], comm: Communicator, weights: dict[str, Any], steps: Steps) -> None:
        self._main, self._comm, self._weights = main, comm, weights
        self.steps = steps
        self.sized: SizedValues | None = None
        self.recorded: RecordedSteps | None = None

    def __call__(self, requests: Sequence[Request], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a step on this rank's shards of the inputs; return its outputs, which the next step may overwrite.

        States are updated.
        """
        import torch

        with torch.inference_mode():
            if self.sized is not None:
                for request in requests:
                    request.sized = self.sized.of(request.past, request.new, request.last)
            if self.recorded is not None and (found := self.recorded.run(requests, inputs)) is not None:
                return found
            outputs: Sequence[torch.Tensor] = self._main(self._comm, self._weights, requests, *inputs)
            return outputs


def emit_request_programs(
    bundle: Bundle, entries: Collection[str] | None = None, clocked: Mapping[str, list[ClockedOp]] = _NONE,
    verified: bool = False,
) -> dict[str, RequestsCode]:  # fmt: skip
    """Return the program of each rank entry, or of those called `entries`, by name.

    Those that are in `clocked` record when their ops end, which are appended there. The text of the ranked stage is
    verified, unless it is `verified` already.

    Raises `RunError` for a bundle whose program does not continue sequences, or has no text.
    """
    from distir_relax.ir import gc_disabled
    from distir_relax.layout import assuming
    from distir_relax.lowering.emit.torch import to_torch_requests
    from distir_relax.lowering.ranked.one_sequence import OneSequence

    manifest = bundle.manifest
    LanguageProgram.for_requests(manifest)
    with gc_disabled():
        ranked = read_stage(bundle, "ranked", verified)
        wanted = [entry for entry in dict.fromkeys(ranked.ranks) if entries is None or entry in entries]
        functions = tuple(f for f in ranked.functions if f.name in wanted or f.name not in ranked.ranks)
        with assuming(ranked.guards):
            single = OneSequence().run(replace(ranked, functions=functions))
            states = {state.tensor.name: state.output for state in manifest.states}
            growing = {state.tensor.name: state.dim for state in manifest.states if state.grows}
            return {
                entry: to_torch_requests(single, entry, manifest.name, states, growing, clocked.get(entry))
                for entry in wanted
            }


def load_request_program(
    bundle: Bundle, programs: Mapping[str, RequestsCode], rank: int, comm: Communicator, max_length: int | None
) -> RequestProgram:
    """Load the program of a rank, with its weights, on the device of its communicator."""
    name = bundle.manifest.program_of(rank).name
    module = load_text(programs[name].text, f"{name}.requests", f"<{bundle.manifest.name}/{name}.requests.py>")
    weights = prepare_weights(module, comm, RankWeights(bundle, rank, comm.device))
    if comm.device == "cpu" and hasattr(module, "load_kernels"):
        # Here, rather than in the first step that needs them, which others would wait for.
        module.load_kernels()
    program = RequestProgram(module.main, comm, weights, module.STEPS)
    if comm.device == "cpu":
        program.recorded = RecordedSteps(module.main, comm, weights)
    if hasattr(module, "prepare_sizes"):

        def prepare(past: int, new: int, last: int) -> Sequence[torch.Tensor]:
            sizes = {"past": past, "new": new, "last": last}
            values: Sequence[torch.Tensor] = module.prepare_sizes(comm, weights, *(sizes[s] for s in module.SIZES))
            return values

        program.sized = SizedValues(prepare, module.SIZED, module.MASKS, max_length)
    return program
