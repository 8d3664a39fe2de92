"""Short shards of integers are filled with what a maximum or minimum never picks."""

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
