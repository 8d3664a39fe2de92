"""Perplexity of compiled language models on a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.errors import DistIRError
from distir_relax.runtime.requests import Slot, ThreadRequests

if TYPE_CHECKING:
    import torch

Logits = Callable[[Sequence[int]], "torch.Tensor"]
"""The scores of the next token at each position of a sequence of tokens: (tokens, vocabulary)."""
WINDOW = 512
"""Tokens of which a prediction sees the earlier ones, at most."""


def default_text() -> str:
    """Return the help topics of Python, a text that every installation has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def split_windows(tokens: Sequence[int], window: int = WINDOW) -> list[Sequence[int]]:
    """Return the windows of a text, of which a last one of a single token is left out.

    Raises `DistIRError` for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise DistIRError(
            f"expected a text of at least 2 tokens, found {len(tokens)}", hint="a perplexity needs some thousands"
        )
    windows = [tokens[start : start + window] for start in range(0, len(tokens), window)]
    return [window for window in windows if len(window) > 1]


def perplexity(logits: Logits, windows: Sequence[Sequence[int]]) -> float:
    """Return exp of the mean loss of the next token, over all positions but the last of each window."""
    import torch

    total, predicted = 0.0, 0
    for window in windows:
        scores, targets = logits(window)[:-1].float(), torch.tensor(window[1:])
        total += float(torch.nn.functional.cross_entropy(scores, targets, reduction="sum"))
        predicted += len(targets)
    return math.exp(total / predicted)


def bundle_perplexity(bundle: Bundle, windows: Sequence[Sequence[int]]) -> float:
    """Return the perplexity of a bundle that generates text, with ranks as threads of this process."""
    ranks = ThreadRequests(bundle)
    requests = count()

    def logits(window: Sequence[int]) -> torch.Tensor:
        size = len(window)
        return ranks.logits([Slot(next(requests), 0, window, size, size)])

    try:
        return perplexity(logits, windows)
    finally:
        ranks.close()
