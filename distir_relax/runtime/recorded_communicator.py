"""A communicator as a program that is recorded sees it: each of its methods is one part of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distir_relax.kernels.recording import Recording, paused
from distir_relax.runtime.arrays import torch_dtype
from distir_relax.runtime.point_to_point import Step

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

_CONSTANT = ("index", "shard_start")
"""Methods whose result is the same in each step."""


class RecordedCommunicator:
    """A communicator whose calls are recorded (`kernels.recording`).

    Collectives that go on while the program does end the recording: a step's memory is used again before they end.
    """

    def __init__(self, comm: Communicator, recording: Recording) -> None:
        self._comm, self._recording = comm, recording

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if not callable(found):
            return found
        if name.startswith("start_"):
            self._recording.fail(f"{name} goes on while the program does")
        return partial(self._constant if name in _CONSTANT else self._recording.whole, found)

    def all_reduce(
        self, x: torch.Tensor, axis: str, op: str, step: Step = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Communicator.all_reduce`; where ranks share memory (`share_memory`), it is a native call."""
        is_sum = op == "sum" and out is None
        found = self._comm.sum_recorded(self._recording, x, axis, step) if is_sum else None
        return self._recording.whole(self._comm.all_reduce, x, axis, op, step, out) if found is None else found

    def rows_to_groups(self, *args: Any, alone: bool = False, **options: Any) -> Any:
        """See `Communicator.rows_to_groups`; how many rows a rank has `alone` depends on data."""
        if alone:
            self._recording.fail("the number of rows of a rank's groups depends on data")
        return self.__getattr__("rows_to_groups")(*args, alone=alone, **options)

    def start_send(self, x: torch.Tensor, peer: int, copy: bool, step: int) -> None:
        """See `Communicator.start_send`; `x` is copied, since a step's memory is used again soon."""
        self._recording.whole(self._comm.start_send, x, peer, True, step)

    def start_recv(
        self, shape: Sequence[int], dtype: str, peer: int, step: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Communicator.start_recv`; the data come into memory of the step."""
        import torch

        target = torch.empty(tuple(shape), dtype=torch_dtype(dtype)) if out is None else out
        found: torch.Tensor = self._recording.whole(self._comm.start_recv, shape, dtype, peer, step, target)
        return found

    def _constant(self, function: Callable[..., Any], *args: Any) -> Any:
        with paused():
            found = function(*args)
        self._recording.keep(found)
        return found
