"""Call of a loss in a frame that distinguishes its ops from those of the model.

`torch.export` records frames of functions called ``forward`` alone, so a function of the user's has no frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distir_relax.frontends.location import innermost_frame

LOSS_LOCATION = "the loss"


def loss_call(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that calls the loss with an output and targets."""

    def forward(output: Any, targets: Any) -> Any:
        return loss(output, targets)

    return forward


def location_of_loss(stack: str | None) -> str:
    """Return `LOSS_LOCATION` for the stack of an op that a loss computes itself, "" for others."""
    return LOSS_LOCATION if stack and __file__ in stack and innermost_frame(stack) == __file__ else ""
