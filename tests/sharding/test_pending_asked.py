"""`I` as a placement that a user asks for: where a sum is left pending, and where it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.layout import DeviceMesh


class Asked(torch.nn.Module):
    """A product whose sum is pending until the square, and a value that is no sum until it is asked to be one."""

    def __init__(self, mesh: DeviceMesh, pending: str, columns: str) -> None:
        super().__init__()
        self.mesh, self.pending, self.columns = mesh, pending, columns
        self.w = torch.nn.Parameter(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double())

    def forward(self, x: torch.Tensor) -> Any:
        x = dr.annotate_sharding(x, self.mesh, self.columns)
        y = dr.annotate_sharding(x @ self.w, self.mesh, self.pending)
        z = dr.annotate_sharding(torch.tanh(x), self.mesh, self.pending)
        return y * 3, y.square(), z.sum(0), y


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize(
    ("mesh", "pending", "columns"),
    [
        (DeviceMesh((2,)), "I", "S[1]"),
        (DeviceMesh((3,)), "I[sum]", "S[0]"),
        (DeviceMesh((3,)), "I_SUM", "R"),
        (DeviceMesh((2, 3)), "I[sum], R", "S[1], S[0]"),
        (DeviceMesh((2, 3)), "I[max], I", "S[0], S[1]"),
    ],
    ids=str,
)
def test_the_numbers_are_the_models(mesh: DeviceMesh, pending: str, columns: str, tail: str) -> None:
    model = Asked(mesh, pending, columns).eval()
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).double()
    plan = dr.compile(model, (x,), tail=tail)
    with torch.no_grad():
        for found, expected in zip(plan(x), model(x), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


class Late(torch.nn.Module):
    """Reduced by the user's word at the end alone, though nothing linear is between."""

    def __init__(self, pending: bool) -> None:
        super().__init__()
        self.pending = pending
        self.up, self.down = (torch.nn.Linear(*n, bias=False) for n in ((6, 8), (8, 6)))

    def forward(self, x: torch.Tensor) -> Any:
        mesh = DeviceMesh((2,))
        h = dr.annotate_sharding(torch.relu(self.up(x)), mesh, "S[1]")
        y = self.down(h)
        return dr.annotate_sharding(y, mesh, "I") if self.pending else y


def test_what_is_asked_is_what_lies_there() -> None:
    x = torch.randn(3, 6)
    plans = [dr.compile(Late(pending), (x,)) for pending in (True, False)]
    asked, _ = (plan.modules["sharded"].main for plan in plans)
    linear = [v for op in asked.ops for v in op.results if "I[sum]" in str(v.type)]
    assert linear, "the product is pending"
    counts = [[op.name for op in plan.modules["distributed"].main.ops].count("all_reduce") for plan in plans]
    assert counts == [1, 1], "a program gives whole results: reduced once, wherever"
