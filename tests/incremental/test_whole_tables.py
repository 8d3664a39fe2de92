"""Models with a mask or a table for all positions: they generate up to its length."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.errors import ImportModelError

LENGTH, VOCABULARY = 70, 13


class Nano(torch.nn.Module):
    """A language model of one block, whose positions and mask are sliced from those of `LENGTH`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.positions = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Embedding(LENGTH, 16)
        self.joined, self.head = torch.nn.Linear(16, 48), torch.nn.Linear(16, VOCABULARY)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)))
        self.register_buffer("table", torch.randn(LENGTH, 16))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        count = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(count)) + self.table[:count]
        q, k, v = self.joined(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).masked_fill(self.mask[:count, :count] == 0, -torch.inf)
        y: torch.Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x + y

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.hidden(ids))
        return scores


class Learned(Nano):
    """Without mask and table: nothing but the embeddings of positions says how many there are."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        q, k, v = self.joined(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y: torch.Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


class Last(Nano):
    """Returns the scores of the last position alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.hidden(ids)[:, [-1], :])
        return scores


class Whole(Nano):
    """Has a case of its own for the whole length."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.hidden(ids))
        return scores * 2 if ids.shape[1] == LENGTH else scores


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("kind", "max_length", "length"), [(Nano, LENGTH, LENGTH), (Nano, 40, 40), (Learned, None, LENGTH)]
)
def test_tokens_up_to_the_whole_length(kind: type[Nano], max_length: int | None, length: int) -> None:
    model = kind().eval()
    prompt = [3, 1, 4]
    expected = torch.tensor([prompt])
    while expected.shape[1] < length:
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    generation = dr.compile_generation(model, max_length=max_length)
    assert generation.generate(prompt, length - 3).tolist() == expected[0, 3:].tolist()
    with generation.engine() as engine:
        request = engine.submit(prompt, length - 3)
        engine.run()
    assert list(request.tokens) == expected[0, 3:].tolist()


def test_a_case_of_its_own_for_the_whole_length_is_refused() -> None:
    with pytest.raises(ImportModelError, match=f"guard sequence != {LENGTH}"):
        dr.compile_generation(Whole().eval(), max_length=LENGTH)


def test_scores_of_one_position_are_refused() -> None:
    message = r"(?s)head, test_whole_tables\.py:\d+: expected scores at every position.*instead of lm_head\(x\[:, \[-1"
    with pytest.raises(ImportModelError, match=message):
        dr.compile_generation(Last().eval(), max_length=40)
