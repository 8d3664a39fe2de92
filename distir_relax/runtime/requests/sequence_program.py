"""A rank's program that continues a batch of sequences, run as a step of requests: one for each sequence.

A model whose sequences depend on each other, or on their number, runs the program of the batch.

Such a step is faster than the program of the batch: its states are buffers with room for all tokens, attention of all
sequences is one kernel, and steps of one token are recorded (`recorded_steps`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.bundle import STAGE_FILES, Bundle
from distir_relax.kernels.requests import Request
from distir_relax.layout import size_of, symbols_of
from distir_relax.runtime.backends import Collect, RankProgram
from distir_relax.runtime.generation import LanguageProgram
from distir_relax.runtime.requests.page_memory import is_available
from distir_relax.runtime.requests.request_program import (
    RequestProgram,
    emit_request_programs,
    load_request_program,
)
from distir_relax.runtime.requests.state_memory import RequestStates, StateMemory
from distir_relax.runtime.verification import read_stage
from distir_relax.runtime.watchdog import Steps

if TYPE_CHECKING:
    import torch

    from distir_relax.lowering.emit.torch import RequestsCode
    from distir_relax.runtime.communicator import Communicator


def load_sequence_programs(
    bundle: Bundle, communicators: Sequence[Communicator], collect: Collect = lambda value: [value()]
) -> list[RankProgram]:
    """Return the programs of the ranks of this process; none for a bundle that cannot have them.

    The ranks have these `communicators`. In a launch `collect` collects from all processes, which choose alike.
    """
    programs: dict[str, RequestsCode] = {}

    def prepare() -> list[bool]:
        entries = {bundle.manifest.program_of(comm.rank).name for comm in communicators}
        is_possible = all(_can_continue(bundle, comm.device) for comm in communicators)
        is_possible = is_possible and _is_independent(bundle, entries)
        if is_possible:
            # Sessions verify their programs.
            programs.update(emit_request_programs(bundle, entries, verified=True))
        return [is_possible, any(program.runs_once for program in programs.values())]

    choices = collect(prepare)
    # Other programs run some ops for each sequence, where that of the batch runs them once.
    if not all(is_possible for is_possible, _ in choices) or not any(runs for _, runs in choices):
        return []
    # Ranks share memory from the first step on, which is not recorded.
    return [SequenceProgram(bundle, programs, comm) for comm in communicators]


def _can_continue(bundle: Bundle, device: str) -> bool:
    """Return whether `SequenceProgram` can run a bundle: a language model without encoder, whose batch is not split.

    States have room for the longest sequence, so there must be a bound, and memory that is in use only once it is
    written.
    """
    manifest = bundle.manifest
    if not manifest.states or manifest.encoder is not None or STAGE_FILES["ranked"] not in bundle.texts:
        return False
    if len(manifest.inputs) != 1 or len(manifest.outputs) != 1 or manifest.inputs[0].shards:
        return False
    return device == "cpu" and is_available() and LanguageProgram.of(manifest).max_length is not None


def _is_independent(bundle: Bundle, entries: Collection[str]) -> bool:
    """Return whether the results of a sequence do not depend on the others of its batch, as those of a request."""
    from distir_relax.lowering.ranked.sequence_rows import are_sequences_independent

    rows = bundle.manifest.inputs[0].shape[0]
    if rows == 1:
        return True
    (batch,) = symbols if len(symbols := symbols_of(rows)) == 1 else (None,)
    if batch is None or rows != size_of(batch):
        return False
    return are_sequences_independent(read_stage(bundle, "ranked", verified=True), batch, entries)


class SequenceProgram:
    """A `RankProgram` that keeps the states of its sequences itself: it returns those that it is given."""

    def __init__(self, bundle: Bundle, programs: Mapping[str, RequestsCode], comm: Communicator) -> None:
        self._manifest, self._rank = bundle.manifest, comm.rank
        length = LanguageProgram.of(bundle.manifest).max_length
        assert length is not None, "_can_continue"
        self._length = length
        self.requests: RequestProgram = load_request_program(bundle, programs, comm.rank, comm, length)
        """The program for steps of other requests than its sequences."""
        self._memory = StateMemory(bundle.manifest, comm.rank, comm.device)
        self._states: list[RequestStates] = []
        self.steps: Steps = self.requests.steps
        self.state: Mapping[str, torch.Tensor] = {}
        self.held: Collection[int] = ()

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """See `RankProgram`."""
        (tokens,), (output,) = self._manifest.inputs, self._manifest.outputs
        rows, new = tokens.at(sizes).shape
        past, last = sizes["past"], sizes["last"]
        count = int(tokens.is_on(self._rank))
        if not past:
            self._states = [self._memory.new(self._length) for _ in range(rows)]
        requests = [Request(past, new, last, states.tensors) for states in self._states]
        for states in self._states:
            states.length = past + new
        results = self.requests(requests, [x.reshape(1, rows * new) for x in inputs[:count]])
        found = [results[0].clone().view(rows, last, -1)] if output.is_on(self._rank) else []
        return [*found, *inputs[count:]]
