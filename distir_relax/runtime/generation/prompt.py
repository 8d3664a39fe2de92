"""Prompts as users give them, and tokens in the same form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch


def prompt_ids(prompt: Any) -> tuple[torch.Tensor, bool]:
    """Return a prompt as int64 tokens, (batch, length), and whether it is a batch.

    Raises `RunError` if it is empty, or not the token ids of one sequence, or of several of one length.
    """
    import torch

    if isinstance(prompt, Sequence) and all(isinstance(p, Sequence) and not isinstance(p, str) for p in prompt):
        lengths = sorted({len(p) for p in prompt})
        if len(lengths) > 1:
            raise RunError(
                f"expected prompts of one length, found {', '.join(map(str, lengths))}",
                hint="generate from them one by one",
            )
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"expected token ids, found {prompt!r}: {error}") from None
    if not ids.numel():
        raise RunError("expected a prompt of at least one token, found none", hint="begin with the model's BOS token")
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim not in (1, 2):
        raise RunError(f"expected token ids of one sequence or a batch, found {ids.dtype} of shape {tuple(ids.shape)}")
    return (ids if ids.ndim == 2 else ids[None]).to("cpu", torch.int64), ids.ndim == 2


def result_tokens(steps: Iterable[torch.Tensor], ids: torch.Tensor, is_batch: bool) -> torch.Tensor:
    """Return the tokens of all steps after a prompt, int64: (batch, steps), or (steps,) for one sequence."""
    import torch

    tokens = [*steps]
    result = torch.stack(tokens, 1) if tokens else ids[:, :0]
    return result if is_batch else result[0]


def step_tokens(step: torch.Tensor, is_batch: bool) -> Any:
    """Return the token of a step, a number, or for a batch the tensor with one of each sequence."""
    return step if is_batch else int(step[0])
