"""The profile of the paper's machine against measured inference of GPT-2 1.6B, which its host determines.

`gpt2_dgx2.csv` has the throughput that the DistIR paper's authors measured, read off their plots: small batches, where
the ops on shapes of their ONNX program take most of the time, and large ones. A part of its rows, the ends of each
strategy; `python -m benchmarks.paper.fit` has all.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from distir_relax.compiler.inputs import Model, call_target
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import load_profile
from distir_relax.strategies.strategy import Strategy

MODEL = Path(__file__).parents[2] / "benchmarks" / "paper" / "models.py"
PROFILE = load_profile("dgx2-v100")
ROWS = [
    ("16/1/1/1", 2048, 0.05), ("16/1/1/1", 32768, 0.08), ("1/16/1/1", 1024, 0.05), ("1/16/1/1", 8192, 0.12),
    ("1/1/16/128", 2048, 0.15), ("1/1/16/128", 32768, 0.15),
]  # fmt: skip


@cache
def measured() -> dict[tuple[str, int], float]:
    """Samples a second, by strategy and batch."""
    with Path(__file__).with_name("gpt2_dgx2.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "gpt2-1.6b"]
    keys = ("data", "tensor", "pipeline", "microbatches")
    return {
        ("/".join(row[key] for key in keys), int(row["global_batch"])): float(row["samples_per_second"]) for row in rows
    }


@cache
def source() -> Source:
    """The model with the largest batch, read in once."""
    model, _ = call_target(f"{MODEL}:gpt2_1_6b", {"global_batch": 65536})
    assert isinstance(model, Model)
    return model.read(CompileOptions(profile=PROFILE))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("strategy", "batch", "most"), ROWS)
def test_throughput(strategy: str, batch: int, most: float) -> None:
    model = source().with_strategy(Strategy.parse(strategy))
    assert batch / model.simulate(PROFILE, batch).makespan == pytest.approx(measured()[strategy, batch], rel=most)


def test_at_small_batches_most_of_the_time_is_the_hosts() -> None:
    model = source().with_strategy(Strategy.parse("16/1/1/1"))
    found = model.simulate(PROFILE, 2048)
    assert 0.3 < found.host_bound < 0.6
    without = model.simulate(replace(PROFILE, shape_op=0.0), 2048)
    assert 2048 / without.makespan > 1.5 * measured()["16/1/1/1", 2048]
