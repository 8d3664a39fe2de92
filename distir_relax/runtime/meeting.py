"""Whether the ranks that meet in a communication have all come to the same one.

Programs have no control flow that depends on data: ranks that met rightly in one run do so in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "resplit", "send", "recv", "barrier")


def point(comm: Communicator) -> torch.Tensor:
    """Where a rank is, as three numbers: step, kind, and the time that the run comes to it."""
    import torch

    at = comm.progress.current
    assert at is not None and isinstance(at.step, int)
    return torch.tensor([at.step, _KINDS.index(at.kind), at.time], device=comm.device)


def check_group(comm: Communicator, axis: int) -> None:
    """Raise RunError unless all ranks of the group along mesh axis `axis` are where `comm` is; all of them call this."""
    mine = point(comm)
    n = comm.mesh.shape[axis]
    points = comm._all_gather(mine, [len(mine)] * n, axis, None).view(n, -1)
    for peer, theirs in zip(comm.mesh.group(comm.rank, axis), points.tolist(), strict=True):
        if theirs != mine.tolist():
            raise _mismatch(comm, mine.tolist(), peer, theirs)


def check_sender(comm: Communicator, peer: int) -> None:
    """Receive the `point` of `peer`; raise RunError unless it sends in the step in which this rank receives."""
    mine = point(comm).tolist()
    sent = point(comm)
    comm._recv(sent, peer)
    theirs = sent.tolist()
    if theirs != [mine[0], _KINDS.index("send"), mine[2]]:
        raise _mismatch(comm, mine, peer, theirs)


def _mismatch(comm: Communicator, mine: Sequence[int], peer: int, theirs: Sequence[int]) -> RunError:
    return RunError(
        f"the ranks' programs do not fit each other: rank {comm.rank} has come to {_text(*mine)}, rank {peer} to "
        f"{_text(*theirs)}",
        hint="compile the model again; distir show --stage ranked prints the programs",
    )


def _text(step: int, kind: int, time: int) -> str:
    return f"step #{step}, {_KINDS[kind]}" + (f", for time {time + 1}" if time else "")
