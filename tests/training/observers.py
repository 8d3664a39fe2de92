"""Callbacks named on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import distir_relax as dr

LIMIT = 0.25
"""The largest weight that `Clamp` leaves."""


class Stop(dr.Callback):
    """Asks for the end of the run after step 4."""

    def done(self, result: dr.callbacks.StepResult) -> None:
        """See `Callback`."""
        if result.step == 4:
            self.stop("step 4 is enough")


class Failing(dr.Callback):
    """Raises an error after step 3."""

    def done(self, result: dr.callbacks.StepResult) -> None:
        """See `Callback`."""
        if result.step == 3:
            raise LookupError("there is no such column")


class Calls(dr.Callback):
    """Keeps the names of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.results: list[dr.callbacks.StepResult] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def begun(self, run: dr.callbacks.RunInfo) -> None:
        """See `Callback`."""
        self.calls.append(f"begun {run.step}")

    def done(self, result: dr.callbacks.StepResult) -> None:
        """See `Callback`."""
        self.calls.append(f"done {result.step}")
        self.results.append(result)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        self.calls.append(f"evaluated {step} {dict(metrics)}")
        self.metrics[step] = dict(metrics)

    def saved(self, path: Path, step: int) -> None:
        """See `Callback`."""
        self.calls.append(f"saved {path.name} {step}")

    def ended(self, ended: dr.callbacks.Ended) -> None:
        """See `Callback`."""
        self.calls.append(f"ended {ended.step} {ended.reason}".strip())

    def close(self) -> None:
        """See `Callback`."""
        self.calls.append("close")


class Clamp(dr.Callback):
    """Clamps a weight after each second step, and keeps the losses."""

    weights_every = 2

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []

    def done(self, result: dr.callbacks.StepResult) -> None:
        """See `Callback`."""
        self.losses.append(result.loss)

    def weights(self, step: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Callback`."""
        assert set(tensors) == {"up.weight", "up.bias", "down.weight", "down.bias"}
        self.steps.append(step)
        return {"up.weight": tensors["up.weight"].clamp_(-LIMIT, LIMIT)}


def clamp() -> Clamp:
    """A callback that clamps."""
    return Clamp()


class Counter(dr.Callback):
    """Asks for the end of the run after five steps, whatever number of runs makes them."""

    def begun(self, run: dr.callbacks.RunInfo) -> None:
        """See `Callback`."""
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback`."""
        self.seen = state["seen"]

    def done(self, result: dr.callbacks.StepResult) -> None:
        """See `Callback`."""
        self.seen += 1
        if self.seen == 5:
            self.stop("five steps were seen")


def counting() -> list[dr.Callback]:
    """Callbacks with a state, and without."""
    return [Stop(), Counter()]


def stopping() -> Stop:
    """One callback."""
    return Stop()


def failing() -> list[dr.Callback]:
    """Several callbacks."""
    return [Calls(), Failing()]


def nothing() -> None:
    """No callback."""
