"""The processes of a launch, before and around the mesh: who is here, do we agree, how do we stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from distir_relax import errors
from distir_relax.errors import DistIRError, RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.communicator import Communicator


def check_size(mesh: DeviceMesh, size: int) -> None:
    """Raise RunError when `size` ranks are not as many as `mesh` has."""
    if size == mesh.size:
        return
    grid = ", ".join(f"{axis}={extent}" for axis, extent in zip(mesh.axes, mesh.shape, strict=True))
    raise RunError(
        f"expected {mesh.size} ranks for the mesh ({grid}), found {size}",
        hint=f"start {mesh.size} (mpirun -n {mesh.size} distir run ...), or compile for {size} ranks",
    )


class World(ABC):
    """All processes of a launch, seen from one of them."""

    kind: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    @abstractmethod
    def communicator(self, mesh: DeviceMesh, device: str = "cpu") -> Communicator:
        """A communicator over `mesh`, whose world size must be `size`. All ranks call this together."""

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (of JSON's types), in rank order."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the launch now, with exit code `code`. Does not return."""

    @abstractmethod
    def announce_stall(self) -> None:
        """Tell every rank that this one has waited too long. May be called from any thread."""

    @abstractmethod
    def stall_announced(self) -> bool:
        """Whether some rank has announced a stall. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Leave the launch in good order; every rank calls this."""

    def agree(self, error: DistIRError | None) -> None:
        """Raise the same error on every rank if any rank has one; return on every rank if none has."""
        mine = None
        if error is not None:
            mine = {"type": type(error).__name__, "fields": [error.message, error.where, error.hint]}
        found = {rank: theirs for rank, theirs in enumerate(self.exchange(mine)) if theirs is not None}
        if not found:
            return
        first = min(found)
        kind = getattr(errors, found[first]["type"], RunError)
        message, where, hint = found[first]["fields"]
        if len(found) < self.size and self.size > 1:
            message += f" (on {_ranks(list(found))} of {self.size})"
        raise kind(message, where, hint)

    def agree_equal(self, what: str, value: Any) -> None:
        """Raise RunError on every rank unless all have the same `value` (of JSON's types) for `what`."""
        values = self.exchange(value)
        unlike = [rank for rank, theirs in enumerate(values) if theirs != values[0]]
        if unlike:
            raise RunError(
                f"the ranks disagree on {what}: rank 0 has {values[0]}, rank {unlike[0]} has {values[unlike[0]]}",
                hint="every node must see the same bundle, and run the same version",
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
