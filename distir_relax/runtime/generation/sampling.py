"""Choice of the next tokens from logits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the most probable one.

    Only the `top_k` most probable tokens are drawn (0: all), and of those the fewest whose probabilities add up to
    `top_p`. Draws depend on the logits, `seed`, the row of the batch and the position alone, not on earlier draws.

    Raises RunError for a negative temperature or `top_k`, for `top_p` outside of (0, 1], and for other types.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, Real) and self.temperature >= 0):
            raise RunError(f"expected a temperature of at least 0, found {self.temperature!r}")
        if not (isinstance(self.top_k, Integral) and self.top_k >= 0):
            raise RunError(f"expected top_k of at least 0, found {self.top_k!r}", hint="0 allows all tokens")
        if not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise RunError(f"expected top_p above 0 and at most 1, found {self.top_p!r}")
        if not isinstance(self.seed, Integral):
            raise RunError(f"expected a whole number as seed, found {self.seed!r}")


GREEDY = Sampling()
_NONE: Mapping[str, float] = {}


def sampling_of(given: Mapping[str, Any], defaults: Mapping[str, float] = _NONE) -> Sampling:
    """Return the sampling of the options that a user gave, and of a model's `defaults` for the others.

    Without a seed, draws differ from call to call. Raises RunError for unknown options, and as `Sampling`.
    """
    names = [field.name for field in fields(Sampling)]
    if unknown := [name for name in given if name not in names]:
        raise RunError(f"expected options of sampling ({', '.join(names)}), found {unknown[0]!r}")
    values: dict[str, Any] = {name: defaults[name] for name in names if name in defaults}
    values.update({name: value for name, value in given.items() if value is not None})
    if "seed" not in values and values.get("temperature"):
        values["seed"] = random.getrandbits(63)
    return Sampling(**values)


_MOST = 256
"""So many tokens are sorted at first: mostly they reach `top_p`, and sorting a vocabulary takes milliseconds."""


def next_tokens(logits: torch.Tensor, position: int, sampling: Sampling) -> torch.Tensor:
    """Return the token at `position` for each row of `logits`, (batch, vocabulary); int64, (batch,)."""
    import torch

    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits.double() / sampling.temperature
    noise = torch.stack([_gumbel(scores.shape[1], sampling.seed, row, position) for row in range(len(scores))])
    if not sampling.top_k and sampling.top_p == 1:
        return (scores + noise).argmax(-1)
    values, tokens, probabilities = _most_probable(scores, sampling)
    # The sum before a token: the one that reaches top_p is kept.
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    # The noise belongs to tokens, not to ranks among them: near equal scores may be sorted either way.
    drawn = (values + noise.gather(1, tokens)).masked_fill(~kept, -torch.inf).argmax(-1)
    return tokens.gather(1, drawn[:, None])[:, 0]


def _most_probable(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, tokens and probabilities of the `top_k` tokens, or of as many as reach `top_p`, in order."""
    size = scores.shape[1]
    if sampling.top_k:
        values, tokens = scores.topk(min(sampling.top_k, size))
        return values, tokens, values.softmax(-1)
    total = scores.logsumexp(-1, keepdim=True)
    values, tokens = scores.topk(min(_MOST, size))
    probabilities = (values - total).exp()
    if bool((probabilities.sum(-1) < sampling.top_p).any()):
        values, tokens = scores.topk(size)
        probabilities = (values - total).exp()
    return values, tokens, probabilities


def _gumbel(count: int, seed: int, row: int, position: int) -> torch.Tensor:
    """Return Gumbel noise; the token of the largest noisy score is drawn with the softmax's probability."""
    import numpy as np
    import torch

    generator = np.random.Generator(np.random.Philox(key=seed % (1 << 64), counter=[0, 0, row, position]))
    return torch.from_numpy(generator.gumbel(size=count))
