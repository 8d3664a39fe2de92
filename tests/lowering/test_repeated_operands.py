"""Grouped-query attention: keys and values reach torch's kernel before they are repeated, if each head is in a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr


class Attention(nn.Module):
    """Six query heads, of which `groups` share a key head; in a row, or, if `tiled`, every `heads`-th."""

    def __init__(self, groups: int, tiled: bool = False) -> None:
        super().__init__()
        self.groups, self.tiled = groups, tiled

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        b, h, t, d = x.shape
        if h == 1:
            return x.expand(b, self.groups, t, d)
        if self.tiled:
            return x[:, None].expand(b, self.groups, h, t, d).reshape(b, h * self.groups, t, d)
        return x[:, :, None].expand(b, h, self.groups, t, d).reshape(b, h * self.groups, t, d)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, self.repeated(k), self.repeated(v))


@pytest.mark.parametrize(
    ("groups", "tiled", "ranks", "is_grouped"),
    [(3, False, 1, True), (2, False, 3, True), (3, True, 1, False), (6, False, 1, True), (1, False, 1, False)],
)
def test_attention_of_groups(groups: int, tiled: bool, ranks: int, is_grouped: bool) -> None:
    heads = 6 // groups
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, heads, 7, 4), torch.randn(2, heads, 7, 4)
    model = Attention(groups, tiled)
    shardings = {"k": "S[1]"} if ranks > 1 else {}
    plan = dr.compile(model, (q, k, v), mesh=ranks, shardings=shardings)
    torch.testing.assert_close(plan(q, k, v), model(q, k, v), rtol=1e-5, atol=1e-6)
    programs = [text for name, text in plan.bundle(("torch",)).programs.items() if name.endswith(".py")]
    assert all(("attention.attend(q, k, v" in text) == is_grouped for text in programs)
    assert all(("expand" in text) != is_grouped or groups == 1 for text in programs)
