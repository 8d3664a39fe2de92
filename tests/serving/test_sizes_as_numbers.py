"""Steps of several requests where a program computes with the number of its positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from distir_relax.compiler import generation
from distir_relax.runtime.requests import Slot, ThreadRequests
from tests.imported_once import compile_language_model

VOCABULARY = 11

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a filled tensor times the number": lambda x, ids: x * (torch.full((1,), 0.5) * ids.shape[1]),
    "ones times the number": lambda x, ids: x + torch.ones(1) * ids.shape[1],
    "the last of a range": lambda x, ids: x * torch.arange(ids.shape[1])[-1],
    "the sum of padded ones": lambda x, ids: x + F.pad(torch.ones(ids.shape[1]), (1, 1)).sum(),
    "a product": lambda x, ids: x * ids.shape[1],
    "a quotient": lambda x, ids: x + torch.ones(6) / ids.shape[1],
    "a comparison": lambda x, ids: x + (ids == ids.shape[1])[..., None],
    "a remainder": lambda x, ids: x + (ids % (ids.shape[1] + 1))[..., None],
}


class Uses(torch.nn.Module):
    """Adds up tokens, and computes with their number."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        self.table = torch.nn.Embedding(VOCABULARY, 6)
        self.head = torch.nn.Linear(6, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.use(self.table(ids).cumsum(1), ids))
        return scores


@pytest.mark.parametrize("name", USES)
def test_each_request_has_its_own_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Positions of such a program depend on the length, which is why none is compiled; its last position does not.
    monkeypatch.setattr(generation, "check_length_independence", lambda *arguments: None)
    torch.manual_seed(0)
    model = Uses(USES[name])
    ranks = ThreadRequests(compile_language_model(model, max_length=200).plan.bundle(("torch",)))
    texts = [[3, 1, 4, 5], [7, 9, 2, 7, 6, 5, 3, 8], [*range(11), *range(11)] * 4]
    slots = [Slot(n, 0, text, 1, 200) for n, text in enumerate(texts)]
    for _ in range(3):  # the third runs as it was recorded, if it can
        expected = torch.cat([model(torch.tensor([text]))[0, -1:] for text in texts])
        torch.testing.assert_close(ranks.logits(slots), expected.detach(), rtol=1e-5, atol=1e-5)
        slots = [Slot(n, len(text), [n + 2], 1, 200) for n, text in enumerate(texts)]
        texts = [[*text, n + 2] for n, text in enumerate(texts)]
    ranks.close()
