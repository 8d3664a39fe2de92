"""Uncertainties from residuals that are drawn."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from distir_relax.calibration.measure import CollectiveSample
from distir_relax.calibration.residuals import collective_residuals, deviation, fit_uncertainty, repeatability
from distir_relax.cost.profile import load_profile
from distir_relax.simulation.simulator import simulate_module
from tests.calibration.test_fit import some_programs

CPU = load_profile("cpu-local")


def test_a_deviation_is_not_that_of_the_tail() -> None:
    draw = random.Random(2)
    drawn = [draw.gauss(0, 0.1) for _ in range(3000)]
    assert deviation(drawn) == pytest.approx(0.1, rel=0.05)
    assert deviation([*drawn, *[5.0] * 100]) == pytest.approx(0.1, rel=0.1)
    assert deviation([-0.3]) == 0.3


def test_noise_of_repeated_times() -> None:
    """Each time is the mean of as many as its half has, so the times of both halves have half of the variance."""
    draw = random.Random(4)
    rows = [[math.exp(draw.gauss(0, 0.1)) for _ in range(2)] for _ in range(2000)]
    # Of two times the lower counts; each half has one of them.
    assert repeatability(rows) == pytest.approx(0.1 / math.sqrt(2), rel=0.05)
    assert repeatability([[1.0], [2.0]]) == 0.0


def test_a_point_of_a_line_is_compared_with_its_neighbors() -> None:
    times = [(CollectiveSample("send", 2, n), t) for n, t in ((10, 1.0), (30, 3.0), (20, 4.0))]
    assert collective_residuals(times) == {"collectives": [pytest.approx(math.log(2.0 / 4.0))]}
    assert collective_residuals(times[:2]) == {}


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5])
def test_kinds_explain_as_much_of_programs_as_there_is(spread: float) -> None:
    """Ops are 20 % off. Programs are less so, as the errors of ops average out, or more."""
    draw = random.Random(1)
    programs = some_programs("float32", 1, 1)
    times = [[simulate_module(s.module, CPU).makespan * math.exp(draw.gauss(0, spread))] * 2 for s in programs]
    residuals = {kind: [0.2, -0.2] for kind in ("products", "elementwise", "views", "rows")}
    found = fit_uncertainty(CPU, residuals, programs, times)
    assert found.repeatability == 0.0
    assert found.products == found.rows <= 0.2
    assert (found.programs > 0) == (found.products == 0.2)
    machine = replace(CPU, uncertainty=found)
    for sample in programs:
        low, high = simulate_module(sample.module, machine).interval or (0.0, 0.0)
        assert 0.2 * spread < math.log(high / low) / 2 / 1.645 < 3 * spread
