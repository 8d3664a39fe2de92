"""Orders and extremes along a dim, with torch's NaN rules. The tvm backend calls them where its own drop NaN."""

from __future__ import annotations

import torch


def argsort(x: torch.Tensor, axis: int, descending: bool) -> torch.Tensor:
    """The positions along dim `axis` in the order of their elements."""
    return torch.argsort(x, dim=axis, descending=descending, stable=True)


def topk(x: torch.Tensor, k: int, axis: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest or smallest elements along dim `axis`, in order, and their positions."""
    values, places = torch.topk(x, k, axis, largest)
    return values, places


def scatter_elements(
    x: torch.Tensor, places: torch.Tensor, updates: torch.Tensor, axis: int, reduction: str
) -> torch.Tensor:
    """`x` with the largest or smallest of each element and the updates at its place along dim `axis`."""
    return x.scatter_reduce(axis, places, updates, f"a{reduction}")


def cummax(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest element so far along dim `axis`, and its position."""
    values, places = torch.cummax(x, axis)
    return values, places


def cummin(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest element so far along dim `axis`, and its position."""
    values, places = torch.cummin(x, axis)
    return values, places


def logcumsumexp(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Logarithms of the cumulative sums of exponentials along dim `axis`."""
    return torch.logcumsumexp(x, axis)
