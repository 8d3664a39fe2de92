"""Sums in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def in_order(first: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
    """``((first + a) + b) + ...``, in new memory."""
    if not terms:
        return first.clone()
    total = first + terms[0]
    for term in terms[1:]:
        total += term
    return total
