"""Choice of the next tokens from logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the most probable one.

    Only the `top_k` most probable tokens are drawn (0: all), and of those the fewest whose probabilities add up to
    `top_p`. Draws depend on the logits, `seed`, the row of the batch and the position alone, not on earlier draws.

    Raises RunError for a negative temperature or `top_k`, and for `top_p` outside of (0, 1].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise RunError(f"expected a temperature of at least 0, found {self.temperature}")
        if self.top_k < 0:
            raise RunError(f"expected top_k of at least 0, found {self.top_k}", hint="0 allows all tokens")
        if not 0 < self.top_p <= 1:
            raise RunError(f"expected top_p above 0 and at most 1, found {self.top_p}")


GREEDY = Sampling()


class TokenOptions(TypedDict, total=False):
    """Options of a generation of tokens: those of `Sampling`, greedy by default, and of a call."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Collection[int]
    """Tokens that end a sequence; none by default."""
    timeout: float | None


def next_tokens(logits: torch.Tensor, position: int, sampling: Sampling) -> torch.Tensor:
    """Return the token at `position` for each row of `logits`, (batch, vocabulary); int64, (batch,)."""
    import torch

    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits.double() / sampling.temperature
    order = scores.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(order.values, dtype=torch.bool)
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    probabilities = order.values.masked_fill(~kept, -torch.inf).softmax(-1)
    # The sum before a token: the one that reaches top_p is kept.
    kept &= probabilities.cumsum(-1) - probabilities < sampling.top_p
    noise = torch.stack([_gumbel(scores.shape[1], sampling.seed, row, position) for row in range(len(scores))])
    # The noise belongs to tokens, not to ranks among them: near equal scores may be sorted either way.
    drawn = (order.values + noise.gather(1, order.indices)).masked_fill(~kept, -torch.inf).argmax(-1)
    return order.indices.gather(1, drawn[:, None])[:, 0]


def _gumbel(count: int, seed: int, row: int, position: int) -> torch.Tensor:
    """Return Gumbel noise; the token of the largest noisy score is drawn with the softmax's probability."""
    import numpy as np
    import torch

    generator = np.random.Generator(np.random.Philox(key=seed % (1 << 64), counter=[0, 0, row, position]))
    return torch.from_numpy(generator.gumbel(size=count))
