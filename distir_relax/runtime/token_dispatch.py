"""Token dispatch: send rows to the ranks that hold their groups (experts), and back; row counts depend on data.

Each rank knows the group of every row of its mesh group, `ids`, so all know the message sizes without communication.
Rank i owns `sizes[i]` rows, in rank order, and holds the groups `groups[i]`::

    rows_to_groups      [a0 a1 | b1 b0]        =>  [a0 0 0 b0 | 0 a1 b1 0]       a1: a row of rank a, of group 1
    rows_from_groups    [a0 - - b0 | - a1 b1 -]  =>  [a0 a1 | b1 b0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.kernels.routing import owners
from distir_relax.runtime.arrays import as_torch, like, split
from distir_relax.runtime.communicator import Communicator, collective
from distir_relax.runtime.point_to_point import Step

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

Groups = Sequence[tuple[int, int]]


@collective
def rows_to_groups(
    comm: Communicator,
    x: Array,
    ids: Array,
    axis: str,
    sizes: Sequence[int],
    groups: Groups,
    step: Step = None,
    alone: bool = False,
) -> Any:
    """Return the rows of all ranks, zeros in those of groups not held by this rank; or only its rows, if `alone`."""
    import torch

    index, _, me = comm._place(axis)
    source, owner = as_torch(x), owners(as_torch(ids), groups)
    _check(comm, "rows_to_groups", axis, sizes, source, sizes[me])
    places = _places(owner, sizes)
    sent = [rows - sum(sizes[:me]) for rows in places[me]]
    received = [row[me] for row in places]
    arrived = _exchange(comm, "rows_to_groups", source, sent, received, index, sum(sizes), step)
    if alone:
        return like(arrived, x)
    result = source.new_zeros((sum(sizes), *source.shape[1:]))
    result[torch.cat(received)] = arrived
    return like(result, x)


@collective
def rows_from_groups(
    comm: Communicator, x: Array, ids: Array, axis: str, sizes: Sequence[int], groups: Groups, step: Step = None
) -> Any:
    """Return the rows that this rank owns, each from the rank that holds its group; zero if none does.

    `x` has the rows of all ranks, or only those of this rank's groups.
    """
    import torch

    index, _, me = comm._place(axis)
    source, owner = as_torch(x), owners(as_torch(ids), groups)
    places = _places(owner, sizes)
    sent, received = [row[me] for row in places], places[me]
    if source.shape[0] == sum(map(len, sent)):
        sent = split(torch.arange(source.shape[0]), [len(rows) for rows in sent])
    else:
        _check(comm, "rows_from_groups", axis, sizes, source, sum(sizes))
    arrived = _exchange(comm, "rows_from_groups", source, sent, received, index, sum(sizes), step)
    result = source.new_zeros((sizes[me], *source.shape[1:]))
    result[torch.cat(received) - sum(sizes[:me])] = arrived
    return like(result, x)


def _places(owner: torch.Tensor, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    """Return, for each owner of rows and each rank that holds their group, the indices of the rows."""
    import torch

    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [
        [torch.nonzero(owner[start : start + size] == j).view(-1) + start for j in range(len(sizes))]
        for start, size in zip(starts, sizes, strict=True)
    ]


def _exchange(
    comm: Communicator,
    kind: str,
    source: torch.Tensor,
    sent: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    index: int,
    most: int,
    step: Step,
) -> torch.Tensor:
    """Send the rows `sent[i]` of `source` to rank i; return the rows received, `received[i]` from each."""
    import torch

    row, me = math.prod(source.shape[1:]), comm._coordinates[index]
    moved = sum(len(rows) for i, rows in enumerate(sent) if i != me)
    with comm._step(step, kind, moved * row * source.element_size(), index):
        flat = source[torch.cat(list(sent))].reshape(-1)
        leaving, coming = ([len(rows) * row for rows in part] for part in (sent, received))
        arrived = comm._all_to_all(flat, leaving, coming, index, most * row)
        return arrived.view(sum(map(len, received)), *source.shape[1:])


def _check(comm: Communicator, kind: str, axis: str, sizes: Sequence[int], x: torch.Tensor, expected: int) -> None:
    if len(sizes) != comm._place(axis)[1] or x.shape[0] != expected:
        raise RunError(
            f"{kind} along {axis!r} of a tensor of shape {tuple(x.shape)} on rank {comm.rank}: rows of {list(sizes)} "
            "do not fit it"
        )
