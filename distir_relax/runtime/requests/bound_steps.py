"""Steps that are bound (`kernels.bound_step`): those in which each request has one new token, on the processor.

A step is bound for the number of its requests, when that number is seen for the second time. `RankRequests`
binds that of one request before its first step: this compiles the kernels, which are those of any number of requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from distir_relax.kernels.bound_requests import BoundRequests
from distir_relax.kernels.bound_step import BoundStep, CannotBind
from distir_relax.kernels.requests import Request, are_bound

if TYPE_CHECKING:
    import torch

    Bind: TypeAlias = "Callable[..., Sequence[torch.Tensor]]"

_MOST_STEPS = 16
"""Maximum number of steps that are kept."""


class BoundSteps:
    """The steps of a program by their number of requests.

    `bind` adds the program to a step with so many requests: of a `BoundStep`, the `BoundRequests`, their number, and
    the inputs. It returns the outputs.
    """

    def __init__(self, bind: Bind) -> None:
        self._bind = bind
        self._seen: set[int] = set()
        self._steps: OrderedDict[tuple[int, int], _Bound | None] = OrderedDict()

    def run(self, requests: Sequence[Request], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Run a step; return its outputs, which the next step overwrites. None if it is not bound."""
        import torch

        count = len(requests)
        if not are_bound(count, ((request.new, request.last) for request in requests)):
            return None
        key = (count, torch.get_num_threads())
        if key not in self._steps:
            if count not in self._seen:
                self._seen.add(count)
                return None
            self.prepare(count, inputs)
            if len(self._steps) > _MOST_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        bound = self._steps[key]
        return None if bound is None else bound.run(requests, inputs)

    def prepare(self, count: int, inputs: Sequence[torch.Tensor]) -> None:
        """Bind the step of so many requests, with inputs of its shapes, if it can be."""
        import torch

        bound = None
        with torch.inference_mode(), suppress(CannotBind):
            bound = _Bound(self._bind, count, inputs)
        self._steps[count, torch.get_num_threads()] = bound


class _Bound:
    def __init__(self, bind: Bind, count: int, inputs: Sequence[torch.Tensor]) -> None:
        self._step = BoundStep()
        self._requests = BoundRequests(self._step, count)
        self._inputs = [self._step.input(x) for x in inputs]
        self._outputs = bind(self._step, self._requests, count, *self._inputs)

    def run(self, requests: Sequence[Request], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        if not self._requests.update(requests):
            return None
        for mine, x in zip(self._inputs, inputs, strict=True):
            mine.copy_(x)
        self._step.run()
        return self._outputs
