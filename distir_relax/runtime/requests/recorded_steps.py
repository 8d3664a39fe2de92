"""Recorded steps (`kernels.recording`): those in which each request has one new token, on the processor.

Such a step takes so little time that Python and allocations between ops are a good part of it. One is recorded for each
number of requests, when that number is seen for the second time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.kernels.recorded_requests import RecordedRequests
from distir_relax.kernels.recording import Recording
from distir_relax.kernels.requests import Request, are_recorded
from distir_relax.runtime.recorded_step import RecordedStep, record

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

_Step: TypeAlias = "tuple[RecordedStep, RecordedRequests]"
_MOST_STEPS = 16
"""Maximum number of steps that are kept."""


class RecordedSteps:
    """The steps of a program ``main(comm, weights, requests, *inputs)``, by their number of requests."""

    def __init__(self, main: Callable[..., Sequence[torch.Tensor]], comm: Communicator, weights: Any) -> None:
        self._main, self._comm, self._weights = main, comm, weights
        self._seen: set[int] = set()
        self._steps: OrderedDict[tuple[int, int], _Step | None] = OrderedDict()

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
        if (found := self._steps[key]) is None:
            return None
        recorded, of_requests = found
        # A kernel may not take the masks of these requests.
        return recorded.run(inputs) if of_requests.update(requests) else None

    def _record(
        self, requests: Sequence[Request], inputs: Sequence[torch.Tensor]
    ) -> tuple[_Step | None, Sequence[torch.Tensor]]:
        recording = Recording()
        recorded = RecordedRequests(recording, requests)
        step, outputs = record(recording, self._main, self._comm, (self._weights, recorded), inputs)
        recorded.current = ()
        return (None if step is None else (step, recorded)), outputs
