"""A model's program in the order of a schedule takes as long as the schedule's closed form says.

The stages are equal, sends take no time, and products alone take any: each stage is one product forwards, one for the
gradient of its input, and one for that of its weights.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.cost.profile import Level
from distir_relax.lowering.schedule_order import split_backwards
from distir_relax.schedules import Times, order_of, timeline
from tests.machines import machine

WIDTH, ROWS = 5, 3
PRODUCT = 2 * ROWS * WIDTH * WIDTH
FREE = (Level("link", 1 << 20, 0.0, math.inf),)


class Equal(nn.Module):
    """A scale, so that the first stage has a gradient of inputs too, and as many products as there are stages."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def makespan(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> float:
    """In products of one microbatch."""
    stages = ranks * chunks
    profile = replace(machine(ranks, FREE, flops=PRODUCT), vector={"float32": math.inf})
    step = dr.compile_training(
        Equal(stages), optimizer=dr.optim.SGD(lr=0.1), example_batch=torch.rand(ROWS * microbatches, WIDTH),
        strategy=dr.Strategy(1, 1, ranks, microbatches, schedule=schedule, chunks=chunks), profile=profile,
        stages=[f"layers.{i}" for i in range(1, stages)],
    )  # fmt: skip
    return dr.simulate(step.plan, profile=profile).makespan


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "chunks"),
    [
        ("gpipe", 3, 5, 1),
        ("1f1b", 3, 7, 1),
        ("1f1b", 5, 3, 1),
        ("interleaved", 3, 6, 2),
        ("zb-h1", 3, 7, 1),
        ("zb-h2", 3, 7, 1),
        ("zb-v", 3, 7, 2),
        ("dualpipe-v", 3, 7, 2),
    ],
)
def test_a_program_takes_as_long_as_its_schedule(schedule: str, ranks: int, microbatches: int, chunks: int) -> None:
    order = order_of(schedule, ranks, microbatches, chunks)
    expected = timeline(split_backwards(order), Times()).makespan
    assert expected <= timeline(order, Times()).makespan
    assert makespan(schedule, ranks, microbatches, chunks) == pytest.approx(expected, rel=1e-9)


def test_one_forward_one_backward_is_its_closed_form() -> None:
    ranks, microbatches = 4, 9
    # A whole backward, gradients of weights included, would make it (m + p - 1) (F + I + W).
    expected = 3 * microbatches + 2 * (ranks - 1)
    assert makespan("1f1b", ranks, microbatches) == pytest.approx(expected, rel=1e-9)


def test_the_scheduler_is_told_what_tasks_take() -> None:
    """On stages of one, two and four products it is not slower than any schedule by name."""
    found = {}
    for schedule in ("1f1b", "gpipe", "zb-h1", "auto"):
        profile = replace(machine(3, FREE, flops=PRODUCT), vector={"float32": math.inf})
        step = dr.compile_training(
            Equal(7), optimizer=dr.optim.SGD(lr=0.1), example_batch=torch.rand(ROWS * 7, WIDTH),
            strategy=dr.Strategy(1, 1, 3, 7, schedule=schedule), profile=profile, stages=["layers.1", "layers.3"],
        )  # fmt: skip
        found[schedule] = dr.simulate(step.plan, profile=profile)
    assert found["auto"].makespan <= min(f.makespan for f in found.values()) * (1 + 1e-9)
    # The last stage alone has seven times twelve products, and begins behind three: no order takes less.
    assert found["auto"].makespan == pytest.approx(7 * 12 + 3, rel=1e-9)
    assert found["gpipe"].peak_memory.max() > found["1f1b"].peak_memory.max()
