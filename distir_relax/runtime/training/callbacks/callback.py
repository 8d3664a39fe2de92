"""Protocol of callbacks: they observe a training run, and may end it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest
from distir_relax.checkpoints import START, DataPosition
from distir_relax.errors import RunError
from distir_relax.runtime.training.options import TrainOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RunInfo:
    """A run at its start: its options, its program, and the `step` after which it starts, 0 unless it resumes.

    A typical step processes `work` samples or tokens, as `unit` says. `evaluates` is whether the run has evaluations,
    whose metrics have the names `metrics`, if these are known before.
    """

    step: int
    options: TrainOptions
    manifest: Manifest
    work: int
    unit: str
    evaluates: bool = False
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """A finished step: its number, counted from 1, the loss before its update, and its seconds.

    These are from the end of the previous step, without its evaluation and checkpoint, with the loading of the batch.
    """

    step: int
    loss: float
    seconds: float
    work: int
    """Samples or tokens that the step processed."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of the step, by name: ``learning_rate``, ``learning_rate.1``, ..., and momenta with a schedule."""
    communication_seconds: float = 0.0
    """Seconds of the first rank in communication, waiting for others included."""
    peak_memory: int = 0
    """Largest memory in bytes that the first process has had: of its GPU if it has one, else resident memory."""
    data_seconds: float = 0.0
    """The part of `seconds` in which the first process loaded the batch, or waited for workers that do."""
    gradient_norm: float | None = None
    """Norm of all gradients before clipping; None if the step does not measure it."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """The losses of a step of several updates, by name; `loss` is the first."""


@dataclass
class Ended:
    """State in which a run ended: its last step, the loss on the first process, and why it ended early."""

    step: int
    loss: float = math.nan
    saved: int | None = None
    """Step of the last checkpoint."""
    best: int | None = None
    """Step of the best checkpoint, of a run that keeps it."""
    reason: str = ""
    """Empty if all steps were made, else ``interrupted``, ``terminated`` (by a signal), ``the data has ended``, or a
    callback's reason."""
    signal: int = 0
    """The number of the signal that ended the run, if one did."""
    evaluation_seconds: float = 0.0
    """Seconds of all evaluations."""
    checkpoint_seconds: float = 0.0
    """Seconds in which checkpoints were written."""
    steps: int = 0
    """Total number of steps of the run, those before a resume included."""
    data: DataPosition = START
    """Position in the data, after the batch of the last step."""


class Callback:
    """Observer of a training run, called on its first process. Its methods do nothing; override those of interest.

    An exception in a method ends the run on all ranks.
    """

    stop_reason = ""
    """Why the run is to end; empty while it is not."""
    weights_every = 0
    """Number of steps after which `weights` is called each time; 0 for never. All ranks gather them then."""
    changes_rates = False
    """Whether learning rates of steps are multiplied by `rate_factor`, which may change after each step."""
    rate_factor = 1.0

    def stop(self, reason: str) -> None:
        """End the run on all ranks after the current step, whose checkpoint is written. `reason` is for its report."""
        self.stop_reason = reason

    def begun(self, run: RunInfo) -> None:
        """Called when the run starts."""

    def done(self, result: StepResult) -> None:
        """Called after each step, also after one whose loss is not finite, which then ends the run with an error."""

    def weights(self, step: int, tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        """Called after each `weights_every` steps, with the weights and buffers that training changes.

        They are whole tensors by the model's names, on the CPU. Those that are returned replace the step's on all
        ranks.
        """

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation, with its metrics by name."""

    def saved(self, path: Path, step: int) -> None:
        """Called after a checkpoint was written."""

    def ended(self, ended: Ended) -> None:
        """Called when the run has ended without an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the callback for a resumed run: numbers, texts, lists and dicts by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called after `begun` of a resumed run, with the state in its checkpoint, if there is one."""

    def close(self) -> None:
        """Called last, also after an error and if the run has not begun: release files and connections."""


def call_with_weights(
    callbacks: Sequence[Callback], step: int, names: Mapping[str, str], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Call `weights` of the callbacks that are due after a step; return the weights that they replace.

    `names` maps the model's names to those of the `state`, whose names the result has. Raises RunError for a result
    that is not a weight, or has another shape.
    """
    present = {name: state[value] for name, value in names.items() if value in state}
    replaced: dict[str, torch.Tensor] = {}
    for callback in callbacks:
        if not callback.weights_every or step % callback.weights_every:
            continue
        for name, tensor in (callback.weights(step, {n: x.clone() for n, x in present.items()}) or {}).items():
            where = f"{type(callback).__name__}.weights"
            if name not in present:
                raise RunError(f"expected tensors by the names of weights, found {name!r}", where)
            if tensor.shape != present[name].shape:
                raise RunError(
                    f"expected {tuple(present[name].shape)} for {name!r}, found {tuple(tensor.shape)}", where
                )
            present[name] = replaced[names[name]] = tensor.detach().to("cpu", present[name].dtype, copy=True)
    return replaced
