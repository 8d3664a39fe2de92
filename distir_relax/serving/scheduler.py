"""Continuous batching: which requests take part in the next step, and with how many tokens.

Requests join and leave between steps. One that generates has one row in each step. A prompt is fed in chunks, in the
order of arrival, so that a long one delays the tokens of others by a bounded time (chunked prefill, Sarathi-Serve,
Agrawal et al., OSDI 2024). Memory for the longest a request can get is set aside when it joins, so that none has to be
stopped later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.errors import RunError

MOST_TOKENS = 1 << 40
"""More tokens than any request has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a scheduler: requests at once, memory, and rows of a step.

    Of ranks of each kind, a request takes as much of the `memory` as `taken` returns for its number of tokens: by
    default one for each token. A step has at most `step_tokens` rows, and at most `chunk_tokens` of prompts while other
    requests generate. With `whole_chunks` each prompt is cut into chunks of `chunk_tokens`, of which a step takes one,
    whatever else it has.
    """

    requests: int
    memory: int
    step_tokens: int
    chunk_tokens: int
    whole_chunks: bool = False
    taken: Callable[[int], Sequence[int]] = lambda tokens: (tokens,)
    longest: int = MOST_TOKENS
    """The largest number of tokens of a request, whatever the memory."""

    def __post_init__(self) -> None:
        for name in ("requests", "memory", "step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise RunError(f"expected {name.replace('_', ' ')} of at least 1, found {getattr(self, name)}")

    @property
    def memory_tokens(self) -> int:
        """The largest number of tokens of a request that fits into memory."""
        return bisect_right(range(1, self.longest + 1), self.memory, key=lambda tokens: max(self.taken(tokens)))


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a request in a step, from `start` to `stop`, and the number of drafts after them."""

    start: int
    stop: int
    drafts: int = 0


@dataclass(slots=True)
class _Sequence:
    """A request: tokens known so far and computed so far, and the most it can have."""

    known: int
    length: int
    computed: int = 0
    has_begun: bool = False

    @property
    def left(self) -> int:
        return self.known - self.computed


@dataclass(slots=True)
class Scheduler:
    """Requests by number: those that wait, in order of arrival, and those that run."""

    limits: Limits
    find_prefix: Callable[[int], int] = lambda number: 0
    """Returns the number of first tokens of a request that need not be computed, before it takes part."""
    evicted: list[int] = field(default_factory=list)
    """Kept requests whose memory others need; the caller removes them."""
    _kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _waiting: deque[int] = field(default_factory=deque)
    _running: list[int] = field(default_factory=list)
    _sequences: dict[int, _Sequence] = field(default_factory=dict)

    @property
    def running(self) -> int:
        """The number of requests that have joined."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of requests that have not."""
        return len(self._waiting)

    @property
    def reserved_tokens(self) -> int:
        """The tokens that memory is set aside for, without those of requests that have ended."""
        return sum(self._sequences[number].length for number in self._running)

    @property
    def kept_tokens(self) -> int:
        """The tokens of requests that have ended, and are kept for others that begin alike."""
        return sum(self._kept.values())

    def add(self, number: int, prompt: int, length: int) -> None:
        """Add a request of `prompt` tokens that can grow to `length`. Raises RunError if memory never suffices."""
        if max(self.limits.taken(length)) > self.limits.memory:
            raise RunError(
                f"expected at most {self.limits.memory_tokens} tokens of a request, which fit into memory, found "
                f"{length} with the new ones",
                hint="ask for fewer tokens, or give the engine more memory",
            )
        self._sequences[number] = _Sequence(prompt, length)
        self._waiting.append(number)

    def remove(self, number: int, keep: bool = False) -> None:
        """Remove a request that has ended or is cancelled; unknown ones are ignored.

        With `keep` its tokens stay until others need their memory; otherwise it is evicted at once if it had joined.
        """
        sequence = self._sequences.pop(number, None)
        if sequence is None:
            return
        if number not in self._running:
            self._waiting.remove(number)
            return
        self._running.remove(number)
        if keep:
            self._kept[number] = sequence.computed
        elif sequence.has_begun:
            self.evicted.append(number)

    def touch(self, number: int) -> None:
        """Let a kept request be the last to be evicted."""
        if number in self._kept:
            self._kept.move_to_end(number)

    def generating(self) -> list[int]:
        """Return the requests of which only the last token is left to compute: those that drafts can be added to."""
        return [number for number in self._running if self._sequences[number].left == 1]

    def plan(
        self, drafts: Mapping[int, int] | None = None, busy: Collection[int] = (), depth: int = 1
    ) -> dict[int, Span]:
        """Return the requests of the next step with the tokens that each computes; those known count as computed.

        `drafts` are the numbers of drafts that requests have; they get the rows that others leave. Requests that are
        `busy` are in a step already. If steps run at a `depth`, one after the other in a pipeline, requests are shared
        out among them.
        """
        self._admit()
        idle = [number for number in self._running if number not in busy]
        for number in idle:
            # The requests that are kept may change until this one takes part.
            if not self._sequences[number].has_begun:
                self._sequences[number].computed = self.find_prefix(number)
        # A step takes its share of all requests, not of those that other steps have left.
        share = -(-len(self._running) // depth)
        rows = self.limits.step_tokens
        counts: dict[int, int] = {}
        for number in idle:
            if self._sequences[number].left == 1 and rows and len(counts) < share:
                counts[number] = 1
                rows -= 1
        if counts or self.limits.whole_chunks:
            rows = min(rows, self.limits.chunk_tokens)
        for number in idle:
            if self._sequences[number].left > 1 and len(counts) < share:
                count = min(rows, self._sequences[number].left)
                is_whole = count == min(self.limits.chunk_tokens, self._sequences[number].left)
                if count and (is_whole or not self.limits.whole_chunks):
                    counts[number] = count
                    rows -= count
        planned = {}
        for number, count in counts.items():
            sequence = self._sequences[number]
            sequence.has_begun = True
            start = sequence.computed
            sequence.computed += count
            # The token after the last draft needs no row.
            extra = min((drafts or {}).get(number, 0), rows, sequence.length - sequence.known - 1)
            rows -= extra
            planned[number] = Span(start, sequence.computed, extra)
        self._rotate(counts, busy)
        return planned

    def extend(self, number: int, tokens: int = 1) -> None:
        """Add generated tokens to a request whose tokens have all been computed, and drafts but for the last token."""
        self._sequences[number].known += tokens
        self._sequences[number].computed += tokens - 1

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.requests:
            lengths = [self._sequences[number].length for number in (*self._running, self._waiting[0])]
            while self._kept and not self._fits([*lengths, *self._kept.values()]):
                self.evicted.append(self._kept.popitem(last=False)[0])
            if not self._fits([*lengths, *self._kept.values()]):
                return
            self._running.append(self._waiting.popleft())

    def _fits(self, lengths: Iterable[int]) -> bool:
        """Whether the memory of each kind of ranks suffices for requests of these numbers of tokens."""
        return max(map(sum, zip(*map(self.limits.taken, lengths), strict=True))) <= self.limits.memory

    def _rotate(self, counts: Collection[int], busy: Collection[int]) -> None:
        """Let requests that got no row be the first of the next step: no one waits for ever."""
        left_out = [
            number
            for number in self._running
            if number not in counts and number not in busy and self._sequences[number].left == 1
        ]
        if left_out and counts:
            self._running = left_out + [number for number in self._running if number not in left_out]
