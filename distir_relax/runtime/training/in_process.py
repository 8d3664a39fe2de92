"""Training loop for Python programs, with ranks as threads of this process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distir_relax.bundle import Bundle, read_bundle
from distir_relax.checkpoints import DataPosition
from distir_relax.errors import RunError
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import training_of
from distir_relax.runtime.training.callbacks import Callback, Ended, RunInfo, StepResult
from distir_relax.runtime.training.data_sources import open_data, open_evaluation
from distir_relax.runtime.training.epoch_order import arrange
from distir_relax.runtime.training.evaluation import evaluated_names
from distir_relax.runtime.training.executor import Executor
from distir_relax.runtime.training.options import TrainOptions
from distir_relax.runtime.training.train import evaluator
from distir_relax.runtime.training.training_loop import Training

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.training.batches import Data


class CompiledStep(Protocol):
    """The part of a `TrainingStep` that a training loop needs.

    `steps` is the number of steps so far, `data_position` a run's last step and its position in the data, if any. Its
    `callbacks` are called before those of a run.
    """

    steps: int
    data_position: tuple[int, DataPosition] | None
    callbacks: tuple[Callback, ...]

    @property
    def plan(self) -> Any:
        """The compiled program, whose `session(backend)` runs it."""
        ...

    def bundle(self, backends: Sequence[str]) -> Bundle:
        """Return its bundle, whose manifest describes the step."""
        ...

    def replace_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights that the program does not change; it is loaded again."""
        ...


def train(
    step: CompiledStep | str | Path,
    data: Any,
    *,
    steps: int = 0,
    epochs: int = 0,
    checkpoint: str | Path | None = None,
    every: int | str = 100,
    keep: int = 3,
    resume: str | Path = "",
    best: str = "",
    callbacks: Sequence[Callback] = (),
    seed: int | None = None,
    evaluation: Any = None,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
    evaluate_every: int | str = 100,
    averaged: bool = False,
    load_best: bool = False,
    limit_batches: float | None = None,
    limit_evaluation_batches: float | None = None,
    in_order: bool = False,
    grouped_by: str = "",
    verify_replicas: int = 0,
    backend: str = "torch",
    device: str = "cpu",
    require_signature: str | Path | None = None,
) -> Ended:
    """Train a `TrainingStep` or the bundle at a path, with ranks as threads of this process.

    `data` is an iterable of batches, each ``(inputs, targets)`` or a dict by input names, a
    `torch.utils.data.DataLoader`, a data set of single samples, or a function that returns one of them, with parameters
    `start` and `seed` if it likes (``docs/training.md``). A list, loader or data set is read again for each epoch.

    `steps` is the total number of steps of the weights: those before a resume, of earlier runs and of calls of the step
    included, with as many batches of the data, and with their samples if the batch size has changed. Instead, `epochs`
    is the total number of epochs of data that have a length. `every` and `evaluate_every` may be "epoch".
    Checkpoints are written to the folder `checkpoint` each `every` steps and at the end; the last `keep` stay, and with
    `best`, such as ``"loss"`` or ``"accuracy:max"``, the best one. `resume` is "last", "auto", "best", or the path of a
    checkpoint. A `TrainingStep` has the trained parameters afterwards, and its `steps` are those of the run.
    `callbacks` observe the run; nothing is shown without ``dr.callbacks.Progress()``.

    The run is evaluated after each `evaluate_every` steps and the last one, on `evaluation`, which is data like `data`,
    for a step compiled with `metrics`, with the averages of parameters if they are `averaged`; or by `evaluate`, a
    function of the number of steps done that returns metrics by name. `require_signature` is as for `dr.load`, of the
    bundle at a path.

    With `load_best` the step has the weights and the state of the `best` checkpoint at the end. An epoch has the first
    `limit_batches` batches of a `DataLoader` or a list, a number or, as a float, a part of all; an evaluation the first
    `limit_evaluation_batches`. A `DataLoader` is read `in_order`, or in batches of samples of similar lengths, which
    are those of the value `grouped_by` of each sample, such as ``"input_ids"``, or that value itself. Replicas of the
    state are compared each `verify_replicas` steps, if it is above 0, and before each checkpoint.

    Raises a `DistIRError` for options, data or a checkpoint that do not fit, a loss that is not finite, and a
    failed step. Exceptions of `data`, `callbacks` and `evaluate` are not caught.
    """
    folder = None if checkpoint is None else Path(checkpoint)
    resume = str(resume) if isinstance(resume, Path) else resume
    options = TrainOptions(
        steps, folder, every, keep, resume, seed, best, evaluate_every, load_best, epochs, verify_replicas
    )
    data = arrange(data, limit_batches, in_order, grouped_by)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise RunError(
                f"expected a dr.Callback, found {type(callback).__name__}", "callbacks",
                "derive its class from dr.Callback, and pass an object of it",
            )  # fmt: skip
    if isinstance(step, (str, Path)):
        bundle = read_bundle(Path(step), require_signature=require_signature)
        executor = Executor(Session(bundle, backend, device), lambda part: Session(part, backend, device))
        observers = tuple(callbacks)
    else:
        if require_signature is not None:
            raise RunError("expected the path of a signed bundle, found a TrainingStep", "require_signature")
        if device != "cpu":
            raise RunError(f"a TrainingStep runs on the CPU, found {device!r}", "device", "save it, and pass its path")

        def with_weights(tensors: Mapping[str, torch.Tensor]) -> Session:
            step.replace_weights(tensors)
            session: Session = step.plan.session(backend)
            return session

        load = lambda part: Session(part, backend)  # noqa: E731
        executor = Executor(step.plan.session(backend), load, step.bundle(()), with_weights)
        observers = (_StepCount(step), *step.callbacks, *callbacks)
    training_of(executor.bundle.manifest)
    names: tuple[str, ...] = ()
    if evaluation is not None:
        if evaluate is not None:
            raise RunError("expected evaluation data or a function that evaluates, found both", "evaluation, evaluate")
        limited = arrange(evaluation, limit_evaluation_batches)
        names = evaluated_names(executor.bundle, averaged)
        evaluate = evaluator(executor, lambda manifest: open_evaluation(limited, manifest), averaged)

    def opened(seed: int, start: DataPosition) -> Data:
        return open_data(data, executor.bundle.manifest, seed, start)

    known = None if isinstance(step, (str, Path)) else step.data_position
    start = known[1] if known is not None and known[0] == training_of(executor.bundle.manifest).done else None
    training = Training(executor, opened, options, observers, evaluate=evaluate, metrics=names, start=start)
    ended = training.run()
    if ended.step >= ended.steps and math.isnan(ended.loss):
        left = f"no step is left: {ended.step} of {ended.steps} are done; `steps` and `epochs` count all of them"
        warnings.warn(left, stacklevel=2)
    return ended


class _StepCount(Callback):
    """Keeps the number of steps of a `TrainingStep`, and the position of its data."""

    def __init__(self, step: CompiledStep) -> None:
        self._step = step
        self._loads_best = False

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._step.steps = run.step
        self._loads_best = run.options.load_best

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        self._step.steps = result.step

    def ended(self, ended: Ended) -> None:
        """See `Callback`."""
        self._step.data_position = ended.step, ended.data
        if self._loads_best and ended.best is not None:
            self._step.steps = ended.best
