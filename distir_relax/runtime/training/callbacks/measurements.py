"""Measurements of a step by name, as all logs have them."""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.runtime.training.callbacks.callback import StepResult

EVALUATION = "evaluation/"
"""The prefix of the names of metrics."""


def step_measurements(result: StepResult, unit: str) -> dict[str, float]:
    """Return the loss, and each of several, the seconds, the work (as `unit`), the learning rates, and the rest."""
    norm = {} if result.gradient_norm is None else {"gradient_norm": result.gradient_norm}
    return {
        "loss": result.loss,
        **{f"loss/{name}": value for name, value in result.losses.items()},
        **norm,
        "seconds": result.seconds,
        unit: result.work,
        **result.rates,
        "communication_seconds": result.communication_seconds,
        "data_seconds": result.data_seconds,
        "peak_memory": result.peak_memory,
    }


def evaluation_measurements(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of an evaluation by names that differ from those of steps: ``evaluation/loss``."""
    return {f"{EVALUATION}{name}": value for name, value in metrics.items()}
