"""NaN and infinity in the data reach what they reach in eager torch, whatever is split."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr

Call = Callable[[torch.Tensor], torch.Tensor]

ONES = torch.ones(7, 3, 3, 3, dtype=torch.float64)

CALLS: dict[str, Call] = {
    "nearest": lambda x: F.interpolate(x, size=(14, 4), mode="nearest"),
    "area": lambda x: F.interpolate(x, size=(4, 3), mode="area"),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "conv": lambda x: F.conv2d(x, ONES[:4], padding=1),
    "conv_transpose": lambda x: F.conv_transpose2d(x, ONES[:3], padding=1, stride=2),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double()),
    "group_norm": lambda x: F.group_norm(x, 1),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-2:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "softmax": lambda x: F.softmax(x, 2),
    "sum": lambda x: x.sum(2),
    "mean": lambda x: x.mean((2, 3)),
    "var": lambda x: x.var(2),
    "amax": lambda x: x.amax(2),
    "logsumexp": lambda x: x.logsumexp(2),
    "cumsum": lambda x: x.cumsum(2),
    "matmul": lambda x: x.mT @ torch.ones(7, 4, dtype=torch.float64),
    "take": lambda x: x[:, :, torch.tensor([0, 6, 2])],
    "embedding": lambda x: F.embedding(torch.tensor([1, 6, 3]), x[0, 0]),
    "tril": torch.tril,
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
}


class Model(torch.nn.Module):
    """One call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_elements_are_not_finite(name: str) -> None:
    model = Model(CALLS[name])
    x = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(0)).double()
    for tail in ("ragged", "pad"):
        plan = dr.compile(model, (x,), shardings={"x": "S[2]"}, mesh=dr.DeviceMesh((3,), ("tp",)), tail=tail)
        for value in (math.nan, math.inf):
            for place in ((0, 0, 3, 2), (1, 2, 6, 5)):
                data = x.clone()
                data[place] = value
                found, expected = plan(data), model(data)
                assert torch.equal(torch.isnan(found), torch.isnan(expected)), (tail, value, place)
                assert torch.equal(torch.isinf(found), torch.isinf(expected)), (tail, value, place)
