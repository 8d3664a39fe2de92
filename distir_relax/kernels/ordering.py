"""Sorting and extremes along a dim, with torch's NaN semantics, for the tvm backend: TVM's own ops drop NaN."""

from __future__ import annotations

import torch


def argsort(x: torch.Tensor, axis: int, descending: bool) -> torch.Tensor:
    """Return the positions along dim `axis` in sorted order; stable."""
    return torch.argsort(x, dim=axis, descending=descending, stable=True)


def topk(x: torch.Tensor, k: int, axis: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest or smallest elements along dim `axis`, sorted, and their positions."""
    values, places = torch.topk(x, k, axis, largest)
    return values, places


def scatter_elements(
    x: torch.Tensor, places: torch.Tensor, updates: torch.Tensor, axis: int, reduction: str
) -> torch.Tensor:
    """Return `x` combined with `updates` at `places` along dim `axis`, by maximum or minimum."""
    return x.scatter_reduce(axis, places, updates, f"a{reduction}")


def cummax(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cumulative maximum along dim `axis`, and its position."""
    values, places = torch.cummax(x, axis)
    return values, places


def cummin(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cumulative minimum along dim `axis`, and its position."""
    values, places = torch.cummin(x, axis)
    return values, places


def logcumsumexp(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the logarithm of cumulative sums of exponentials along dim `axis`."""
    return torch.logcumsumexp(x, axis)
