"""Steps of one new token a request are recorded, and give the logits of the whole model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.runtime.recorded_step import RecordedStep
from distir_relax.runtime.requests import Slot, ThreadRequests
from distir_relax.runtime.requests.recorded_steps import RecordedSteps
from distir_relax.runtime.requests.request_program import emit_request_programs
from tests.imported_once import compile_language_model
from tests.incremental.language_models import VOCABULARY, language_model

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120), pytest.mark.shares("engine")]

ALL = [{1, 2, 3, 5}]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of requests of the recorded steps that ran."""
    counts: list[int] = []
    run = RecordedStep.run

    def counted(self: RecordedStep, inputs: Sequence[torch.Tensor]) -> Any:
        # Those of a rank that has no tokens, in a pipeline, count on another one.
        counts.extend(x.shape[1] for x in inputs)
        return run(self, inputs)

    monkeypatch.setattr(RecordedStep, "run", counted)
    return counts


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy", "tail", "counts"),
    [
        ("llama", "1/1/1/1", "ragged", ALL), ("mistral with a window of 7", "1/2/1/1", "ragged", ALL),
        ("gpt2", "1/3/1/1", "pad", ALL), ("gemma", "1/1/2/1", "ragged", ALL), ("qwen2", "1/2/2/1", "ragged", ALL),
        # Ops that run for each request: of five, two of three are functions of Python, more or fewer by processor.
        ("mixtral", "1/1/1/1", "ragged", [{1, 2, 3}, *ALL]),
        # Additive masks.
        ("falcon with alibi", "1/1/1/1", "ragged", [set()]),
    ],
)  # fmt: skip
def test_decoded_tokens(name: str, strategy: str, tail: str, counts: list[set[int]], recorded: list[int]) -> None:
    """Random subsets of requests of unlike lengths, in random order: each number of them is seen several times."""
    rng, model = random.Random(2), language_model(name)
    ranks = ThreadRequests(compile_language_model(model, strategy=strategy, tail=tail, max_length=64).plan.bundle())
    ids = [[rng.randrange(VOCABULARY) for _ in range(16 + rng.randint(1, 30))] for _ in range(5)]
    with torch.no_grad():
        expected = [model(torch.tensor([x]), use_cache=False).logits[0] for x in ids]
    computed = [len(x) - 14 for x in ids]
    for n, count in enumerate(computed):
        ranks.logits([Slot(n, 0, ids[n][:count], 1, len(ids[n]))])
    for step in range(14):
        chosen = rng.sample(range(5), (1, 3, 5, 2)[step % 4])
        logits = ranks.logits([Slot(n, computed[n], [ids[n][computed[n]]], 1, len(ids[n])) for n in chosen])
        wanted = torch.stack([expected[n][computed[n]] for n in chosen])
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
        for n in chosen:
            computed[n] += 1
    ranks.close()
    assert set(recorded) in counts


@pytest.mark.drawn(1)
@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_low_precision_is_that_of_other_steps(
    precision: str, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = dr.compile_generation(language_model("llama"), max_length=64, precision=precision)
    ids = [[(7 * n + k * k) % VOCABULARY for k in range(20 + n)] for n in range(3)]
    found = []
    for _ in range(2):
        ranks = ThreadRequests(generation.plan.bundle())
        for n, x in enumerate(ids):
            ranks.logits([Slot(n, 0, x[:-8], 1, len(x))])
        steps = [[Slot(n, len(x) - k, [x[-k]], 1, len(x)) for n, x in enumerate(ids)] for k in range(8, 0, -1)]
        found.append(torch.cat([ranks.logits(slots) for slots in steps]))
        ranks.close()
        monkeypatch.setattr(RecordedSteps, "run", lambda *_: None)
    assert recorded == [3] * 6
    tolerance = 2e-2 if precision == "bf16" else 1e-5
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)


def test_the_text_for_one_rank_is_that_for_all() -> None:
    model = language_model("gpt2")
    bundle = compile_language_model(model, strategy="1/3/1/1", tail="pad", max_length=64).plan.bundle()
    texts = emit_request_programs(bundle)
    assert list(texts) == ["main_0", "main_1", "main_2"]
    for name in texts:
        assert emit_request_programs(bundle, [name]) == {name: texts[name]}
