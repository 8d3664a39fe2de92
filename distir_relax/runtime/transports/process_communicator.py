"""Communicator of a rank that is a process: ranks of one machine sum in memory that they share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from distir_relax.layout import DeviceMesh
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.transports.shared_sums import SharedSums

if TYPE_CHECKING:
    import torch


class ProcessCommunicator(Communicator):
    """One rank of a mesh, in a process of its own."""

    def __init__(self, rank: int, mesh: DeviceMesh, device: str = "cpu") -> None:
        super().__init__(rank, mesh, device)
        self._shared_sums: dict[int, SharedSums | None] = {}

    def share_memory(self) -> None:
        """See `Communicator.share_memory`."""
        for axis in range(len(self.mesh.shape)):
            self._sums(axis)

    def _sum_in_shared_memory(self, x: torch.Tensor, out: torch.Tensor, axis: int) -> bool:
        # All ranks of the group reach the first all-reduce along the axis.
        sums = self._sums(axis)
        return sums is not None and sums.sum(x, out)

    def _sum_natively(self, x: torch.Tensor, axis: int, step: int) -> torch.Tensor | None:
        # Ranks record steps on their own, so memory that they do not share yet stays so.
        sums = self._shared_sums.get(axis)
        out = x.new_empty(x.shape)
        return out if sums is not None and sums.sum(x, out, step, self.native_waits) else None

    def _sums(self, axis: int) -> SharedSums | None:
        """Return the sums of the group along an axis, None if it has none; its ranks call it first together."""
        if axis not in self._shared_sums:
            self._shared_sums[axis] = self._make_sums(axis)
        return self._shared_sums[axis]

    @abstractmethod
    def _make_sums(self, axis: int) -> SharedSums | None:
        """Return sums in memory that all ranks of the group along an axis share, None if they cannot."""
