"""Two ranks of which one runs at half speed: throughput of even shards, and of shards cut by speed.

python benchmarks/unequal.py

Each rank has a core of its own; on that of rank 1 a busy loop takes every other turn. The profile is `cpu-local` with
rank 1 at speed 0.5. Even and unequal steps are run in turn; what counts is the median. `--busy 0` leaves the loop out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.calibration.measure import time_steps
from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Profile
from distir_relax.runtime.join import joined_world
from distir_relax.runtime.machine import limit_threads
from distir_relax.runtime.session import Session

WIDTH, HIDDEN, ROWS = 1024, 4096, 510
EVEN = dr.load_profile("cpu-local")
UNLIKE = replace(EVEN, groups=(Group(((1, 1),), 0.5),))


def perceptron(layers: int) -> nn.Sequential:
    """Pairs of layers, up to `HIDDEN` and down again."""
    torch.manual_seed(0)
    parts = [(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(layers)]
    return nn.Sequential(*(part for pair in parts for part in pair))


class Attention(nn.Module):
    """A transformer of two blocks, 12 heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def configurations(profile: Profile) -> dict[str, dr.Plan]:
    """What is run, compiled for a machine."""
    x = torch.randn(ROWS, WIDTH)
    more = torch.randn(4 * ROWS, WIDTH)
    trained, trained_more = (
        dr.compile_training(
            perceptron(1), F.mse_loss, optimizer=dr.optim.SGD(lr=1e-4), example_batch=(batch, batch),
            strategy="2/1/1/1", profile=profile,
        )
        for batch in (x, more)
    )  # fmt: skip
    staged = dr.compile_training(
        perceptron(3),
        F.mse_loss,
        optimizer=dr.optim.SGD(lr=1e-4),
        example_batch=(x, x),
        strategy="1/1/2/6",
        profile=profile,
    )
    words = torch.randn(6, 128, 768)
    attention = Attention().eval()
    return {
        "perceptron, inference, tensor": dr.compile(perceptron(2).eval(), (x,), strategy="1/2/1/1", profile=profile),
        "transformer, inference, tensor": dr.compile(attention, (words,), strategy="1/2/1/1", profile=profile),
        "perceptron, training, data": trained.plan,
        "perceptron, training, data, 4 x": trained_more.plan,
        "perceptron, inference, pipeline": dr.compile(perceptron(3), (x,), strategy="1/1/2/6", profile=profile),
        "perceptron, training, pipeline": staged.plan,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=1)
    given = parser.parse_args()
    if given.rank:
        run_rank(given.rank, given.steps, given.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        cut = {"even": configurations(EVEN), "by speed": configurations(UNLIKE)}
        for kind, plans in cut.items():
            for number, plan in enumerate(plans.values()):
                plan.save(Path(folder) / f"{number} {kind}.dist", ("torch",))
        times = measured(Path(folder), given.steps, given.rounds, given.busy)
        print(f"{'':34}{'even':>10}{'by speed':>10}{'measured':>10}{'predicted':>11}")
        for number, name in enumerate(cut["even"]):
            even, unequal = (times[f"{number} {kind}"] for kind in cut)
            asked = [dr.simulate(plans[name].modules["distributed"], profile=UNLIKE).makespan for plans in cut.values()]
            ratio = asked[0] / asked[1]
            print(f"{name:34}{1e3 * even:8.0f}ms{1e3 * unequal:8.0f}ms{even / unequal:9.2f}x{ratio:10.2f}x")


def measured(folder: Path, steps: int, rounds: int, busy: int) -> dict[str, float]:
    """The median seconds of a step of each bundle, by its name."""
    loops = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(busy)]
    for loop in loops:
        loop.start()
    command = [sys.executable, __file__, "--rank", str(folder), "--steps", str(steps), "--rounds", str(rounds)]
    try:
        subprocess.run(["mpirun", "--bind-to", "none", "-n", "2", *command], check=True, timeout=600)
    finally:
        for loop in loops:
            loop.kill()
    return json.loads((folder / "times.json").read_text())


def spin() -> None:
    """Keep the second core busy."""
    os.sched_setaffinity(0, {1})
    while True:
        pass


def run_rank(folder: Path, steps: int, rounds: int) -> None:
    """One rank of the launch, on its core."""
    with joined_world() as world:
        os.sched_setaffinity(0, {world.rank})
        limit_threads(world.size)
        torch.set_num_threads(1)
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            for path in sorted(folder.glob("*.dist")):
                session = Session(read_bundle(path), world=world)
                times.setdefault(path.stem, []).extend(time_steps(world, session, steps))
        if world.rank == 0:
            medians = {name: statistics.median(seconds) for name, seconds in times.items()}
            (folder / "times.json").write_text(json.dumps(medians))
        world.close()


if __name__ == "__main__":
    main()
