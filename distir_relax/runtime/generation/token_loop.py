"""The loop that feeds tokens back to a program that continues a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from distir_relax.runtime.generation.sampling import Sampling, next_tokens

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.session import Session


def generated_tokens(
    session: Session, prompt: torch.Tensor, count: int, sampling: Sampling, stop: Collection[int],
    tokens: str, logits: str, timeout: float | None = None,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """Yield up to `count` tokens after `prompt`, int64 of shape (batch, length), each of shape (batch,).

    A row that has reached a token of `stop` repeats it; the last token is one that ends all rows. `tokens` and `logits`
    are the names of the program's input and output. Raises what the session raises.
    """
    import torch

    ends = torch.tensor(sorted(stop), dtype=torch.int64)
    ended = torch.zeros(len(prompt), dtype=torch.bool)
    fed, past, last = prompt, 0, prompt[:, -1]
    for _ in range(count):
        result = session({tokens: fed}, timeout, [logits], past=past)[logits]
        past += fed.shape[1]
        last = torch.where(ended, last, next_tokens(result[:, -1], past, sampling))
        yield last
        ended |= torch.isin(last, ends)
        if bool(ended.all()):
            return
        fed = last[:, None]
