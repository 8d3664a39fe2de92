"""Short shards of integers are filled with what a maximum or minimum never picks, and what may be divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distir_relax as dr


class Reduced(torch.nn.Module):
    """The largest and the least along the first dim."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.amax(0), x.amin(0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_extremes_of_split_integers(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    # A filling is a float64 on its way, which has not the very last of the int64.
    most = limits.max if limits.bits < 64 else 2**63 - 1024
    x = torch.tensor([[limits.min, most, 3]] * 5, dtype=dtype)
    for ranks in (2, 3, 7):
        mesh = dr.DeviceMesh((ranks,), ("rows",))
        for tail in ("ragged", "pad"):
            plan = dr.compile(Reduced(), (x,), shardings={"x": "S[0]"}, mesh=mesh, tail=tail)
            for found, expected in zip(plan(x), Reduced()(x), strict=True):
                torch.testing.assert_close(found, expected, atol=0, rtol=0)


class Divided(torch.nn.Module):
    """Quotients and remainders by tensors whose short shards would be filled with zeros."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        same = y - y + 2
        return x // y, x % y, (x // same).sum(), (10 // y).amax(0), (x % 3) // (y * y), x // (same - 7)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_integers_are_not_divided_by_a_filling(ranks: int, backend: str) -> None:
    pytest.importorskip("tvm" if backend == "tvm" else "torch")
    x, y = torch.arange(-10, 10).reshape(5, 4), torch.tensor([[-2, 5, 1, 3]] * 5)
    mesh = dr.DeviceMesh((ranks,), ("rows",))
    for tail in ("ragged", "pad"):
        plan = dr.compile(Divided(), (x, y), shardings={"x": "S[0]", "y": "S[0]"}, mesh=mesh, tail=tail)
        for found, expected in zip(plan(x, y, backend=backend), Divided()(x, y), strict=True):
            torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_a_model_that_divides_integers_by_zero_is_told_by_its_ranks() -> None:
    x, y = torch.arange(20).reshape(5, 4), torch.tensor([[1, 2, 0, 3]] * 5)
    mesh = dr.DeviceMesh((3,), ("rows",))
    plan = dr.compile(Divided(), (x, y + 1), shardings={"x": "S[0]", "y": "S[0]"}, mesh=mesh, tail="pad")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        plan(x, y)
