"""Requests on one rank: their states, and steps of several of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.kernels.requests import Request
from distir_relax.runtime.call_shapes import Call, CallShapes
from distir_relax.runtime.generation.sampling import GREEDY, Sampling, TokenHistory, next_tokens
from distir_relax.runtime.generation.token_loop import LanguageProgram
from distir_relax.runtime.inputs import local_inputs
from distir_relax.runtime.outputs import collect_output, owners
from distir_relax.runtime.requests.request_program import RequestProgram, load_request_program
from distir_relax.runtime.requests.state_memory import RequestStates, StateMemory

if TYPE_CHECKING:
    import torch

    from distir_relax.lowering.emit.torch import RequestsCode
    from distir_relax.runtime.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Slot:
    """A request in a step: it computes `tokens` after `past` earlier ones, and what follows the `last` of them.

    Memory for `length` tokens is reserved in its first step, in which `past` is 0, or the number of tokens that it has
    in common with the request `source`. Later, `past` may be less than what it has computed: the rest is taken back.
    What follows is chosen by `sampling`. If that needs the history, the step of the prompt's last token has `prompt`.
    """

    request: int
    past: int
    tokens: Sequence[int]
    last: int
    length: int
    sampling: Sampling = GREEDY
    source: int = -1
    prompt: Sequence[int] = ()


class RankRequests:
    """The program and the states of the requests of one rank; all ranks make theirs together.

    `programs` are the result of `emit_request_programs`, or the program of the rank.
    """

    def __init__(
        self, bundle: Bundle, programs: Mapping[str, RequestsCode] | RequestProgram, comm: Communicator
    ) -> None:
        if comm.device == "cpu":
            # Also a rank whose own program is not bound; before a rank may fail on its own.
            comm.share_memory()
        self._comm = comm
        self._manifest = bundle.manifest
        self._language = LanguageProgram.for_requests(bundle.manifest)
        self._calls = CallShapes(bundle.manifest)
        self._program = (
            programs
            if isinstance(programs, RequestProgram)
            else load_request_program(bundle, programs, comm.rank, comm, self._language.max_length)
        )
        self._memory = StateMemory(bundle.manifest, comm.rank, comm.device)
        self._states: dict[int, RequestStates] = {}
        self._histories: dict[int, TokenHistory] = {}
        self.steps = self._program.steps
        self.busy = 0.0
        """Seconds of steps, without those in communication."""
        # The lowest rank that has some of the logits: in a pipeline, others go on with the next step meanwhile.
        self.root = min(owners(bundle.manifest.mesh, bundle.manifest.outputs[0]))

    def step(self, slots: Sequence[Slot], ended: Collection[int] = ()) -> list[list[int]] | None:
        """Run a step; return the next token after each of the `last` ones of each slot, None on ranks but `root`.

        The states of the requests `ended` are freed first. All ranks call this alike.
        """
        progress = self._comm.progress
        began, waited = time.monotonic(), progress.waited
        logits = self._logits(slots, ended)
        tokens = None
        if logits is not None:
            self._extend_histories(slots)
            tokens = choose_tokens(logits, slots, self._histories)
        self.busy += time.monotonic() - began - (progress.waited - waited)
        return tokens

    def logits(self, slots: Sequence[Slot], ended: Collection[int] = ()) -> torch.Tensor | None:
        """Run a step as `step` does; return its logits, (rows, vocabulary) in the order of the slots."""
        logits = self._logits(slots, ended)
        return None if logits is None else logits.clone()

    def _logits(self, slots: Sequence[Slot], ended: Collection[int]) -> torch.Tensor | None:
        """Return the logits, which the next step may overwrite."""
        import torch

        for slot in slots:
            self._prepare(slot)
        # After others have taken over the tokens that they share with them.
        states = [self._states[slot.request].tensors for slot in slots]
        for request in ended:
            self._states.pop(request, None)
            self._histories.pop(request, None)
        if not slots:
            return torch.empty(0, 0, dtype=torch.float32) if self._comm.rank == self.root else None
        comm = self._comm
        requests = [
            Request(slot.past, len(slot.tokens), slot.last, tensors)
            for slot, tensors in zip(slots, states, strict=True)
        ]
        call = self._call(sum(r.new for r in requests), sum(r.last for r in requests))
        results = self._program(requests, self._inputs([token for slot in slots for token in slot.tokens], call))
        comm.finish_sends()
        # Ranks that matched in one step match in all: a check takes longer than the communication of a few rows.
        comm.checks_steps = False
        tensor = call.manifest.outputs[0]
        found = collect_output(comm, tensor, results[0] if tensor.is_on(comm.rank) else None, self.root)
        return None if found is None else found[0]

    def collect_busy(self) -> list[float] | None:
        """Return `busy` of each rank, None on ranks but `root`. All ranks call this alike."""
        import torch

        comm = self._comm
        mine = torch.tensor([self.busy], dtype=torch.float64, device=comm.device)
        if comm.rank != self.root:
            comm.send(mine, self.root)
            return None
        return [
            float(mine if rank == self.root else comm.recv((1,), "float64", rank)) for rank in range(comm.world_size)
        ]

    def clear(self) -> None:
        """Free the states of all requests."""
        self._states.clear()
        self._histories.clear()

    def _extend_histories(self, slots: Sequence[Slot]) -> None:
        """Add the tokens of a step, drafts included, to the histories of requests that need one."""
        import torch

        for slot in slots:
            if slot.last and slot.sampling.needs_history:
                if slot.prompt:
                    self._histories[slot.request] = TokenHistory(torch.tensor([slot.prompt]), len(slot.prompt))
                history, tokens = self._histories[slot.request], torch.tensor([slot.tokens])
                self._histories[slot.request] = history.extended(slot.past, tokens)

    def _prepare(self, slot: Slot) -> None:
        """Let the states of a request be those before its new tokens."""
        states = self._states.get(slot.request)
        if states is None:
            states = (
                self._memory.fork(self._states[slot.source], slot.past, slot.length)
                if slot.source >= 0
                else self._memory.new(slot.length)
            )
            self._states[slot.request] = states
        states.length = slot.past + len(slot.tokens)

    def _inputs(self, tokens: Sequence[int], call: Call) -> list[torch.Tensor]:
        """Return this rank's shards of the inputs of a step with the tokens of all requests."""
        import torch

        ids = torch.tensor([tokens], dtype=torch.int64)
        return local_inputs(call.manifest, {self._language.tokens: ids}, self._comm.rank, self._comm.device)

    def _call(self, rows: int, last: int) -> Call:
        """Return the manifest of the rows of all requests."""
        sizes = {symbol.name: 1 for symbol in self._manifest.symbols} | {"past": 0, "new": rows, "last": last}
        return self._calls.at(sizes)


def choose_tokens(
    logits: torch.Tensor, slots: Sequence[Slot], histories: Mapping[int, TokenHistory]
) -> list[list[int]]:
    """Return the token after each of the `last` ones of each slot, from the rows of all slots in their order.

    `histories` are those of the requests whose sampling needs one, with the tokens of this step.
    """
    greedy = logits.argmax(-1).tolist() if any(map(_is_argmax, slots)) and len(logits) else []
    chosen, row = [], 0
    for slot in slots:
        rows = range(row, row + slot.last)
        first = slot.past + len(slot.tokens) - slot.last + 1
        if _is_argmax(slot):
            chosen.append(greedy[row : row + slot.last])
        else:
            sampling, history = slot.sampling, histories.get(slot.request)
            chosen.append(
                [int(next_tokens(logits[r : r + 1], first + n, sampling, history)[0]) for n, r in enumerate(rows)]
            )
        row += slot.last
    return chosen


def _is_argmax(slot: Slot) -> bool:
    return slot.sampling.temperature == 0 and not slot.sampling.needs_history
