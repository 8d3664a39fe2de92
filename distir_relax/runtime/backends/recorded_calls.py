"""Recorded steps (`kernels.recording`), for calls of a program with the same sizes.

A call of a small program takes little more time than Python between its ops does. After some calls with the same sizes
one is recorded, and later ones are a list of native calls; for others Python is a small part, and they run op by op.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels.recording import Recording
from distir_relax.runtime.recorded_step import RecordedStep, record

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

_CALLS = 4
"""The call that is recorded; those before it run op by op."""
_MOST_COUNTED = 256
"""Maximum number of choices of sizes whose calls are counted; then the counts begin again."""
_MOST_STEPS = 8
"""Maximum number of steps that are kept."""
MOST_BYTES = 1 << 24
"""Bytes of all results of the largest program that is recorded."""
_MOST_OUTPUTS = 1 << 21
"""Bytes of the largest outputs: each call copies them."""


class RecordedCalls:
    """The steps of a program ``main(comm, *arguments, *inputs)``, by the sizes of its calls."""

    def __init__(self, main: Callable[..., Sequence[torch.Tensor]], comm: Communicator) -> None:
        self._main, self._comm = main, comm
        self._calls: Counter[tuple[int, ...]] = Counter()
        self._steps: OrderedDict[tuple[int, ...], RecordedStep | None] = OrderedDict()

    def run(
        self, sizes: Mapping[str, int], arguments: Sequence[object], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the outputs of a call: `arguments` are the same in all of these `sizes`."""
        key = _key(sizes)
        if (found := self._steps.get(key)) is not None:
            return [y.clone() for y in found.run(inputs)]
        if self._is_recorded_now(key):
            step, outputs = self._record(arguments, inputs)
            self._steps[key] = step
            if len(self._steps) > _MOST_STEPS:
                self._calls.pop(self._steps.popitem(last=False)[0], None)
            return outputs
        return list(self._main(self._comm, *arguments, *inputs))

    def _is_recorded_now(self, key: tuple[int, ...]) -> bool:
        if len(self._calls) >= _MOST_COUNTED:
            self._calls.clear()
        self._calls[key] += 1
        return self._calls[key] >= _CALLS and key not in self._steps

    def _record(
        self, arguments: Sequence[object], inputs: Sequence[torch.Tensor]
    ) -> tuple[RecordedStep | None, list[torch.Tensor]]:
        step, outputs = record(Recording(MOST_BYTES), self._main, self._comm, arguments, inputs)
        are_small = sum(y.nbytes for y in outputs) <= _MOST_OUTPUTS
        return (step if are_small else None), [y.clone() for y in outputs]


def _key(sizes: Mapping[str, int]) -> tuple[int, ...]:
    import torch

    return (torch.get_num_threads(), *sizes.values())
