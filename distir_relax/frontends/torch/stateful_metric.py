"""Metrics as objects with `update` and `compute`, such as those of torchmetrics: their state becomes buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distir_relax.errors import ImportModelError


def is_stateful(metric: Any) -> bool:
    """Return whether a metric is an object with the methods of a `torchmetrics.Metric`."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class StatefulMetric(torch.nn.Module):
    """A call updates the state, in buffers, by a batch's ``(output, targets)``, and returns the metric of all so far.

    The states of `metric` are its `metric_state` (torchmetrics), or its buffers. Raises `ImportModelError` for a state
    that is not of tensors alone.
    """

    def __init__(self, name: str, metric: Any) -> None:
        super().__init__()
        own = copy.deepcopy(metric)
        own.reset()
        # Checks of the values of labels are control flow, which a program does not have.
        if hasattr(own, "validate_args"):
            own.validate_args = False
        states = getattr(own, "metric_state", None)
        if states is None and isinstance(own, torch.nn.Module):
            states = dict(own.named_buffers(recurse=False))
        if not states:
            raise ImportModelError(
                f"expected a metric with states, found none in {type(metric).__name__}", f"metrics[{name!r}]",
                "keep its totals in buffers, or return a pair (sum, count) from a function",
            )  # fmt: skip
        for key, value in states.items():
            if not isinstance(value, torch.Tensor):
                raise ImportModelError(
                    f"expected tensors as the state of {type(metric).__name__}, found a list for {key!r}, which grows",
                    f"metrics[{name!r}]", "give it a fixed size: thresholds=, for curves of torchmetrics",
                )  # fmt: skip
            self.register_buffer(key, value.detach().clone())
        # Not as a child module: the buffers here are its state.
        self._own = (own,)

    def forward(self, *batch: Any) -> Any:
        """See the class."""
        (own,) = self._own
        states = dict(self.named_buffers(recurse=False))
        for key, value in states.items():
            setattr(own, key, value.clone())
        with _static_sizes():
            # The methods of the class: those of an object of torchmetrics also synchronize processes and keep results.
            type(own).update(own, *batch)
            for key, value in states.items():
                value.copy_(getattr(own, key))
            return type(own).compute(own)


@contextmanager
def _static_sizes() -> Iterator[None]:
    """Inside the context `torch.bincount`, by which torchmetrics counts, has the size `minlength`, not one by data."""
    original = torch.bincount
    torch.bincount = _count  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.bincount = original


def _count(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Return how often each number below `minlength` occurs, by `torch.bincount`'s arguments."""
    found = x.reshape(-1, 1) == torch.arange(minlength, device=x.device)
    return found.sum(0) if weights is None else (found * weights.reshape(-1, 1)).sum(0)
