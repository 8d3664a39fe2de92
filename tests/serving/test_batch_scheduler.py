"""Continuous batching: the requests of a step, their order, and the bounds."""

from __future__ import annotations

import random

import pytest

from distir_relax.errors import RunError
from distir_relax.serving import Limits, Scheduler, Span


def scheduler(requests: int = 3, memory: int = 100, step: int = 10, chunk: int = 4) -> Scheduler:
    return Scheduler(Limits(requests, memory, step, chunk))


def test_a_prompt_is_fed_in_chunks_that_others_bound() -> None:
    s = scheduler()
    s.add(0, 12, 20)
    assert s.plan() == {0: Span(0, 10)}
    assert s.plan() == {0: Span(10, 12)}
    s.extend(0)
    s.add(1, 9, 12)
    assert s.plan() == {0: Span(12, 13), 1: Span(0, 4)}
    s.extend(0)
    assert s.plan() == {0: Span(13, 14), 1: Span(4, 8)}
    # The last token of a prompt has one row, as one that was generated.
    s.extend(0)
    assert s.plan() == {0: Span(14, 15), 1: Span(8, 9)}


def test_requests_join_in_order_as_memory_allows() -> None:
    s = scheduler(memory=30)
    s.add(0, 5, 20)
    s.add(1, 5, 20)
    s.add(2, 5, 6)
    assert list(s.plan()) == [0]
    assert (s.running, s.waiting, s.reserved_tokens) == (1, 2, 20)
    s.remove(0)
    assert s.evicted == [0]
    assert list(s.plan()) == [1, 2]
    s.remove(7)
    assert s.evicted == [0]
    with pytest.raises(RunError, match="expected at most 30 tokens of a request, which fit into memory, found 31"):
        s.add(3, 30, 31)


def test_no_request_waits_for_ever_for_a_row() -> None:
    s = scheduler(requests=5, step=3)
    for number in range(5):
        s.add(number, 1, 20)
    seen = [0] * 5
    for _ in range(10):
        for number in s.plan():
            seen[number] += 1
            s.extend(number)
    assert seen == [6] * 5


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_computed_once_within_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(rng.randint(1, 5), rng.randint(20, 60), rng.randint(1, 9), rng.randint(1, 9))
    s = Scheduler(limits)
    prompts = {n: rng.randint(1, 15) for n in range(9)}
    lengths = {n: prompt + rng.randint(1, 5) for n, prompt in prompts.items()}
    arrivals, computed, known = sorted(prompts), dict.fromkeys(prompts, 0), dict(prompts)
    ended: set[int] = set()
    for _ in range(2000):
        if arrivals and rng.random() < 0.4:
            number = arrivals.pop(0)
            s.add(number, prompts[number], lengths[number])
        decoding = {n for n in prompts if n not in ended and computed[n] and known[n] - computed[n] == 1}
        drafts = {n: rng.randint(0, 4) for n in s.generating()}
        planned = s.plan(drafts)
        assert s.running <= limits.requests
        assert s.reserved_tokens <= limits.memory_tokens
        assert sum(span.stop - span.start + span.drafts for span in planned.values()) <= limits.step_tokens
        if decoding & planned.keys():
            rows = sum(x.stop - x.start for n, x in planned.items() if known[n] - x.start > 1)
            assert rows <= limits.chunk_tokens
        for number, span in planned.items():
            assert span.start == computed[number] < span.stop <= known[number]
            assert span.drafts <= drafts.get(number, 0)
            computed[number] = span.stop
            if span.stop == known[number]:
                tokens = 1 + rng.randint(0, span.drafts)
                known[number] += tokens
                computed[number] += tokens - 1
                assert known[number] <= lengths[number]
                if known[number] == lengths[number]:
                    s.remove(number)
                    ended.add(number)
                else:
                    s.extend(number, tokens)
        if len(ended) == len(prompts):
            return
    raise AssertionError("some request has not ended")
