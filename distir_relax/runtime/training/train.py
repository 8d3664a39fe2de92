"""Implementation of `distir train`, as one rank of a launch or with all ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distir_relax.bundle import Bundle, Manifest, read_bundle
from distir_relax.checkpoints import DataPosition
from distir_relax.runtime.launched import ending_launch, load_rank
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import Data, training_of
from distir_relax.runtime.training.callbacks import Callback, Ended
from distir_relax.runtime.training.evaluation import evaluate, evaluated_names
from distir_relax.runtime.training.executor import Batch, Executor, RankExecutor, ThreadExecutor
from distir_relax.runtime.training.options import TrainOptions
from distir_relax.runtime.training.training_loop import Training
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import World

DataOf = Callable[[Manifest, int, DataPosition], Data]
"""Constructor of a run's data, from the manifest, the seed of the order, and the position of the first batch."""
EvaluationOf = Callable[[Manifest], Callable[[], Iterable[Batch]]]
"""Constructor of the data of a run's evaluations, from the manifest of the evaluation."""


@dataclass(frozen=True)
class Run:
    """A training run: its bundle, data, options and callbacks.

    `data` is called once the bundle is read, and so is `evaluation`, with the manifest of the bundle's evaluation; it
    returns a function that yields the batches to evaluate, with averages of parameters if they are `averaged`. `stop`
    returns the signal that this process received, or 0. `require_signature` is as for `read_bundle`.
    """

    bundle: Path
    data: DataOf
    options: TrainOptions
    callbacks: Sequence[Callback] = ()
    evaluation: EvaluationOf | None = None
    backend: str = "torch"
    device: str = "cpu"
    timeout: float = DEFAULT_TIMEOUT
    stop: Callable[[], int] = lambda: 0
    averaged: bool = False
    require_signature: Path | None = None

    def of(self, executor: Executor) -> Training:
        """Return the training run of an executor."""
        data = lambda seed, start: self.data(executor.bundle.manifest, seed, start)  # noqa: E731
        evaluate = evaluator(executor, self.evaluation, self.averaged)
        names = () if evaluate is None else evaluated_names(executor.bundle, self.averaged)
        return Training(executor, data, self.options, self.callbacks, self.stop, evaluate, names)

    def check(self, bundle: Bundle) -> None:
        """Raise RunError for a bundle that is not a training step, or lacks an evaluation that the run needs."""
        training_of(bundle.manifest)
        if self.evaluation is not None:
            evaluated_names(bundle, self.averaged)


def evaluator(
    executor: Executor, data: EvaluationOf | None, averaged: bool = False
) -> Callable[[int], dict[str, float]] | None:
    """Return a function that evaluates the step of an executor on data, for `Training`; None without data.

    Raises RunError on all processes for data without a batch.
    """
    if data is None or executor.bundle.evaluation is None:
        return None
    with executor.agreed():
        batches = data(executor.bundle.evaluation.manifest)
    return lambda step: evaluate(executor, batches, averaged)


def train_threads(run: Run) -> Ended:
    """Train with ranks as threads of this process. Raises what `Training.run` raises."""
    bundle = read_bundle(run.bundle, require_signature=run.require_signature)
    run.check(bundle)

    def load(part: Bundle) -> Session:
        return Session(part, run.backend, run.device, run.timeout)

    return run.of(ThreadExecutor(load(bundle), load)).run()


def train_rank(world: World, run: Run) -> Ended:
    """Train as one rank of a launch.

    Raises what `Training.run` raises if all ranks raise it. An error of one rank alone is printed and ends the
    launch: with code 2 for the user's errors, 1 with a traceback for others.
    """

    def check(bundle: Bundle) -> dict[str, Any]:
        run.check(bundle)
        return {}  # inputs come with each step

    with ending_launch(world):
        session, _ = load_rank(
            world, run.bundle, run.backend, run.device, check, require_signature=run.require_signature
        )
        executor = RankExecutor(
            world, session, lambda part: RankSession(world, part, run.backend, run.device, verified=True)
        )
        return run.of(executor).run()
