"""Short shards of indices are filled with valid ones, whatever was computed from their filling before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import distir_relax as dr

# Shifted, so that a filling of zeros would become an index far out of range.
SHIFT = 12


class Read(torch.nn.Module):
    """Reads or writes elements that indices name."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.function(x, ids - SHIFT)


FUNCTIONS = {
    "gather": lambda x, ids: x.gather(1, ids),
    "scatter_add": lambda x, ids: x.scatter_add(1, ids, x),
    "index": lambda x, ids: x[0][ids],
    "two indices": lambda x, ids: x[ids, ids[:1]],
    "embedding": lambda x, ids: torch.nn.functional.embedding(ids, x),
    "index_add": lambda x, ids: torch.zeros(4, 4).index_add(0, ids[:, 0], x),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_indices_stay_in_range(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, ids = torch.randn(5, 4, generator=generator), torch.randint(0, 4, (5, 4), generator=generator) + SHIFT
    model = Read(FUNCTIONS[name]).eval()
    for shardings in ({"ids": "S[0]"}, {"x": "S[0]", "ids": "S[0]"}):
        for ranks in (2, 3, 7):
            mesh = dr.DeviceMesh((ranks,), ("rows",))
            plan = dr.compile(model, (x, ids), shardings=shardings, mesh=mesh, tail="pad")
            torch.testing.assert_close(plan(x, ids), model(x, ids))
