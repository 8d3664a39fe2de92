"""Fit the profile of the paper's machine to the throughputs that its authors measured, and say how well it does.

    python -m benchmarks.paper.fit

Seven figures of `dgx2-v100` are fitted to the rows of `tests/cost/mlp_1b_dgx2.csv` (training of MLP 1B) and
`tests/cost/gpt2_dgx2.csv` (inference of GPT-2 1.6B, and two rows of 175B): least squares of the logarithms of times.
The fit is made for several models of the host, of which the rows tell which is right. Takes some 20 minutes on two
cores.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import mean

from distir_relax import Strategy, load_profile
from distir_relax.calibration.fit import least_squares
from distir_relax.compiler.inputs import classify_input
from distir_relax.compiler.options import CompileOptions
from distir_relax.cost.profile import Profile
from distir_relax.ir import Module
from distir_relax.simulation.simulation_plan import SimulationPlan
from distir_relax.simulation.simulator import simulate_module

from . import models
from .searches import MACHINE, ROOT

BUILDERS = {"mlp-1b": models.mlp_1b, "gpt2-1.6b": models.gpt2_1_6b, "gpt2-175b": models.gpt2_175b}
FILES = ("gpt2_dgx2.csv", "mlp_1b_dgx2.csv")
START = {
    "flops": 1e14, "half_rows": 100.0, "half_columns": 900.0, "overhead": 5e-6, "send": 7.5e-11, "dispatch": 1.5e-5,
    "shape_op": 2e-5,
}  # fmt: skip
HOSTS: dict[str, Mapping[str, object]] = {
    "ops on shapes wait": {"waits": frozenset({"shape_op"})},
    "sends wait": {"waits": frozenset({"send"})},
    "nothing waits": {"waits": frozenset()},
    "host and device take turns": {"waits": frozenset(), "dispatch": 0.0},
}
"""The models of the host, by the fields of the profile that differ."""


@dataclass(frozen=True)
class Row:
    """A measurement: its model and strategy, the samples and seconds of a step, and the program."""

    model: str
    strategy: str
    samples: int
    seconds: float
    module: Module
    plan: SimulationPlan


def rows(profile: Profile) -> Iterator[Row]:
    """Read the measurements, and compile each configuration."""
    for name in FILES:
        with (ROOT / "tests" / "cost" / name).open() as file:
            for row in csv.DictReader(file):
                samples = int(row["global_batch"])
                model = classify_input(BUILDERS[row["model"]](samples))
                source = model.read(CompileOptions(profile=profile)).with_shape_ops()
                strategy = "/".join(row[key] for key in ("data", "tensor", "pipeline", "microbatches"))
                source = source.with_strategy(Strategy.parse(strategy))
                module = source.distributed(repeated=not strategy.endswith("/1"))
                seconds = samples / float(row["samples_per_second"])
                yield Row(row["model"], strategy, samples, seconds, module, SimulationPlan(module, profile))


def machine(base: Profile, x: Mapping[str, float], host: Mapping[str, object]) -> Profile:
    """The profile with these figures."""
    matrix = replace(base.matrix["float16"], flops=x["flops"], half_rows=x["half_rows"], half_columns=x["half_columns"])
    lines = tuple(
        replace(line, seconds_per_byte=x["send"]) if line.collective == "send" else line for line in base.lines
    )
    fields = {"overhead": x["overhead"], "dispatch": x["dispatch"], "shape_op": x["shape_op"], **host}
    return replace(base, matrix={**base.matrix, "float16": matrix}, lines=lines, **fields)  # type: ignore[arg-type]


def seconds(task: tuple[int, Profile]) -> float:
    """The predicted seconds of a row, by its number."""
    number, profile = task
    return simulate_module(ROWS[number].module, profile, ROWS[number].plan).makespan


ROWS: list[Row] = []


def main() -> None:
    base = load_profile(MACHINE)
    ROWS.extend(rows(base))
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:

        def times(profile: Profile) -> list[float]:
            return list(pool.map(seconds, [(number, profile) for number in range(len(ROWS))], chunksize=4))

        report("the profile as it is", times(base))
        for name, host in HOSTS.items():

            def errors(x: Mapping[str, float], host: Mapping[str, object] = host) -> list[float]:
                predicted = times(machine(base, {"dispatch": 0.0, **x}, host))
                return [math.log(t / row.seconds) for t, row in zip(predicted, ROWS, strict=True)]

            x, _ = least_squares(errors, {key: value for key, value in START.items() if key not in host})
            print(name, {key: float(f"{value:.4g}") for key, value in x.items()})
            report(name, times(machine(base, {"dispatch": 0.0, **x}, host)))


def report(name: str, predicted: list[float]) -> None:
    """Print the mean and the largest error of throughput, by model and strategy."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row, t in zip(ROWS, predicted, strict=True):
        errors.setdefault((row.model, row.strategy), []).append(abs(row.seconds / t - 1))
    for (model, strategy), found in errors.items():
        print(f"  {model:10} {strategy:12} {len(found):3}  mean {mean(found):6.1%}  largest {max(found):6.1%}")
    print(f"{name}: mean {mean(e for found in errors.values() for e in found):.1%}", flush=True)


if __name__ == "__main__":
    main()
