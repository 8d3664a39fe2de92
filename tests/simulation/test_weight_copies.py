"""Weights that a CPU holds twice: as they are, and packed for a product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.simulation.memory_categories import WEIGHTS


class Scores(nn.Module):
    """A table, the product with it or with a matrix of its own, and perhaps with it for another number of rows."""

    def __init__(self, tied: bool, twice: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(127, 6)
        self.classifier = nn.Linear(6, 127, bias=False)
        self.twice = twice
        if tied:
            self.classifier.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        scores = self.classifier(x)
        return scores + self.classifier(x[:, :1]) if self.twice else scores


@pytest.mark.parametrize(
    ("tied", "twice", "copies"), [(False, False, 0), (True, False, 1), (True, True, 2), (False, True, 1)]
)
def test_they_count_on_a_cpu_alone(tied: bool, twice: bool, copies: int) -> None:
    model = Scores(tied, twice).eval()
    plan = dr.compile(model, (torch.zeros(4, 5, dtype=torch.int64),), strategy="1/1/1/1")
    size = 127 * 6 * 4
    stored = size if tied else 2 * size
    assert plan.footprint.weights == (stored,)
    assert plan.footprint.packed == (copies * size,)
    text = str(plan.footprint)
    assert ("on a CPU" in text) == (copies > 0)
    for profile, more in (("cpu-local", copies), ("dgx-h100", 0)):
        assert dr.simulate(plan, profile=profile).peak(0).split[WEIGHTS] == stored + more * size
