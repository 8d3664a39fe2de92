"""Training loop: steps, periodic checkpoints, and a termination on which all ranks agree."""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from distir_relax.bundle import Manifest
from distir_relax.checkpoints import Position, saved_steps
from distir_relax.errors import CheckpointError, DistIRError, RunError
from distir_relax.layout import typical_value
from distir_relax.runtime.arrays import as_torch
from distir_relax.runtime.training.batches import Data, data_inputs, training_of
from distir_relax.runtime.training.checkpointing import resume, save
from distir_relax.runtime.training.executor import Batch, Executor
from distir_relax.support.learning_rate import schedule_to_json

CHECKPOINT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals after whose step a run writes a checkpoint and ends. mpirun forwards SIGUSR1, and kills after SIGTERM."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run: total steps, and the folder of checkpoints, written each `every` steps.

    `resume` is "last" to resume from the newest checkpoint, which must exist and be complete, "auto" to resume from the
    newest complete one, or start if there is none, or empty. `seed` is that of the order of samples; None is 0, or
    that of the resumed run.
    """

    steps: int
    checkpoints: Path | None = None
    every: int = 100
    keep: int = 3
    resume: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class Done:
    """A finished step: its number, counted from 1, the loss before its update, the seconds since the previous one.

    `work` is the number of samples or tokens that it processed.
    """

    step: int
    loss: float
    seconds: float
    work: int


class Listener(Protocol):
    """Observer of a training run, called on the first process."""

    def begun(self, step: int, options: TrainOptions, per_step: int, unit: str) -> None:
        """Called when the run starts after `step`; a typical step processes `per_step` samples or tokens."""

    def done(self, done: Done) -> None:
        """Called after each step."""

    def saved(self, path: Path, step: int) -> None:
        """Called after a checkpoint was written."""


@dataclass
class Ended:
    """State in which a run ended: its last step, the loss on the first process, and why it ended early."""

    step: int
    loss: float = math.nan
    saved: int | None = None
    reason: str = ""
    """Empty if all steps were made, else ``interrupted``, ``terminated`` (by a signal) or ``the data has ended``."""
    signal: int = 0
    """The number of the signal that ended the run, if one did."""


@dataclass
class Training:
    """A run of an executor. `data(seed)` returns the batches, `stop()` the signal that this process received, or 0.

    Between two steps the ranks exchange errors, signals and the end of data, so that all take the same action.
    """

    executor: Executor
    data: Callable[[int], Data]
    options: TrainOptions
    listener: Listener
    stop: Callable[[], int] = lambda: 0
    ended: Ended = field(init=False)

    def run(self) -> Ended:
        """Run all steps. Raises errors of batches, steps and checkpoints, and RunError for a loss that is not finite.

        All processes of a launch raise the same error, except for errors of a rank's program.
        """
        training_of(self.executor.bundle.manifest)
        position = self._begin()
        source = self.data(position.seed)
        self.ended = Ended(position.step, saved=position.step or None)
        self._apply_signals(self.executor.exchange(self.stop()))
        if self.ended.reason:
            return self.ended
        batch = self._first(source, position.step)
        if self.executor.first:
            self.listener.begun(position.step, self.options, *per_step(self.executor.bundle.manifest))
        last, samples = time.perf_counter(), position.samples
        for step in range(position.step, self.options.steps):
            if batch is None:
                self.ended.reason = "the data has ended"
                break
            loss = self._step(batch)
            (work, _), samples = per_step(batch.call.manifest), samples + _rows(batch.call.manifest)[0]
            batch, error = self._next(source, step + 1)
            self._synchronize(step, loss, error)
            now = time.perf_counter()
            if self.executor.first:
                self.listener.done(Done(step + 1, loss, now - last, work))
            last = now
            if self.options.checkpoints is not None and (
                (step + 1) % self.options.every == 0
                or step + 1 == self.options.steps
                or self.ended.signal in CHECKPOINT_SIGNALS
            ):
                self._save(self.options.checkpoints, step + 1, samples, position.seed)
            if self.ended.reason:
                break
        return self.ended

    def _begin(self) -> Position:
        options, manifest = self.options, self.executor.bundle.manifest
        assert manifest.training is not None, "it was asked for"
        saved = None
        if options.resume and options.checkpoints is not None:
            saved = resume(self.executor, options.checkpoints, options.resume == "auto")
        if saved is not None:
            if options.seed not in (None, saved.position.seed):
                raise CheckpointError(
                    f"the run that is resumed has the seed {saved.position.seed}, found --seed {options.seed}",
                    str(saved.path), "omit --seed",
                )  # fmt: skip
            return saved.position
        with self.executor.agreed():
            if not options.resume and options.checkpoints is not None and (steps := saved_steps(options.checkpoints)):
                raise CheckpointError(
                    f"there are checkpoints here already, the last of step {steps[-1]}", str(options.checkpoints),
                    "go on from it with --resume, or --resume auto, or choose another folder",
                )  # fmt: skip
        return Position(0, 0, options.seed or 0, manifest.name)

    def _first(self, source: Data, step: int) -> Batch | None:
        """Return the first batch, which must be the same on all processes."""
        with self.executor.agreed():
            batch = source.batch(step) if step < self.options.steps else None
        mine = _digest(batch.global_arrays()) if batch is not None and source.streams else ""
        if len(set(self.executor.exchange(mine))) > 1:
            with self.executor.agreed():
                raise RunError(
                    "the ranks get different batches", "the data",
                    "seed the function's random numbers: every rank takes its rows of the same batch",
                )  # fmt: skip
        return batch

    def _next(self, source: Data, step: int) -> tuple[Batch | None, DistIRError | None]:
        try:
            return (source.batch(step) if step < self.options.steps else None), None
        except DistIRError as failure:
            return None, failure

    def _step(self, batch: Batch) -> float:
        loss = training_of(self.executor.bundle.manifest).loss
        outputs = self.executor.step(batch, (loss,))
        return float(outputs[loss]) if loss in outputs else math.nan

    def _synchronize(self, step: int, loss: float, error: DistIRError | None) -> None:
        """Exchange errors, signals and the end of data between two steps."""
        number = math.isfinite(loss) or not self.executor.first
        everyone = self.executor.exchange([number, self.stop(), error is not None])
        self.ended.step, self.ended.loss = step + 1, loss
        if not all(theirs[0] for theirs in everyone):
            shown = self.executor.exchange(str(loss))[0]
            with self.executor.agreed():
                raise RunError(
                    f"the loss of step {step + 1} is {shown}", self.executor.bundle.manifest.name, self._after_nan()
                )
        if any(theirs[2] for theirs in everyone):
            with self.executor.agreed():
                if error is not None:
                    raise error
        self._apply_signals([theirs[1] for theirs in everyone])

    def _apply_signals(self, signals: Sequence[int]) -> None:
        """End the run if any process received a signal."""
        self.ended.signal = next((number for number in signals if number), 0)
        if self.ended.signal:
            self.ended.reason = "terminated" if self.ended.signal in CHECKPOINT_SIGNALS else "interrupted"

    def _after_nan(self) -> str:
        hint = "give a lower learning rate, a warm-up, or clip_norm"
        return f"{hint}; the last checkpoint is of step {self.ended.saved}" if self.ended.saved else hint

    def _save(self, folder: Path, step: int, samples: int, seed: int) -> None:
        manifest = self.executor.bundle.manifest
        rates = {name: schedule_to_json(schedule) for name, schedule in training_of(manifest).rates.items()}
        path = save(self.executor, folder, Position(step, samples, seed, manifest.name, rates), self.options.keep)
        self.ended.saved = step
        if path is not None:
            self.listener.saved(path, step)


def per_step(manifest: Manifest) -> tuple[int, str]:
    """Return the typical work of a step and its unit: tokens if the first input is an integer matrix, else samples."""
    rows, tokens = _rows(manifest)
    return (tokens, "tokens") if tokens else (rows, "samples")


def _rows(manifest: Manifest) -> tuple[int, int]:
    """Return the typical number of samples of a step, and that of tokens; 0 if there are none."""
    inputs = data_inputs(manifest)
    if not inputs or not inputs[0].shape:
        return 1, 0
    shape = tuple(map(typical_value, inputs[0].shape))
    return shape[0], shape[0] * shape[1] if len(shape) == 2 and "int" in inputs[0].dtype else 0


def _digest(inputs: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        tensor = as_torch(value).contiguous()
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
