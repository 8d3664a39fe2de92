"""Accuracy of logarithms and exponentials near their zeros, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr

SMALL = [0.0, 1e-30, -1e-30, 1e-9, -1e-9, 1e-5, -1e-5, 0.1, -0.1, 0.49, 0.51, -0.49, -0.51, 1.0, -0.9, 5.0, -5.0, -20.0]
LARGE = [20.0, 60.0, 1e5, float("inf")]


class Functions(nn.Module):
    """Logarithms; `differences` adds ``exp(x) - 1``, which the tvm backend computes to a rounding of 1."""

    def __init__(self, differences: bool) -> None:
        super().__init__()
        self.differences = differences

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "log1p": torch.log1p(x.clamp_min(-1)),
            **({"expm1": torch.expm1(x), "elu": F.elu(x), "selu": F.selu(x)} if self.differences else {}),
            "softplus": F.softplus(x),
            "logsigmoid": F.logsigmoid(-x),
            "logaddexp": torch.logaddexp(x, torch.zeros_like(x)),
            "loss": F.binary_cross_entropy_with_logits(-x.clamp_max(60), torch.zeros_like(x), reduction="none"),
        }


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_numbers_keep_their_digits(dtype: torch.dtype, backend: str) -> None:
    x = torch.tensor(SMALL + LARGE, dtype=dtype)
    model = Functions(backend == "torch")
    plan = dr.compile(model, (x,), mesh=1)
    error = 1e-6 if dtype == torch.float32 else 1e-14
    for name, expected in model(x).items():
        found = plan(x, backend=backend)[name]
        torch.testing.assert_close(found, expected, rtol=error, atol=1e-37, msg=lambda m, name=name: f"{name}: {m}")
