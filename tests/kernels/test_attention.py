"""Attention of grouped heads, with masks and without, beside the product of softmax and values in float64."""

from __future__ import annotations

import math

import pytest
import torch

from distir_relax.kernels.attention import attend, unless_all_true


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (5, 1), (3, 3)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("masked", ["", "all heads", "each head", "rows"])
def test_attention(heads: int, groups: int, rows: int, masked: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, t, width, generator=generator)
        for n, t, width in ((heads, rows, 7), (groups, 11, 7), (groups, 11, 5))
    )
    shape = {"": (), "all heads": (2, 1, rows, 11), "each head": (1, heads, rows, 11), "rows": (rows, 11)}[masked]
    mask = torch.rand(shape, generator=generator) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    y = attend(q, k, v, mask, 0.3)
    assert y.shape == (2, heads, rows, 5)
    torch.testing.assert_close(y.double(), exact(q, k, v, mask, 0.3), rtol=1e-5, atol=1e-6)


def test_a_mask_that_is_all_true_is_none() -> None:
    mask = torch.ones(3, 5, dtype=torch.bool)
    assert unless_all_true(mask) is None
    mask[2, 4] = False
    assert unless_all_true(mask) is mask
