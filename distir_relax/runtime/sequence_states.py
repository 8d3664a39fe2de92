"""States of ranks between the calls of a program that continues a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distir_relax.bundle import local_shape
from distir_relax.errors import RunError
from distir_relax.runtime.arrays import torch_dtype
from distir_relax.runtime.call_shapes import Call

if TYPE_CHECKING:
    import torch


class SequenceStates:
    """The states of ranks, by name, on their `devices` by rank; those of one sequence at a time."""

    def __init__(self, devices: Mapping[int, str]) -> None:
        self._devices = devices
        self._states: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in devices}
        self._others: dict[str, int] = {}
        self._past = 0

    def start(self, call: Call) -> None:
        """Prepare the states for a call: a new sequence without earlier positions, else the one of the last call.

        Raises RunError if the last call has left another number of positions, or had other sizes.
        """
        if not call.manifest.states:
            return
        past, new = call.sizes["past"], call.sizes["new"]
        others = {name: size for name, size in call.sizes.items() if name not in ("past", "new", "last")}
        if past == 0:
            for rank, device in self._devices.items():
                self._states[rank] = _empty(call, rank, device)
        elif past != self._past or others != self._others:
            expected = ", ".join(f"{name} = {size}" for name, size in {"past": self._past, **self._others}.items())
            found = ", ".join(f"{name} = {size}" for name, size in {"past": past, **others}.items())
            raise RunError(f"expected to continue the sequence of the last call, {expected}, found {found}")
        self._past, self._others = past + new, others

    def of(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the states of a rank, which a step replaces by their next values."""
        return self._states[rank]

    def clear(self) -> None:
        """Forget the sequence, after a call that failed."""
        self._past, self._others = 0, {}


def _empty(call: Call, rank: int, device: str) -> dict[str, torch.Tensor]:
    """Return the states before the first position: empty, or zero."""
    import torch

    tensors = [state.tensor for state in call.manifest.states if state.tensor.is_on(rank)]
    return {
        tensor.name: torch.zeros(
            local_shape(tensor, call.manifest.mesh, rank), dtype=torch_dtype(tensor.dtype), device=device
        )
        for tensor in tensors
    }
