"""Models whose states do not grow, such as convolutions and recurrent layers: on any ranks, and for many requests."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import RunError
from distir_relax.runtime.requests import Slot, ThreadRequests
from distir_relax.serving import EngineOptions
from tests.imported_once import compile_language_model
from tests.incremental.fixed_state_models import LENGTH, VOCABULARY, fixed_state_logits, fixed_state_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(120),
    pytest.mark.shares("fixed states"),
]


@cache
def compiled(name: str, strategy: str = "1/1/1/1") -> dr.Generation:
    return compile_language_model(fixed_state_model(name), strategy=strategy, max_length=LENGTH)


def continued(name: str, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens that the model itself takes, each from the whole sequence."""
    whole = ids
    for _ in range(count):
        whole = torch.cat([whole, fixed_state_logits(name, whole)[:, -1:].argmax(-1)], 1)
    return whole[:, ids.shape[1] :]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("windows", "1/2/1/1"), ("windows", "1/1/2/1"), ("windows", "2/3/1/1"), ("recurrent", "1/2/1/1"),
        ("recurrent", "1/1/2/1"), ("lfm2", "1/1/1/1"), ("lfm2", "1/2/2/1"), ("mamba", "1/3/1/1"),
        ("falcon mamba", "1/1/2/1"), ("jamba", "1/2/1/1"),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_model(name: str, strategy: str) -> None:
    for batch, length in ((2, 1), (3, 7)):
        ids = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(compiled(name, strategy).generate(ids, 9), continued(name, ids, 9))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("windows", "1/2/1/1"),
        ("windows", "1/1/2/1"),
        ("recurrent", "1/1/1/1"),
        ("lfm2", "1/1/1/1"),
        ("mamba", "1/2/1/1"),
    ],
)
def test_steps_of_several_requests_give_the_logits_of_each(name: str, strategy: str) -> None:
    """Random chunks of five sequences, one of them past the first block of positions, in random order."""
    ranks = ThreadRequests(compiled(name, strategy).plan.bundle(("torch",)))
    rng = random.Random(2)
    ids = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 9, 17, 30, 49)]
    expected = [fixed_state_logits(name, torch.tensor([x]))[0] for x in ids]
    computed = [0] * len(ids)
    while any(done < len(x) for done, x in zip(computed, ids, strict=True)):
        slots, wanted = [], []
        for number in rng.sample(range(len(ids)), len(ids)):
            start = computed[number]
            if (left := len(ids[number]) - start) and rng.random() < 0.7:
                count = rng.randint(1, min(left, 9))
                slots.append(Slot(number, start, ids[number][start : start + count], count, len(ids[number])))
                computed[number] += count
                wanted.append(expected[number][start : computed[number]])
        if slots:
            torch.testing.assert_close(ranks.logits(slots), torch.cat(wanted), rtol=1e-5, atol=1e-5)
    ranks.close()


@pytest.mark.parametrize("name", ["windows", "recurrent", "lfm2"])
def test_an_engine_shares_no_prefix(name: str) -> None:
    rng = random.Random(4)
    begin = [rng.randrange(VOCABULARY) for _ in range(40)]
    with compiled(name).engine(EngineOptions(max_requests=2, chunk_tokens=7)) as engine:
        requests = [engine.submit([*begin, number], 6) for number in range(3)]
        engine.run()
        for request in requests:
            assert request.tokens == continued(name, torch.tensor([list(request.prompt)]), 6)[0].tolist()
        assert engine.shared_tokens == 0


@pytest.mark.parametrize("name", ["windows", "lfm2"])
def test_an_engine_refuses_drafts(name: str) -> None:
    with pytest.raises(RunError, match="expected no drafts for a program that has states besides those that grow"):
        compiled(name).engine(EngineOptions(drafts=2))
