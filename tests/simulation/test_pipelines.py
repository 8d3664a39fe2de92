"""Pipelines of equal stages: makespan, bubble and memory are those of the closed forms, to the femtosecond."""

from __future__ import annotations

from fractions import Fraction

import pytest

from distir_relax.ir import verify
from distir_relax.ops import check
from distir_relax.simulation.simulator import simulate_module
from tests.machines import link, machine
from tests.simulation.pipelines import ACTIVATION, BACKWARD, FORWARD, WEIGHT, pipeline

# A million operations a second, so that a task takes a whole number of femtoseconds; links take no time at all.
FLOPS = 1e6
FREE = machine(16, link(0.0, float("inf")), FLOPS)
F, B = (round(n / FLOPS * 1e15) for n in (FORWARD, BACKWARD))
SHAPES = [(1, 1), (1, 5), (2, 1), (2, 3), (3, 2), (3, 7), (5, 3), (5, 5), (5, 11), (7, 4), (7, 13)]
SCHEDULES = ["gpipe", "1f1b"]


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_makespan_and_bubble_of_equal_stages(schedule: str, p: int, m: int) -> None:
    module = pipeline(schedule, p, m)
    verify(module, check)
    found = simulate_module(module, FREE)
    assert max(found.clocks) == (m + p - 1) * (F + B)
    busy = [found.busy[0][c] for c in found.class_of]
    assert busy == [m * (F + B)] * p
    assert found.bubble == pytest.approx(float(Fraction(p - 1, m + p - 1)), abs=1e-12)
    waiting = sum(max(found.clocks) - n for n in busy)
    assert Fraction(waiting, sum(busy)) == Fraction(p - 1, m), "(p - 1)/m of the ideal time"


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_alive_on_each_stage(schedule: str, p: int, m: int) -> None:
    """1F1B holds at most P - s results on stage s, GPipe all of them, and no more than one task needs besides."""
    found = simulate_module(pipeline(schedule, p, m), FREE)
    for stage in range(p):
        curve = [sum(split) for _, split in found.memory_curve(stage)]
        alive = m if schedule == "gpipe" else min(p - stage, m)
        # Of the backward task that begins when most are held: two results, or one and the gradient it received.
        task = 2
        inputs = m * ((stage == 0) + (stage == p - 1))
        assert max(curve) == WEIGHT + (inputs + alive + task) * ACTIVATION
        assert max(curve) == found.peak_memory[stage]


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (5, 7)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sends_make_it_slower_and_tasks_no_longer(schedule: str, p: int, m: int) -> None:
    module = pipeline(schedule, p, m)
    free = simulate_module(module, FREE)
    before = max(free.clocks)
    for latency in (1e-6, 1e-5, 1e-4):
        found = simulate_module(module, machine(16, link(latency, 1e9), FLOPS))
        assert max(found.clocks) > before
        assert found.busy[0] == free.busy[0]
        before = max(found.clocks)


def test_one_microbatch_pays_for_each_send_once() -> None:
    p, latency, bandwidth = 5, 2e-6, 1e9
    found = simulate_module(pipeline("1f1b", p, 1), machine(16, link(latency, bandwidth), FLOPS))
    send = round((latency + ACTIVATION / bandwidth) * 1e15)
    assert max(found.clocks) == p * (F + B) + 2 * (p - 1) * send
