"""The profile of the paper's machine against what was measured on it: MLP 1B, imported from torch.

`mlp_1b_dgx2.csv` has the training throughput that the DistIR paper's authors measured (medians of 10 steps), read off
their plots: pure data, tensor and pipeline parallelism, batches from 128 to 262,144. `reading_error` is in samples per
second.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest

from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman
from distir_relax.compiler.inputs import Training, call_target
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import load_profile
from distir_relax.strategies.strategy import Strategy

MODEL = Path(__file__).parents[2] / "benchmarks" / "paper" / "models.py"
MEASURED = Path(__file__).with_name("mlp_1b_dgx2.csv")


@cache
def source(batch: int) -> Source:
    """The model with a batch, read in once for all strategies."""
    training, _ = call_target(f"{MODEL}:mlp_1b", {"global_batch": batch})
    assert isinstance(training, Training)
    return training.read(CompileOptions(profile=load_profile("dgx2-v100")))


@cache
def rates(kind: str = "") -> dict[tuple[str, int], tuple[float, float]]:
    """Samples a second, predicted and measured, by strategy and batch, of all strategies or of one."""
    found = {}
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            strategy = "/".join(row[key] for key in ("data", "tensor", "pipeline", "microbatches"))
            if not strategy.startswith(kind):
                continue
            batch = int(row["global_batch"])
            simulated = source(batch).with_strategy(Strategy.parse(strategy)).simulate(load_profile("dgx2-v100"))
            found[strategy, batch] = (batch / simulated.makespan, float(row["samples_per_second"]))
    return found


def error(strategy: str = "") -> float:
    """The mean of relative errors, of all strategies or of one."""
    return mean_absolute_percentage_error(*zip(*rates(strategy).values(), strict=True))


@pytest.mark.sweep
def test_all_of_it() -> None:
    assert len(rates()) == 33
    assert error() < 0.03
    assert max(abs(ours / real - 1) for ours, real in rates().values()) < 0.1
    assert spearman(*zip(*rates().values(), strict=True)) > 0.999


@pytest.mark.parametrize(("strategy", "most"), [("16/1/1/1", 0.025), ("1/16/1/1", 0.028), ("1/1/16/128", 0.033)])
def test_each_kind_of_parallelism(strategy: str, most: float) -> None:
    assert error(strategy) < most
