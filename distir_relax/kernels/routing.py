"""Products of rows with the matrices of their groups (experts), with rows in any order.

`ids` has the group of each row, `groups` the groups of this device. Rows of other groups are ignored: their results are
zero. If there are fewer rows than `ids`, they are only those of the device's groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from distir_relax.kernels.recording import runs_whole

if TYPE_CHECKING:
    import torch

Product: TypeAlias = "Callable[[int, torch.Tensor], torch.Tensor]"
"""From the index of a group and some of its rows (m, k), the product (m, n) with its matrix."""


def selected(x: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return `x` with zeros in the rows of other groups."""
    import torch

    is_selected = torch.isin(ids, groups).view(-1, *(1,) * (x.dim() - 1))
    return torch.where(is_selected, x, x.new_zeros(()))


def matmul(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Multiply each row of `x` (rows, k) by the matrix of its group, of `weights` (groups, k, n)."""
    return multiply(x, ids, groups, weights.shape[2], lambda group, rows: rows @ weights[group])


@runs_whole
def multiply(x: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor, columns: int, product: Product) -> torch.Tensor:
    """Return the `product` of each row of `x` (rows, k) with the matrix of its group: (rows, columns)."""
    import torch

    order, spans = _spans(_ids(x, ids, groups), groups)
    found = _multiply_spans(x[order], spans, columns, product)
    return torch.empty_like(found).index_copy_(0, order, found)


@runs_whole
def multiply_sorted(
    x: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, columns: int, product: Product
) -> torch.Tensor:
    """Return the same for rows sorted by group: those of group g are from ``starts[g]`` to ``ends[g] - 1``."""
    return _multiply_spans(x, _bounds(starts, ends, x.shape[0]), columns, product)


def sorted_matmul(x: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows (rows, k), sorted by group, by the matrices of their groups, of `weights` (groups, k, n)."""
    return multiply_sorted(x, starts, ends, weights.shape[2], lambda group, rows: rows @ weights[group])


@runs_whole
def sorted_weight_grad(x: torch.Tensor, y: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return `weight_grad` of rows sorted by group: those of group g are from ``starts[g]`` to ``ends[g] - 1``."""
    result = x.new_zeros((starts.shape[0], x.shape[1], y.shape[1]))
    for group, (start, end) in enumerate(_bounds(starts, ends, x.shape[0])):
        if start < end:
            result[group] = x[start:end].t() @ y[start:end]
    return result


def _bounds(starts: torch.Tensor, ends: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    return list(zip(starts.clamp(0, rows).tolist(), ends.clamp(0, rows).tolist(), strict=True))


def _multiply_spans(x: torch.Tensor, spans: Sequence[tuple[int, int]], columns: int, product: Product) -> torch.Tensor:
    result = x.new_zeros((x.shape[0], columns))
    for group, (start, end) in enumerate(spans):
        if start < end:
            result[start:end].add_(product(group, x[start:end]))
    return result


@runs_whole
def weight_grad(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return for each group the product of its rows of `x` (rows, k), transposed, and its rows of `y`."""
    ids = _ids(x, ids, groups)
    result = x.new_zeros((groups.shape[0], x.shape[1], y.shape[1]))
    for group, rows in _rows(ids, groups):
        result[group] = x[rows].t() @ y[rows]
    return result


def _ids(x: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    import torch

    return ids if x.shape[0] == ids.shape[0] else ids[torch.isin(ids, groups)]


def _rows(ids: torch.Tensor, groups: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of each group that has rows, and those rows, in order."""
    order, spans = _spans(ids, groups)
    for group, (start, end) in enumerate(spans):
        if start < end:
            yield group, order[start:end]


def _spans(ids: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Return the order of rows that sorts them by group, and the places of each group in it."""
    import torch

    order = torch.argsort(ids, stable=True)
    sorted_ids = ids[order].contiguous()
    starts = torch.searchsorted(sorted_ids, groups).tolist()
    ends = torch.searchsorted(sorted_ids, groups, right=True).tolist()
    return order, list(zip(starts, ends, strict=True))


def owners(ids: torch.Tensor, groups: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the device of each row: device i has the groups from ``groups[i][0]`` to ``groups[i][1] - 1``.

    -1 for a row whose group no device has.
    """
    owner = ids.new_full(ids.shape, -1)
    for index, (start, stop) in enumerate(groups):
        owner[(ids >= start) & (ids < stop)] = index
    return owner
