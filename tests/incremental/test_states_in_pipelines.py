"""States of a pipeline's stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import distir_relax as dr


class Block(torch.nn.Module):
    """Attention to the tokens that are not padding, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.joined(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + torch.tanh(self.out(y.transpose(1, 2).flatten(2)))


class Decoder(torch.nn.Module):
    """A language model without positions; all blocks read which of the earlier tokens are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(13, 16), torch.nn.Linear(16, 13)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])
        mask = (positions[:, None] >= positions) & (ids != 0)[:, None, None, :]
        mask = mask | (positions[:, None] == positions)
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, mask)
        scores: torch.Tensor = self.head(x)
        return scores


def test_a_state_that_several_stages_read_is_at_one_of_them() -> None:
    torch.manual_seed(3)
    model = Decoder().eval()
    ids = torch.tensor([[3, 0, 5, 0, 7], [0, 1, 2, 0, 4]])
    expected = ids
    for _ in range(8):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    generation = dr.compile_generation(model, max_length=32, strategy="1/1/3/1")
    assert torch.equal(generation.generate(ids, 8), expected[:, 5:])
