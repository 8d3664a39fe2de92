"""The engine: requests in, tokens out, one step of all running requests after the other."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from distir_relax.bundle import Bundle, Manifest
from distir_relax.errors import RunError
from distir_relax.runtime.generation import LanguageProgram, Sampling, bundle_tokenizer
from distir_relax.runtime.requests import Slot, StateBytes, pipeline_depth
from distir_relax.serving.drafts import PromptLookup
from distir_relax.serving.prefixes import PrefixIndex
from distir_relax.serving.request import GenerationRequest
from distir_relax.serving.scheduler import MOST_TOKENS, Limits, Scheduler, Span
from distir_relax.support.units import size as size_text
from distir_relax.text import Tokenizer

_DEFAULT_MEMORY = 1 << 30
_FILLER = -2
"""The number of a request that only fills a step."""


class Executor(Protocol):
    """Runs steps on all ranks of a bundle, in the order in which they are submitted; several can be in flight."""

    def submit(self, slots: Sequence[Slot], ended: Collection[int] = ()) -> None:
        """Start a step; see `RankRequests.step`. Raises what a rank has raised."""
        ...

    def result(self) -> list[list[int]]:
        """Wait for the first step in flight; return the tokens for each of its slots. Raises what a rank has raised."""
        ...

    def busy(self) -> list[float]:
        """Return the seconds that each rank has computed. Raises what a rank has raised."""
        ...

    def close(self) -> None:
        """Release the ranks, and all states."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine.

    `max_requests` run at once; others wait. `memory` is that of a rank for the states of requests, in bytes; None is
    what the machine has left beside the weights where the engine starts its ranks, and 1 GB elsewhere. A step has
    at most `step_tokens` rows, and `chunk_tokens` of prompts while requests generate: more of them answer a prompt
    sooner, and delay the next token of the others. Up to `drafts` tokens of a request are drafted in each step
    (`PromptLookup`), which changes no token; programs whose states do not grow cannot take them back, and have none.
    With `share_prefixes` a request takes over the first tokens that another has computed: one that runs, or one that
    has ended and whose memory no other needs yet.

    With `batch_invariant` the logits of a request are the same, bit for bit, whatever requests run with it: every
    step is filled up to ``chunk_tokens + 2 max_requests`` rows, so that products of all steps add in one order, and
    prompts are cut alike. There are no drafts and no shared prefixes then.
    """

    max_requests: int = 16
    memory: int | None = None
    step_tokens: int = 512
    chunk_tokens: int = 128
    drafts: int = 0
    share_prefixes: bool = True
    batch_invariant: bool = False

    def check(self, manifest: Manifest) -> None:
        """Raise RunError for a program that continues no sequences, and for limits that no request fits into."""
        self.limits(manifest, LanguageProgram.for_requests(manifest).max_length)

    def limits(self, manifest: Manifest, max_length: int | None) -> Limits:
        """Return the limits of a scheduler for a program. Raises RunError if no request fits into memory."""
        bytes_of = StateBytes(manifest)
        each, token = max(bytes_of.of_kinds(0)), max(bytes_of.token)
        memory = _DEFAULT_MEMORY if self.memory is None else self.memory
        if memory < each * self.max_requests + token:
            raise RunError(
                f"expected memory for the states of {self.max_requests} requests, of {size_text(token)} a token and "
                f"{size_text(each)} a request, found {size_text(memory)}",
                hint="give the engine more memory, or allow fewer requests",
            )
        if self.batch_invariant:
            return self._invariant_limits(memory, bytes_of, max_length)
        bounded = self.step_tokens if max_length is None else min(self.step_tokens, max_length)
        requests, chunk = min(self.max_requests, bounded), min(self.chunk_tokens, bounded)
        return Limits(requests, memory, bounded, chunk, False, bytes_of.of_kinds, max_length or MOST_TOKENS)

    def _invariant_limits(self, memory: int, bytes_of: StateBytes, max_length: int | None) -> Limits:
        rows = self.chunk_tokens + 2 * self.max_requests
        if max_length is not None and rows > max_length:
            raise RunError(
                f"expected at most {max_length} rows in a step, found {rows}: a chunk and two for each request",
                hint="lower chunk_tokens or max_requests",
            )
        if self.drafts:
            raise RunError("expected no drafts with batch_invariant")
        step = self.chunk_tokens + self.max_requests
        longest = max_length or MOST_TOKENS
        return Limits(self.max_requests, memory, step, self.chunk_tokens, True, bytes_of.of_kinds, longest)


class Engine:
    """Generates tokens for many requests with one program: continuous batching.

    Steps run in the thread that iterates over a request, calls `step`, or `run`; several threads may do so. Requests
    can be added and cancelled during a step. A request gets the tokens that it would get alone, whatever others run
    at the same time, up to rounding: a product of more rows may add in another order.
    """

    def __init__(self, executor: Executor, bundle: Bundle, options: EngineOptions | None = None) -> None:
        self._executor = executor
        self._bundle = bundle
        manifest = bundle.manifest
        self._language = LanguageProgram.for_requests(manifest)
        options = options or EngineOptions()
        self.limits = options.limits(manifest, self._language.max_length)
        self._scheduler = Scheduler(self.limits, self._find_prefix)
        self._requests: dict[int, GenerationRequest] = {}
        self._ended: list[int] = []
        self._numbers = itertools.count()
        # One step at a time; the second is held only while requests and their plan change.
        self._exclusive = threading.Lock()
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._drafts = options.drafts
        grow = all(state.grows for state in manifest.states)
        if self._drafts and not grow:
            raise RunError("expected no drafts for a program that has states besides those that grow")
        # What a state without positions was some tokens ago is not known.
        shares = options.share_prefixes and not self.limits.whole_chunks
        self._prefixes = PrefixIndex() if grow and shares else None
        self._sources: dict[int, int] = {}
        self._depth = pipeline_depth(manifest)
        self._flight: deque[list[Slot]] = deque()
        self._active = self._since = 0.0
        self.steps = 0
        self.accepted_drafts = 0
        self.shared_tokens = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `RunError` for a bundle that has none."""
        bundle = self._bundle
        return bundle_tokenizer(bundle.texts, bundle.path, bundle.manifest.name)

    @property
    def running(self) -> int:
        """The number of requests in the next step."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """The number of requests that wait for memory, or for another to end."""
        return self._scheduler.waiting

    @property
    def reserved_tokens(self) -> int:
        """The number of tokens that memory is set aside for."""
        return self._scheduler.reserved_tokens

    def submit(
        self, prompt: Any, max_new_tokens: int | None = None, sampling: Sampling | Mapping[str, Any] | None = None,
        stop: Collection[int] | None = None, on_token: Callable[[GenerationRequest], None] | None = None,
        fit: bool = False,
    ) -> GenerationRequest:  # fmt: skip
        """Add a request for the tokens after those of a prompt, and return it at once.

        The prompt is a text, a list of the messages of a chat, or token ids. `max_new_tokens`, `sampling`, and the
        options that a table of some leaves out, are by default the model's own for text and chats, 64 and greedy
        otherwise. The request ends after `max_new_tokens`, or with a token of `stop`: by default those of the model for
        text and chats, none for tokens. `on_token` is called after each step with new tokens, and at the end, by the
        thread that runs the step. With `fit` fewer new tokens are generated if the program or the memory has no room
        for `max_new_tokens`.

        Raises RunError for a prompt that is empty, of another kind, or too long for the program or the memory, and for
        text without a tokenizer.
        """
        given = self._language.prompt(prompt, lambda: self.tokenizer, stop)
        ids = given.ids
        options = {} if sampling is None or isinstance(sampling, Sampling) else sampling
        max_new_tokens, own = given.settings(max_new_tokens, options)
        chosen = sampling if isinstance(sampling, Sampling) else own
        if given.is_batch:
            raise RunError("expected the token ids of one prompt, found a batch", hint="submit them one by one")
        if fit:
            max_new_tokens = max(1, min(max_new_tokens, self.limits.memory_tokens - ids.shape[1]))
        self._language.check(ids, max_new_tokens)
        with self._lock:
            self._check_open()
            number = next(self._numbers)
            request = GenerationRequest(
                number, ids[0].tolist(), max_new_tokens, chosen, given.stop, self, on_token, given.tokenizer
            )
            if max_new_tokens == 0:
                request.ended = "length"
                return request
            if self._drafts:
                request.lookup = PromptLookup()
                request.lookup.extend(request.prompt)
            self._scheduler.add(number, ids.shape[1], ids.shape[1] + max_new_tokens)
            self._requests[number] = request
            return request

    def cancel(self, request: GenerationRequest) -> None:
        """End a request before its last token; see `GenerationRequest.cancel`."""
        with self._lock:
            if not request.ended:
                self._end(request, "cancelled")

    def step(self) -> bool:
        """Wait for a step, after starting as many as keep all stages busy; return whether there was any.

        Raises what a rank raised, in this step or an earlier one; all requests then end with this error.
        """
        with self._exclusive:
            try:
                with self._lock:
                    self._check_open()
                    self._fill()
                if not self._flight:
                    return False
                tokens = self._executor.result()
            except BaseException as error:
                with self._lock:
                    self._fail(error)
                raise
            with self._lock:
                slots = self._flight.popleft()
                if not self._flight:
                    self._active += time.perf_counter() - self._since
                self.steps += bool(slots)
                self._advance(slots, tokens)
            return bool(slots)

    def idle(self) -> list[float]:
        """Return for each rank the share of the time with steps in flight in which it did not compute.

        That is the bubble of a pipeline, waiting for other ranks, and communication; 0 before the first step. It waits
        for the steps in flight. Raises what a rank raised.
        """
        busy = self._executor.busy()
        with self._lock:
            active = self._active + (time.perf_counter() - self._since if self._flight else 0.0)
        return [max(0.0, 1 - seconds / active) if active else 0.0 for seconds in busy]

    def run(self) -> None:
        """Run steps until all requests have ended."""
        while self.step():
            pass

    def close(self) -> None:
        """Cancel all requests, and release the ranks."""
        with self._exclusive, self._lock:
            for request in list(self._requests.values()):
                self._end(request, "cancelled")
            if self._error is None:
                self._error = RunError("the engine is closed", hint="make a new one")
                self._executor.close()

    def _fill(self) -> None:
        """Start steps, until one for each stage is in flight, or no request is left to run."""
        while len(self._flight) < self._depth:
            busy = {slot.request for slots in self._flight for slot in slots}
            slots = self._next_slots(busy)
            self._take_evicted()
            if not slots and (not self._ended or self._flight):
                return
            ended, self._ended = self._ended, []
            if slots and self.limits.whole_chunks:
                slots.append(self._filler(slots))
                ended.append(_FILLER)
            if not self._flight:
                self._since = time.perf_counter()
            self._executor.submit(slots, ended)
            self._flight.append(slots)

    def _filler(self, slots: Sequence[Slot]) -> Slot:
        """Return a request that fills a step up to a fixed number of rows, and of logits; it ends with the step."""
        rows = self.limits.step_tokens + self.limits.requests - sum(len(slot.tokens) for slot in slots)
        last = self.limits.requests - sum(slot.last for slot in slots)
        return Slot(_FILLER, 0, [0] * rows, last, rows)

    def _next_slots(self, busy: Collection[int]) -> list[Slot]:
        drafts = self._propose(busy)
        planned = self._scheduler.plan({number: len(tokens) for number, tokens in drafts.items()}, busy, self._depth)
        return [self._slot(number, span, drafts.get(number, [])[: span.drafts]) for number, span in planned.items()]

    def _propose(self, busy: Collection[int]) -> dict[int, list[int]]:
        """Return drafts for the requests that generate."""
        if not self._drafts:
            return {}
        lookups = {n: self._requests[n].lookup for n in self._scheduler.generating() if n not in busy}
        return {number: lookup.propose(self._drafts) for number, lookup in lookups.items() if lookup is not None}

    def _slot(self, number: int, span: Span, drafts: Sequence[int]) -> Slot:
        request = self._requests[number]
        prompt = len(request.prompt)
        known = request.prompt if span.start < prompt else request.tokens
        first = 0 if span.start < prompt else prompt
        tokens = known[span.start - first : span.stop - first]
        is_last = span.stop == prompt + len(request.tokens)
        last = (1 + len(drafts)) * is_last
        source = self._sources.pop(number, -1)
        if self._prefixes is not None:
            if source >= 0:
                self.shared_tokens += span.start
                self._prefixes.extend(number, request.prompt[: span.start])
            self._prefixes.extend(number, tokens)
        is_first = last and not request.tokens and request.sampling.needs_history
        return Slot(
            number, span.start, [*tokens, *drafts], last, prompt + request.count, request.sampling, source,
            request.prompt if is_first else (),
        )  # fmt: skip

    def _find_prefix(self, number: int) -> int:
        """Return how many first tokens of a request that has not begun another has computed, but for the last one."""
        self._sources.pop(number, None)
        self._take_evicted()
        if self._prefixes is None:
            return 0
        source, shared = self._prefixes.find(self._requests[number].prompt[:-1])
        if source >= 0:
            self._sources[number] = source
            self._scheduler.touch(source)
        return shared

    def _take_evicted(self) -> None:
        """Free requests that have ended, and are not kept."""
        for number in self._scheduler.evicted:
            if self._prefixes is not None:
                self._prefixes.remove(number)
        self._ended += self._scheduler.evicted
        self._scheduler.evicted.clear()

    def _advance(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> None:
        """Add the tokens of a step to its requests: one, and one more for each good draft."""
        now = time.perf_counter()
        for slot, after in zip(slots, tokens, strict=True):
            # One that was cancelled during the step is gone.
            request = self._requests.get(slot.request)
            if request is None or not slot.last:
                continue
            drafts = slot.tokens[len(slot.tokens) - slot.last + 1 :]
            chosen: list[int] = []
            for place, token in enumerate(after):
                chosen.append(token)
                if token in request.stop or place == len(drafts) or token != drafts[place]:
                    break
            self.accepted_drafts += len(chosen) - 1
            if self._prefixes is not None:
                self._prefixes.extend(request.number, chosen[:-1])
            request.tokens += chosen
            request.times += [now] * len(chosen)
            if chosen[-1] in request.stop:
                self._end(request, "stop")
            elif len(request.tokens) == request.count:
                self._end(request, "length")
            else:
                self._scheduler.extend(request.number, len(chosen))
                if request.lookup is not None:
                    request.lookup.extend(chosen)
                if request.on_token is not None:
                    request.on_token(request)

    def _end(self, request: GenerationRequest, reason: str) -> None:
        request.ended = reason
        self._requests.pop(request.number, None)
        self._scheduler.remove(request.number, self._prefixes is not None)
        if request.on_token is not None:
            request.on_token(request)

    def _fail(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error = error
        self._flight.clear()
        for request in list(self._requests.values()):
            request.error = error
            self._end(request, "error")
        self._executor.close()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
