"""Choice of the next tokens from logits."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the most probable one.

    Only the `top_k` most probable tokens are drawn (0: all), of those the fewest whose probabilities add up to
    `top_p`, and of those the ones with at least `min_p` times the largest probability. Draws depend on the logits,
    `seed`, the row of the batch and the position alone, not on earlier draws.

    Before that, in this order: the logits of tokens of the prompt and of the generated text are divided by
    `repetition_penalty` where they are positive, and multiplied by it where they are negative, as in transformers; as
    in OpenAI's API, `frequency_penalty` times the number of its occurrences in the generated text is subtracted from
    the logit of a token, and `presence_penalty` if there are any; and tokens that would repeat `no_repeat_ngram_size`
    tokens of the prompt and the generated text are excluded (0: none).

    Raises RunError for a value outside of its range, and for other types.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, Real) and self.temperature >= 0):
            raise RunError(f"expected a temperature of at least 0, found {self.temperature!r}")
        if not (isinstance(self.top_k, Integral) and self.top_k >= 0):
            raise RunError(f"expected top_k of at least 0, found {self.top_k!r}", hint="0 allows all tokens")
        if not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise RunError(f"expected top_p above 0 and at most 1, found {self.top_p!r}")
        if not isinstance(self.seed, Integral):
            raise RunError(f"expected a whole number as seed, found {self.seed!r}")
        if not (isinstance(self.min_p, Real) and 0 <= self.min_p <= 1):
            raise RunError(f"expected min_p from 0 to 1, found {self.min_p!r}")
        if not (isinstance(self.repetition_penalty, Real) and 0 < self.repetition_penalty < math.inf):
            raise RunError(
                f"expected a repetition_penalty above 0, found {self.repetition_penalty!r}", hint="1 is no penalty"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and -2 <= value <= 2):
                raise RunError(f"expected a {name} from -2 to 2, found {value!r}")
        if not (isinstance(self.no_repeat_ngram_size, Integral) and self.no_repeat_ngram_size >= 0):
            raise RunError(f"expected no_repeat_ngram_size of at least 0, found {self.no_repeat_ngram_size!r}")

    @cached_property
    def needs_history(self) -> bool:
        """Whether the next token depends on the earlier ones, besides through the logits."""
        counts = self.frequency_penalty != 0 or self.presence_penalty != 0
        return counts or self.repetition_penalty != 1 or self.no_repeat_ngram_size != 0


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


class TokenHistory(NamedTuple):
    """The tokens of sequences, int64 of shape (batch, length); the first `prompt` of each are its prompt."""

    tokens: torch.Tensor
    prompt: int

    def extended(self, past: int, tokens: torch.Tensor) -> TokenHistory:
        """Return the history of which `tokens`, (batch, new), follow the first `past` ones."""
        import torch

        return self._replace(tokens=torch.cat([self.tokens[:, :past], tokens], 1))


class SequenceSampler:
    """Choice of the tokens of a batch of sequences, one step after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._history: TokenHistory | None = None

    def next_tokens(self, logits: torch.Tensor, tokens: torch.Tensor, past: int) -> torch.Tensor:
        """Return the token after `tokens`, (batch, new), which follow `past` earlier ones; int64, (batch,).

        `logits` are (batch, positions, vocabulary), those of the last token at the end. The first call has the prompt.
        """
        if self._sampling.needs_history:
            before = self._history or TokenHistory(tokens, tokens.shape[1])
            self._history = before.extended(past, tokens)
        return next_tokens(logits[:, -1], past + tokens.shape[1], self._sampling, self._history)


def next_tokens(
    logits: torch.Tensor, position: int, sampling: Sampling, history: TokenHistory | None = None
) -> torch.Tensor:
    """Return the token at `position` for each row of `logits`, (batch, vocabulary); int64, (batch,).

    `history` has the tokens before `position`, perhaps more; it may be None if sampling does not need it.
    """
    import torch

    if sampling.needs_history:
        assert history is not None, "the sampling needs the earlier tokens"
        logits = _penalized(logits, sampling, history.tokens[:, :position], history.prompt)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits.double() / sampling.temperature
    noise = torch.stack([_gumbel(scores.shape[1], sampling.seed, row, position) for row in range(len(scores))])
    least = math.log(sampling.min_p) if sampling.min_p else -math.inf
    if not sampling.top_k and sampling.top_p == 1:
        noisy = scores + noise
        if sampling.min_p:
            noisy.masked_fill_(scores < scores.amax(-1, keepdim=True) + least, -torch.inf)
        return noisy.argmax(-1)
    values, tokens, probabilities = _most_probable(scores, sampling)
    # The sum before a token: the one that reaches top_p is kept.
    kept = (probabilities.cumsum(-1) - probabilities < sampling.top_p) & (values >= values[:, :1] + least)
    # The noise belongs to tokens, not to ranks among them: near equal scores may be sorted either way.
    drawn = (values + noise.gather(1, tokens)).masked_fill(~kept, -torch.inf).argmax(-1)
    return tokens.gather(1, drawn[:, None])[:, 0]


def _penalized(logits: torch.Tensor, sampling: Sampling, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits after penalties for `tokens`, (batch, length), the earlier ones; in float32 as transformers."""
    import torch

    scores = logits.to(torch.float32, copy=True)
    if sampling.repetition_penalty != 1:
        earlier, penalty = scores.gather(1, tokens), sampling.repetition_penalty
        scores.scatter_(1, tokens, torch.where(earlier < 0, earlier * penalty, earlier / penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        generated = tokens[:, prompt:]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    size = sampling.no_repeat_ngram_size
    if size and size <= tokens.shape[1]:
        windows = tokens.unfold(1, size, 1)
        row, place = (windows[..., :-1] == tokens[:, None, tokens.shape[1] + 1 - size :]).all(-1).nonzero(as_tuple=True)
        scores[row, windows[row, place, -1]] = -torch.inf
    return scores


_MOST = 256
"""So many tokens are sorted at first: mostly they reach `top_p`, and sorting a vocabulary takes milliseconds."""


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
