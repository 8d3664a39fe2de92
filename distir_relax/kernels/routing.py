"""Rows that are worked on by the group that each is of, by number: the experts of a mixture, in any order of the rows.

`ids` says of each row which group it is of, `groups` which groups a device has. Rows of other groups have no part in
anything: results are zero for them. Where there are fewer rows than `ids`, they are those of the device's groups alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def selected(x: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`x` with zeros in the rows of other groups."""
    import torch

    mine = torch.isin(ids, groups).view(-1, *(1,) * (x.dim() - 1))
    return torch.where(mine, x, x.new_zeros(()))


def matmul(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each row of `x` (rows, k) times the matrix of its group, of `weights` (groups, k, n)."""
    ids = _ids(x, ids, groups)
    result = x.new_zeros((x.shape[0], weights.shape[2]))
    for place, rows in _rows(ids, groups):
        result[rows] += x[rows] @ weights[place]
    return result


def weight_grad(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """For each group the product of the rows of `x` (rows, k) that are of it, transposed, and of those of `y`."""
    ids = _ids(x, ids, groups)
    result = x.new_zeros((groups.shape[0], x.shape[1], y.shape[1]))
    for place, rows in _rows(ids, groups):
        result[place] = x[rows].t() @ y[rows]
    return result


def _ids(x: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    import torch

    return ids if x.shape[0] == ids.shape[0] else ids[torch.isin(ids, groups)]


def _rows(ids: torch.Tensor, groups: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The place of each group that has rows, and these, in order."""
    import torch

    order = torch.argsort(ids, stable=True)
    inside = ids[order].contiguous()
    starts = torch.searchsorted(inside, groups).tolist()
    ends = torch.searchsorted(inside, groups, right=True).tolist()
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > start:
            yield place, order[start:end]


def owners(ids: torch.Tensor, groups: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Which device each row belongs to: device i has the groups from ``groups[i][0]`` to the one before the second.

    -1 for a row whose group none has.
    """
    found = ids.new_full(ids.shape, -1)
    for index, (start, stop) in enumerate(groups):
        found[(ids >= start) & (ids < stop)] = index
    return found
