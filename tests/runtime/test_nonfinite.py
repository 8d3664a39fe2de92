"""NaN and infinity reach what they reach in eager torch, whatever is split: in the data, and among constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax import annotate_sharding

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
    "threshold": lambda x: F.threshold(x, 0.5, 9.0),
    "elu": F.elu,
    "clamp_tensor": lambda x: x.clamp(-ONES[0, 0, 0, 0], ONES[0, 0, 0, 0]),
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


@pytest.mark.drawn(12)
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


AWKWARD = torch.tensor([1.0, math.inf, 0.0])

PENDING: dict[str, Call] = {
    "times infinity": lambda z: z * math.inf,
    "times minus infinity": lambda z: -math.inf * z,
    "times NaN": lambda z: z * math.nan,
    "by zero": lambda z: z / 0,
    "times a constant": lambda z: z * AWKWARD,
    "by a constant": lambda z: z / AWKWARD,
    "times a reshaped constant": lambda z: z * annotate_sharding(AWKWARD, MESH, "R").view(1, 3),
    "a matrix": lambda z: z @ AWKWARD.expand(3, 3),
    "after another": lambda z: (z * 2).T * math.inf,
}
MESH = dr.DeviceMesh((3,), ("tp",))


@pytest.mark.parametrize("name", PENDING)
def test_a_pending_sum_does_not_meet_what_is_not_finite(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 7), torch.randn(7, 3)
    model = Model(lambda x: PENDING[name](annotate_sharding(x, MESH, "S[1]") @ y))
    found, expected = dr.compile(model, (x,))(x), model(x)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_pending_sum_in_a_repeated_block_does_not_meet_what_is_not_finite() -> None:
    class Block(torch.nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.up, self.down = (torch.nn.Linear(7, 7, bias=False) for _ in range(2))
            self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.down(self.up(x)) * self.scale) + x

    torch.manual_seed(0)
    scales = [torch.arange(7.0), torch.ones(7), torch.tensor([1, 2, math.inf, 4, 5, 6, 7]), torch.ones(7)]
    model, x = torch.nn.Sequential(*map(Block, scales)), torch.randn(5, 7)
    plan = dr.compile(model, (x,), shardings={"*.up.weight": "S[0]", "*.down.weight": "S[1]"}, mesh=MESH)
    assert len(plan.modules["sharded"].functions) < 1 + len(scales)
    with torch.no_grad():
        torch.testing.assert_close(plan(x), model(x), equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"alpha": 2}])
@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addbmm", "addmv", "addr"])
def test_a_bias_that_counts_for_nothing_is_not_looked_at(name: str, options: dict[str, int]) -> None:
    shapes = {
        "addmm": ((5, 3), (5, 7), (7, 3)),
        "baddbmm": ((2, 5, 3), (2, 5, 7), (2, 7, 3)),
        "addbmm": ((5, 3), (2, 5, 7), (2, 7, 3)),
        "addmv": ((5,), (5, 7), (7,)),
        "addr": ((5, 3), (5,), (3,)),
    }[name]
    bias, a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    bias.fill_(math.nan)
    model = Model(lambda x: getattr(torch, name)(bias, x, b, beta=0, **options))
    plan = dr.compile(model, (a,), shardings={"x": f"S[{a.dim() - 1}]"}, mesh=MESH)
    torch.testing.assert_close(plan(a), model(a))
