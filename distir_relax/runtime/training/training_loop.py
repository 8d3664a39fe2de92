"""Training loop: steps, periodic checkpoints, and a termination on which all ranks agree."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from distir_relax.bundle import Manifest
from distir_relax.checkpoints import DataPosition, Position, best, saved_steps
from distir_relax.errors import CheckpointError, DistIRError, RunError
from distir_relax.layout import typical_value
from distir_relax.runtime.handshake import Agreed
from distir_relax.runtime.training.batches import Data, data_inputs, samples_of, training_of
from distir_relax.runtime.training.best_value import BestValue
from distir_relax.runtime.training.callbacks.callback import Callback, Ended, RunInfo, StepResult, call_with_weights
from distir_relax.runtime.training.callbacks.states import load_states, states_of
from distir_relax.runtime.training.checkpointing import check_visible, resume, save
from distir_relax.runtime.training.equal_batches import difference
from distir_relax.runtime.training.executor import Batch, Executor
from distir_relax.runtime.training.options import EPOCH, RESUME, Metric, TrainOptions
from distir_relax.support.learning_rate import describe_schedule

CHECKPOINT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals after whose step a run writes a checkpoint and ends. mpirun forwards SIGUSR1, and kills after SIGTERM."""


@dataclass
class Training:
    """A run of an executor. `data(seed, start)` returns the batches from a position on.

    It begins at `start`, unless it resumes: by default with the batch of the program's next step. `stop()` returns the
    signal that this process received, or 0.

    `evaluate` returns the metrics after a step, by name; all processes call it, each `options.evaluate_every` steps and
    after the last one. The metrics of the first process count; `metrics` are their names, if they are known before.

    Between two steps the ranks exchange errors, signals, the end of data, and requests of callbacks to end the run, so
    that all take the same action.
    """

    executor: Executor
    data: Callable[[int, DataPosition], Data]
    options: TrainOptions
    callbacks: Sequence[Callback] = ()
    stop: Callable[[], int] = lambda: 0
    evaluate: Callable[[int], Mapping[str, float]] | None = None
    metrics: tuple[str, ...] = ()
    start: DataPosition | None = None
    ended: Ended = field(init=False)
    _reached: Position = field(init=False)
    """The position after the last step, also without a checkpoint of it."""
    _best: BestValue | None = field(init=False, default=None)
    _weights_every: int = field(init=False, default=0)
    _changes_rates: bool = field(init=False, default=False)
    _rate_factor: float = field(init=False, default=1.0)
    _resumed: int | None = field(init=False, default=None)
    _ends_epoch: bool = field(init=False, default=False)
    _verified: int = field(init=False, default=0)
    """The step after which the replicas were compared last."""

    def run(self) -> Ended:
        """Run all steps. Raises errors of batches, steps, checkpoints and callbacks, and RunError for a loss that is
        not finite.

        All processes of a launch raise the same error, except for errors of a rank's program.
        """
        try:
            return self._run()
        finally:
            if self.executor.first:
                for callback in self.callbacks:
                    callback.close()

    def _run(self) -> Ended:
        training_of(self.executor.bundle.manifest)
        position = self._begin()
        if self.options.checkpoints is not None:
            check_visible(self.executor, self.options.checkpoints)
        source = self.data(position.seed, position.data)
        self._check_order(position, source)
        self._set_steps(source, position.step)
        self.ended = Ended(position.step, saved=self._resumed, data=position.data, steps=self.options.steps)
        self._read_best(position.step)
        self._apply_signals(self.executor.exchange(self.stop()))
        if self.ended.reason:
            return self.ended
        begun = time.perf_counter()
        batch = self._first(source, position.step)
        waited = time.perf_counter() - begun
        self._start(position)
        last, samples = time.perf_counter() - waited, position.samples
        for step in range(position.step, self.options.steps):
            if batch is None:
                self.ended.reason = "the data has ended"
                break
            losses, norm = self._step(batch if self._rate_factor == 1.0 else batch.with_rates(self._rate_factor))
            (work, _), samples = per_step(batch.call.manifest), samples + samples_of(batch.call.manifest)
            self.ended.data = source.position
            self._reached = replace(position, step=step + 1, samples=samples, data=source.position)
            now = time.perf_counter()
            error = self._done(step, losses, norm, now - last, work, waited)
            last = now
            begun = time.perf_counter()
            batch, sums, data_error = self._next(source, step + 1)
            self._ends_epoch = batch is None or source.position.epoch != self.ended.data.epoch
            is_within = not self._ends_epoch or (batch is None and bool(source.left((self.ended.data.epoch or 0) + 1)))
            self._reached = replace(self._reached, order=source.order if is_within else {})
            waited = time.perf_counter() - begun
            self._synchronize(step, losses, error or data_error, sums, batch is None)
            self._call_with_weights(step + 1)
            if self.options.verify_replicas and (step + 1) % self.options.verify_replicas == 0:
                self._verify_replicas(step + 1)
            paused = time.perf_counter()
            improves = self._evaluate(step + 1)
            evaluated = time.perf_counter()
            self._share_rates()
            if self.options.checkpoints is not None and (improves or self._is_saved(step + 1)):
                self._save(self.options.checkpoints, self._reached, improves)
            saved = time.perf_counter()
            self.ended.evaluation_seconds += evaluated - paused
            self.ended.checkpoint_seconds += saved - evaluated
            last += saved - paused
            if self.ended.reason:
                break
        if self.options.load_best and self.options.checkpoints is not None and self.ended.best is not None:
            resume(self.executor, self.options.checkpoints, "best")
        self._notify(lambda callback: callback.ended(self.ended))
        return self.ended

    def _set_steps(self, source: Data, done: int) -> None:
        """Set the total number of steps of a run of epochs. Raises RunError for data whose epochs are not known."""
        if not self.options.epochs:
            return
        with self.executor.agreed():
            left = source.left(self.options.epochs)
            if left is None:
                raise RunError(
                    "expected data with a number of batches in an epoch, found none", "the data",
                    "give a list, a DataLoader or a data set, which have a length, or the number of steps",
                )  # fmt: skip
            if not done + left:
                raise RunError("expected batches, found none", "the data")
            self.options = replace(self.options, steps=done + left, epochs=0)

    def _begin(self) -> Position:
        options, manifest = self.options, self.executor.bundle.manifest
        saved = None
        if options.resume not in RESUME and options.resume:
            source = Path(options.resume)
            self._check_unused(options.checkpoints, source)
            saved = resume(self.executor, source)
        elif options.resume and options.checkpoints is not None:
            saved = resume(self.executor, options.checkpoints, options.resume)
        if saved is not None:
            self._resumed = saved.position.step
            if options.seed not in (None, saved.position.seed):
                raise CheckpointError(
                    f"the run that is resumed has the seed {saved.position.seed}, found --seed {options.seed}",
                    str(saved.path), "omit --seed",
                )  # fmt: skip
            return saved.position
        if not options.resume:
            self._check_unused(options.checkpoints)
        done = training_of(manifest).done
        return Position(done, 0, options.seed or 0, manifest.name, data=self.start or DataPosition(done))

    def _check_unused(self, folder: Path | None, source: Path | None = None) -> None:
        """Raise CheckpointError for a folder with checkpoints of a run other than that of a checkpoint `source`."""
        with self.executor.agreed():
            if folder is None or (
                source is not None and folder.resolve() in (source.resolve(), source.resolve().parent)
            ):
                return
            if steps := saved_steps(folder):
                raise CheckpointError(
                    f"there are checkpoints here already, the last of step {steps[-1]}", str(folder),
                    "go on from it with --resume, or --resume auto, or choose another folder",
                )  # fmt: skip

    def _check_order(self, position: Position, source: Data) -> None:
        """Raise CheckpointError for data of another order than those of a checkpoint, which has it within an epoch."""
        differs = [name for name, text in position.order.items() if source.order.get(name, text) != text]
        with self.executor.agreed():
            if differs:
                before, now = (
                    ", ".join(f"{n} {order[n]}" for n in differs) for order in (position.order, source.order)
                )
                raise CheckpointError(
                    f"expected the data of the epoch in which the checkpoint was written ({before}), found others "
                    f"({now}), of which samples would be read twice or never", "the data",
                    "resume with the same data to the end of the epoch, or begin a new run with the weights of the "
                    "checkpoint: step.load_parameters(FOLDER)",
                )  # fmt: skip

    def _read_best(self, step: int) -> None:
        """Begin with the best checkpoint of the run that is resumed after `step`, if it keeps one."""
        if not self.options.best or self.options.checkpoints is None:
            return
        with self.executor.agreed():
            metric, value = Metric.parse(self.options.best), None
            metric.check(self.metrics, "--best")
            if self.options.resume and (saved := best(self.options.checkpoints)) and saved.position.step <= step:
                self.ended.best, value = saved.position.step, saved.position.metrics.get(metric.name)
            self._best = BestValue(metric, self.evaluate is not None, value)

    def _start(self, position: Position) -> None:
        """Call `begun` of the callbacks, and give them their states of the checkpoint."""
        work, unit = per_step(self.executor.bundle.manifest)
        evaluates = self.evaluate is not None
        run = RunInfo(position.step, self.options, self.executor.bundle.manifest, work, unit, evaluates, self.metrics)
        for callback in self.callbacks:
            callback.stop_reason = ""
        self._notify(lambda callback: callback.begun(run))
        with self.executor.agreed():
            if self.executor.first:
                load_states(self.callbacks, position.callbacks)
        every = math.gcd(*(callback.weights_every for callback in self.callbacks))
        changes = any(callback.changes_rates for callback in self.callbacks)
        self._weights_every = self.executor.exchange(every)[0]
        self._changes_rates = self.executor.exchange(changes)[0]
        self._share_rates()

    def _share_rates(self) -> None:
        """Give all processes the factor of the learning rates that callbacks of the first one have chosen."""
        if self._changes_rates:
            factor = math.prod(callback.rate_factor for callback in self.callbacks if callback.changes_rates)
            self._rate_factor = self.executor.exchange(factor)[0]

    def _first(self, source: Data, step: int) -> Batch | None:
        """Return the first batch."""
        with self.executor.agreed():
            batch = source.batch(step) if step < self.options.steps else None
            sums = self.executor.checksums(batch)
            if source.position.epoch is None and EPOCH in (self.options.every, self.options.evaluate_every):
                raise RunError(
                    "expected data of epochs, found a function of the number of the first batch", "the data",
                    "give the number of steps for every and evaluate_every",
                )  # fmt: skip
        everyone = self.executor.exchange([sums, batch is None])
        ends = [theirs[1] for theirs in everyone]
        self._check_batches([theirs[0] for theirs in everyone], ends, step)
        if all(ends) and step == 0:
            with self.executor.agreed():
                raise RunError(
                    "expected batches, found none", "the data",
                    "it is empty, or an iterator that was read before: return a new one from a function",
                )  # fmt: skip
        return batch

    def _next(self, source: Data, step: int) -> tuple[Batch | None, dict[str, int], DistIRError | None]:
        try:
            batch = source.batch(step) if step < self.options.steps else None
            return batch, self.executor.checksums(batch), None
        except DistIRError as failure:
            return None, {}, failure

    def _step(self, batch: Batch) -> tuple[dict[str, float], float | None]:
        """Return the losses by name, the first one first, and the gradient norm, if the step measures it.

        They are not numbers on other processes than the first.
        """
        training = training_of(self.executor.bundle.manifest)
        measured = () if training.gradient_norm is None else (training.gradient_norm,)
        names = dict.fromkeys((training.loss, *training.losses))
        outputs = self.executor.step(batch, (*names, *measured))
        norms = [float(outputs.get(name, math.nan)) for name in measured]
        return {name: float(outputs.get(name, math.nan)) for name in names}, next(iter(norms), None)

    def _done(
        self, step: int, losses: Mapping[str, float], norm: float | None, seconds: float, work: int, waited: float
    ) -> DistIRError | None:
        """Call `done` of the callbacks; return the error of one, which `_synchronize` reports."""
        if not self.executor.first:
            return None
        rates = learning_rates(self.executor.bundle.manifest, step)
        rates = {name: rate * self._rate_factor for name, rate in rates.items()}
        communication, memory = self.executor.communication_seconds, self.executor.peak_memory
        loss, others = next(iter(losses.values())), losses if len(losses) > 1 else {}
        result = StepResult(step + 1, loss, seconds, work, rates, communication, memory, waited, norm, others)
        if self._best is not None:
            self._best.add_loss(loss)
        try:
            for callback in self.callbacks:
                callback.done(result)
        except DistIRError as failure:
            return failure
        return None

    def _synchronize(
        self, step: int, losses: Mapping[str, float], error: DistIRError | None, sums: Mapping[str, int], ends: bool
    ) -> None:
        """Exchange errors, signals, checksums of the next batch, its absence, and requests of callbacks."""
        # The one to report, if any is not finite.
        loss = next((value for value in losses.values() if not math.isfinite(value)), next(iter(losses.values())))
        number = math.isfinite(loss) or not self.executor.first
        everyone = self.executor.exchange([number, self.stop(), error is not None, self._stop_reason, sums, ends])
        self.ended.step, self.ended.loss = step + 1, loss
        if not all(theirs[0] for theirs in everyone):
            shown = self.executor.exchange(str(loss))[0]
            with self.executor.agreed():
                raise RunError(
                    f"the loss of step {step + 1} is {shown}", self.executor.bundle.manifest.name, self._after_nan()
                )
        if any(theirs[2] for theirs in everyone):
            with self._saving(), self.executor.agreed():
                if error is not None:
                    raise error
        self._check_batches([theirs[4] for theirs in everyone], [theirs[5] for theirs in everyone], step + 1)
        self.ended.reason = everyone[0][3]
        self._apply_signals([theirs[1] for theirs in everyone])

    def _call_with_weights(self, step: int) -> None:
        """Gather the weights for the callbacks that ask for them after a step, and replace those that they return."""
        if not self._weights_every or step % self._weights_every:
            return
        state, replaced = self.executor.state(), {}
        names = training_of(self.executor.bundle.manifest).names
        with self._saving(), self.executor.agreed():
            if self.executor.first:
                replaced = call_with_weights(self.callbacks, step, names, state)
        self.executor.replace_state(replaced)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Write a checkpoint of the steps done before an error of the data or of a callback ends the run.

        All processes raise the error.
        """
        try:
            yield
        except (DistIRError, Agreed):
            if self.options.checkpoints is not None and self.ended.saved != self._reached.step:
                with suppress(DistIRError, Agreed):
                    self._save(self.options.checkpoints, self._reached, improves=False)
            raise

    def _check_batches(self, sums: Sequence[Mapping[str, int]], ends: Sequence[bool], steps: int) -> None:
        """Raise RunError if the batch after `steps` steps is not the same on all processes, or is not on all."""
        if error := difference(sums, f"step {steps + 1}"):
            with self.executor.agreed():
                raise error
        if len(set(ends)) > 1:
            ended = [str(rank) for rank, ends_here in enumerate(ends) if ends_here]
            with self.executor.agreed():
                raise RunError(
                    f"after {steps} steps the data have ended on rank {', '.join(ended)}, but not on all", "the data",
                    "every rank takes its rows of the same batches: give all of them as many",
                )  # fmt: skip

    def _evaluate(self, step: int) -> bool:
        """Evaluate after a step, if one is due; return whether the metric of the best checkpoint has improved."""
        if self.evaluate is None or not (self._is_due(self.options.evaluate_every, step) or step == self.options.steps):
            return False
        metrics = self.executor.exchange(dict(self.evaluate(step)))[0]
        with self._saving():
            self._notify(lambda callback: callback.evaluated(step, metrics))
        self.ended.reason = self.ended.reason or self.executor.exchange(self._stop_reason)[0]
        if self._best is None:
            return False
        with self.executor.agreed():
            return self._best.add(metrics)

    @property
    def _stop_reason(self) -> str:
        """Return the reason for which a callback wants the run to end, on the first process."""
        reasons = (callback.stop_reason for callback in self.callbacks) if self.executor.first else ()
        return next(filter(None, reasons), "")

    def _notify(self, call: Callable[[Callback], None]) -> None:
        """Call a method of the callbacks on the first process; an error is raised on all of them."""
        with self.executor.agreed():
            for callback in self.callbacks if self.executor.first else ():
                call(callback)

    def _is_saved(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step: each `every`, the last one, and one that ends the run."""
        ends = self.ended.reason != "" and self.ended.signal in (0, *CHECKPOINT_SIGNALS)
        return self._is_due(self.options.every, step) or step == self.options.steps or ends

    def _is_due(self, every: int | str, step: int) -> bool:
        """Return whether a step is the last one of an interval, of steps or of an epoch."""
        return self._ends_epoch if isinstance(every, str) else step % every == 0

    def _apply_signals(self, signals: Sequence[int]) -> None:
        """End the run if any process received a signal."""
        self.ended.signal = next((number for number in signals if number), 0)
        if self.ended.signal:
            self.ended.reason = "terminated" if self.ended.signal in CHECKPOINT_SIGNALS else "interrupted"

    def _after_nan(self) -> str:
        hint = "give a lower learning rate, a warm-up, or clip_norm"
        return f"{hint}; the last checkpoint is of step {self.ended.saved}" if self.ended.saved else hint

    def _verify_replicas(self, step: int) -> None:
        """Raise LostError on all processes if replicas of the state differ after a step."""
        if self._verified == step:
            return
        saved = self.ended.saved
        hint = f"go on from the checkpoint of step {saved} with --resume last" if saved else ""
        if error := self.executor.difference_of_replicas(step, hint):
            with self.executor.agreed():
                raise error
        self._verified = step

    def _save(self, folder: Path, position: Position, improves: bool) -> None:
        if self.options.verify_replicas:
            self._verify_replicas(position.step)
        manifest = self.executor.bundle.manifest
        training = training_of(manifest)
        rates = {name: describe_schedule(schedule) for name, schedule in training.rates.items()}
        metrics: dict[str, float] = {}
        if self._best is not None:
            if self.evaluate is None:
                improves = bool(self.executor.exchange(self._best.add_mean_loss())[0])
            metrics = self._best.metrics
        with self.executor.agreed():
            states = states_of(self.callbacks) if self.executor.first else []
        position = replace(
            position, program=manifest.name, rates=rates, metrics=metrics, callbacks=states,
            settings=training.settings,
        )  # fmt: skip
        path = save(self.executor, folder, position, self.options.keep, improves)
        self.ended.saved = position.step
        self.ended.best = position.step if improves else self.ended.best
        self._notify(lambda callback: callback.saved(Path(path or ""), position.step))


def per_step(manifest: Manifest) -> tuple[int, str]:
    """Return the typical work of a step and its unit: tokens if the first input is an integer matrix, else samples."""
    inputs = data_inputs(manifest)
    shape = tuple(map(typical_value, inputs[0].shape)) if inputs else ()
    if len(shape) == 2 and "int" in inputs[0].dtype:
        return shape[0] * shape[1], "tokens"
    return samples_of(manifest), "samples"


def learning_rates(manifest: Manifest, step: int) -> dict[str, float]:
    """Return the learning rates of a step, counted from 0, by the names of their inputs."""
    training = training_of(manifest)
    return {name: schedule(step) for name, schedule in training.rates.items()}
