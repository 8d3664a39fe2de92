"""Calls of a rank's program that are recorded (`kernels.recording`) and run again on other inputs of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels.recording import Recording
from distir_relax.runtime.recorded_communicator import RecordedCommunicator

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

_MOST_PYTHON = 2
"""Functions of Python for each native call, of which a step with more is no faster than its program."""


class RecordedStep:
    """A call that runs again."""

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._recording, self._inputs, self._outputs = recording, inputs, outputs

    def run(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the outputs for other inputs; the next run overwrites them."""
        for mine, x in zip(self._inputs, inputs, strict=True):
            mine.copy_(x)
        self._recording.run()
        return self._outputs


def record(
    recording: Recording, main: Callable[..., Sequence[torch.Tensor]], comm: Communicator,
    arguments: Sequence[object], inputs: Sequence[torch.Tensor],
) -> tuple[RecordedStep | None, Sequence[torch.Tensor]]:  # fmt: skip
    """Call ``main(comm, *arguments, *inputs)``; return the step, and the outputs, which its first run overwrites.

    The step is None if the call cannot run again, or would not be faster.
    """
    from distir_relax.kernels.recorded_ops import recorded

    mine = [recording.input(x) for x in inputs]
    with recorded(recording):
        outputs = main(RecordedCommunicator(comm, recording), *arguments, *mine)
    # Kernels read them.
    recording.keep(arguments)
    if recording.failure or recording.python_calls > _MOST_PYTHON * recording.native_calls:
        return None, outputs
    return RecordedStep(recording, mine, outputs), outputs
