"""Recorded steps (`kernels.recording`): those in which each request has one new token, on the processor.

Such a step takes so little time that Python and allocations between ops are a good part of it. One is recorded for each
number of requests, when that number is seen for the second time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.kernels.recorded_requests import RecordedRequests
from distir_relax.kernels.recording import Recording
from distir_relax.kernels.requests import Request, are_recorded
from distir_relax.runtime.recorded_communicator import RecordedCommunicator

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

_MOST_STEPS = 16
"""Maximum number of steps that are kept."""


class RecordedSteps:
    """The steps of a program ``main(comm, weights, requests, *inputs)``, by their number of requests."""

    def __init__(self, main: Callable[..., Sequence[torch.Tensor]], comm: Communicator, weights: Any) -> None:
        self._main, self._comm, self._weights = main, comm, weights
        self._seen: set[int] = set()
        self._steps: OrderedDict[tuple[int, int], RecordedStep | None] = OrderedDict()

    def run(self, requests: Sequence[Request], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Run or record a step; return its outputs, which the next step overwrites. None if neither can be."""
        import torch

        count = len(requests)
        if not are_recorded(count, ((request.new, request.last) for request in requests)):
            return None
        key = (count, torch.get_num_threads())
        if key not in self._steps:
            if count not in self._seen:
                self._seen.add(count)
                return None
            step, outputs = self._record(requests, inputs)
            self._steps[key] = step
            if len(self._steps) > _MOST_STEPS:
                self._steps.popitem(last=False)
            return outputs
        self._steps.move_to_end(key)
        found = self._steps[key]
        return None if found is None else found.run(requests, inputs)

    def _record(
        self, requests: Sequence[Request], inputs: Sequence[torch.Tensor]
    ) -> tuple[RecordedStep | None, Sequence[torch.Tensor]]:
        from distir_relax.kernels import recorded_ops

        recording = Recording()
        recorded = RecordedRequests(recording, requests)
        mine = [recording.input(x) for x in inputs]
        comm = RecordedCommunicator(self._comm, recording)
        with recorded_ops.recorded(recording):
            outputs = self._main(comm, self._weights, recorded, *mine)
        if recording.failure or 2 * recording.native_calls < recording.python_calls:
            return None, outputs
        return RecordedStep(recording, recorded, mine, outputs), outputs


class RecordedStep:
    """A step of some number of requests."""

    def __init__(
        self, recording: Recording, requests: RecordedRequests, inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._recording, self._requests, self._inputs, self._outputs = recording, requests, inputs, outputs

    def run(self, requests: Sequence[Request], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Run the step; return its outputs, which the next run overwrites. None if a kernel cannot: see `update`."""
        if not self._requests.update(requests):
            return None
        for mine, x in zip(self._inputs, inputs, strict=True):
            mine.copy_(x)
        self._recording.run()
        return self._outputs
