"""Recorded steps (`kernels.recording`), for calls of a program with the same sizes.

A call of a small program takes little more time than Python between its ops does. After some calls with the same sizes
one is recorded, and later ones are a list of native calls; for others Python is a small part, and they run op by op.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels.recording import Recording
from distir_relax.runtime.recorded_communicator import RecordedCommunicator

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
        self._steps: OrderedDict[tuple[int, ...], _Step | None] = OrderedDict()

    def run(
        self, sizes: Mapping[str, int], arguments: Sequence[object], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the outputs of a call: `arguments` are the same in all of these `sizes`."""
        if (found := self.find(sizes)) is not None:
            return found.run(inputs)
        key = _key(sizes)
        if self._is_recorded_now(key):
            step, outputs = self._record(arguments, inputs)
            self._steps[key] = step
            if len(self._steps) > _MOST_STEPS:
                self._calls.pop(self._steps.popitem(last=False)[0], None)
            return outputs
        return list(self._main(self._comm, *arguments, *inputs))

    def find(self, sizes: Mapping[str, int]) -> _Step | None:
        """Return the recorded step for calls with these sizes, if there is one."""
        return self._steps.get(_key(sizes))

    def _is_recorded_now(self, key: tuple[int, ...]) -> bool:
        if len(self._calls) >= _MOST_COUNTED:
            self._calls.clear()
        self._calls[key] += 1
        return self._calls[key] >= _CALLS and key not in self._steps

    def _record(
        self, arguments: Sequence[object], inputs: Sequence[torch.Tensor]
    ) -> tuple[_Step | None, list[torch.Tensor]]:
        from distir_relax.kernels import recorded_ops

        recording = Recording(MOST_BYTES)
        mine = [recording.input(x) for x in inputs]
        with recorded_ops.recorded(recording):
            outputs = self._main(RecordedCommunicator(self._comm, recording), *arguments, *mine)
        is_worth_it = (
            not recording.failure
            and 2 * recording.native_calls >= recording.python_calls
            and sum(y.nbytes for y in outputs) <= _MOST_OUTPUTS
        )
        found = [y.clone() for y in outputs]
        # Kernels read the arguments.
        return (_Step(recording, arguments, mine, outputs) if is_worth_it else None), found


class _Step:
    def __init__(
        self, recording: Recording, arguments: Sequence[object], inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._recording, self._arguments, self._inputs, self._outputs = recording, arguments, inputs, outputs

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for mine, x in zip(self._inputs, inputs, strict=True):
            mine.copy_(x)
        self._recording.run()
        return [y.clone() for y in self._outputs]


def _key(sizes: Mapping[str, int]) -> tuple[int, ...]:
    import torch

    return (torch.get_num_threads(), *sizes.values())
