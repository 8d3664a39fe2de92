"""Causal language models whose states do not grow: windows of convolutions and shifts, and recurrent layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.incremental.language_models import STATE_SPACE, language_model, with_large_weights

VOCABULARY, LENGTH = 61, 64


class Windows(nn.Module):
    """Convolutions as models write them, and shifts by one token, the first of them with a learned first position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.depthwise = nn.Conv1d(12, 12, 4, padding=3, groups=12)
        self.dilated = nn.Conv1d(12, 12, 3, dilation=2)
        self.first = nn.Parameter(torch.randn(1, 1, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + F.silu(self.depthwise(x.mT)[..., : ids.shape[1]].mT)
        x = x + self.dilated(F.pad(x.mT, (4, 0))).mT
        x = x + torch.cat([self.first.expand(ids.shape[0], 1, 12), x], 1)[:, :-1]
        x = self.norm(x)
        return self.head(x * 0.5 + F.pad(x, (0, 0, 1, -1)))


class Recurrent(nn.Module):
    """An LSTM of two layers, and a GRU that begins with a learned state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 10, 2, batch_first=True)
        self.gru = nn.GRU(10, 12, batch_first=True)
        self.first = nn.Parameter(torch.randn(1, 1, 12))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        return self.head(self.gru(hidden, self.first.expand(1, ids.shape[0], 12).contiguous())[0])


@cache
def fixed_state_model(name: str) -> Any:
    """Return the model `windows`, `recurrent`, a state-space model, or `lfm2`: convolutions and attention."""
    if name in STATE_SPACE:
        return with_large_weights(language_model(name))
    torch.manual_seed(0)
    if name != "lfm2":
        return {"windows": Windows, "recurrent": Recurrent}[name]().eval()
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.Lfm2ForCausalLM(config).eval()


def fixed_state_logits(name: str, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the model itself, over the whole sequence."""
    model = fixed_state_model(name)
    with torch.no_grad():
        found: torch.Tensor = model(ids) if name in ("windows", "recurrent") else model(ids, use_cache=False).logits
    return found
