"""States of ranks between the calls of a program that continues a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distir_relax.bundle import Tensor, local_shape
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
        self._encoded: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in devices}
        self._others: dict[str, int] = {}
        self._past = 0

    def encoded(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the outputs of the encoder on a rank by name, which begin the states of the next sequence."""
        return self._encoded[rank]

    def start(self, call: Call) -> None:
        """Prepare the states for a call: a new sequence without earlier positions, else the one of the last call.

        A new one has the states that the encoder has computed; others are empty, or zero.

        Raises RunError if the last call has left another number of positions, or had other sizes.
        """
        if not call.manifest.states:
            return
        past, new = call.sizes["past"], call.sizes["new"]
        others = {name: size for name, size in call.sizes.items() if name not in ("past", "new", "last")}
        if past == 0:
            for rank, device in self._devices.items():
                self._states[rank] = _first(call, rank, device, self._encoded[rank])
                self._encoded[rank] = {}
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


def _first(call: Call, rank: int, device: str, encoded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the states before the first position: `encoded` by their outputs' names, or empty, or zero."""
    import torch

    def state(tensor: Tensor, output: str) -> torch.Tensor:
        if output in encoded:
            return encoded[output]
        shape = local_shape(tensor, call.manifest.mesh, rank)
        return torch.zeros(shape, dtype=torch_dtype(tensor.dtype), device=device)

    return {s.tensor.name: state(s.tensor, s.output) for s in call.manifest.states if s.tensor.is_on(rank)}
