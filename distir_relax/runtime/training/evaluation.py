"""Evaluation of a training run: loss and metrics of batches, with the weights that the step has at present."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from distir_relax.bundle import AVERAGED
from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.training.batches import samples_of, training_of
from distir_relax.runtime.training.equal_batches import difference

if TYPE_CHECKING:
    from distir_relax.bundle import Bundle
    from distir_relax.runtime.training.executor import Batch, Executor


def evaluate(executor: Executor, batches: Callable[[], Iterable[Batch]], averaged: bool = False) -> dict[str, float]:
    """Return the outputs of the bundle's evaluation over all batches; not on other processes than the first.

    Those that are not of all batches by themselves are means, in which batches weigh by their samples. All processes
    call this with equal numbers of batches. With `averaged`, parameters are the averages that the step keeps. Raises
    RunError as `evaluated_names`, for no batches, and for batches that differ between processes; an error of one
    process's batches is raised by all.
    """
    names = evaluated_names(executor.bundle, averaged)
    last = training_of(executor.bundle.manifest).accumulated
    executor.begin_evaluation(AVERAGED if averaged else "")
    totals, count, batches_read = dict.fromkeys(names, 0.0), 0, 0
    source = iter(batches())
    while True:
        error: DistIRError | None = None
        batch: Batch | None = None
        sums: dict[str, int] = {}
        try:
            batch = next(source, None)
            sums = executor.checksums(batch)
        except DistIRError as failure:
            error = failure
        everyone = executor.exchange([error is not None, batch is None, sums])
        if any(failed for failed, *_ in everyone):
            with executor.agreed():
                if error is not None:
                    raise error
        if wrong := difference([theirs[2] for theirs in everyone], f"batch {batches_read + 1} of the evaluation"):
            with executor.agreed():
                raise wrong
        if batch is None or any(ended for _, ended, _ in everyone):
            break
        batches_read += 1
        outputs = executor.evaluate(batch, names)
        rows = samples_of(batch.call.manifest)
        count += rows
        for name, value in outputs.items():
            totals[name] = float(value) if name in last else totals[name] + rows * float(value)
    if not count:
        with executor.agreed():
            raise RunError("expected batches to evaluate, found none", "the evaluation data")
    results = {name: total if name in last else total / count for name, total in totals.items()}
    return results if executor.first else {}


def evaluated_names(bundle: Bundle, averaged: bool = False) -> tuple[str, ...]:
    """Return the outputs of a training step's evaluation.

    Raises RunError for a bundle without one, and for one without averages of parameters if those are `averaged`.
    """
    training = bundle.manifest.training
    if training is None or not training.evaluated:
        raise RunError(
            "the bundle has no evaluation", bundle.manifest.name,
            "compile the step with metrics={...}, which may be empty: then the loss is evaluated",
        )  # fmt: skip
    if averaged and not any(name.endswith(AVERAGED) for name in bundle.manifest.updates):
        raise RunError(
            "the step keeps no averages of parameters",
            bundle.manifest.name,
            "compile it with averaging=dr.optim.EMA(0.999)",
        )
    return tuple(training.evaluated)
