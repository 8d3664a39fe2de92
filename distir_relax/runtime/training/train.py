"""Implementation of `distir train`, as one rank of a launch or with all ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distir_relax.bundle import Bundle, BundleFile, Manifest
from distir_relax.checkpoints import DataPosition
from distir_relax.runtime.launched import RankOptions, ending_launch, open_session
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import Data, training_of
from distir_relax.runtime.training.callbacks import Callback, Ended
from distir_relax.runtime.training.evaluation import evaluate, evaluated_names
from distir_relax.runtime.training.executor import Batch, Executor
from distir_relax.runtime.training.options import TrainOptions
from distir_relax.runtime.training.training_loop import Training
from distir_relax.runtime.world import ALONE, World

DataOf = Callable[[Manifest, int, DataPosition], Data]
"""Constructor of a run's data, from the manifest, the seed of the order, and the position of the first batch."""
EvaluationOf = Callable[[Manifest], Callable[[], Iterable[Batch]]]
"""Constructor of the data of a run's evaluations, from the manifest of the evaluation."""


@dataclass(frozen=True)
class Run:
    """A training run: its bundle, data, options and callbacks.

    `data` is called once the bundle is read, and so is `evaluation`, with the manifest of the bundle's evaluation; it
    returns a function that yields the batches to evaluate, with averages of parameters if they are `averaged`. `stop`
    returns the signal that this process received, or 0.
    """

    bundle: BundleFile
    data: DataOf
    options: TrainOptions
    callbacks: Sequence[Callback] = ()
    evaluation: EvaluationOf | None = None
    ranks: RankOptions = field(default_factory=RankOptions)
    stop: Callable[[], int] = lambda: 0
    averaged: bool = False

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


def train(run: Run, world: World = ALONE) -> Ended:
    """Train as one rank of a launch, or alone.

    Raises what `Training.run` raises if all ranks raise it. An error of one rank alone is printed and ends the
    launch: with code 2 for the user's errors, 1 with a traceback for others.
    """

    def check(bundle: Bundle) -> dict[str, Any]:
        run.check(bundle)
        return {}  # inputs come with each step

    ranks = run.ranks
    with ending_launch(world):
        session, _ = open_session(world, run.bundle, ranks, check)
        return run.of(
            Executor(
                session,
                lambda part: Session(part, ranks.backend, ranks.device, ranks.timeout, world=world, verified=True),
            )
        ).run()
