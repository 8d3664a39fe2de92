"""The host's time around programs: it comes before their ops, and a calibration measures it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distir_relax.calibration.step_overhead import REQUESTS, fit_steps, step_samples
from distir_relax.simulation.critical_path import HOST, critical_path
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine

MACHINE = replace(machine(3), kind="cpu", python=1e-4, call=2e-4, recorded=1e9)
KNOWN = replace(MACHINE, step=3e-3, request_step=5e-2, request=7e-4)


def test_the_time_around_a_step_is_what_its_program_does_not_take() -> None:
    samples = step_samples(3)
    assert [sample.requests for sample in samples] == [0, *REQUESTS]
    seconds = [sample.simulate(KNOWN).makespan for sample in samples]
    around = [3e-3, *(5e-2 + n * 7e-4 for n in REQUESTS)]
    for sample, measured, more in zip(samples, seconds, around, strict=True):
        assert measured - sample.simulate(MACHINE).makespan == pytest.approx(more, rel=1e-9)
    found = fit_steps(MACHINE, samples, seconds)
    assert (found.step, found.request_step, found.request) == pytest.approx((3e-3, 5e-2, 7e-4), rel=1e-9)


def test_steps_faster_than_their_programs_have_no_time_around_them() -> None:
    found = fit_steps(KNOWN, step_samples(3), [1e-9] * 3)
    assert (found.step, found.request_step, found.request) == (0.0, 0.0, 0.0)


def test_devices_wait_for_the_host_before_the_first_op() -> None:
    sample = step_samples(3)[0]
    simulation, bare = (simulate_module(sample.module, m) for m in (KNOWN, MACHINE))
    first, *others = critical_path(simulation).steps
    assert (first.kind, first.start, first.duration) == (HOST, 0, 3 * 10**12)
    assert sum(step.duration for step in others) == critical_path(bare).makespan
    for device in range(3):
        parts = simulation.compute[device] + simulation.communicate[device] + simulation.idle[device]
        assert parts == pytest.approx(simulation.makespan, rel=1e-12)
        assert simulation.idle[device] - bare.idle[device] == pytest.approx(3e-3, rel=1e-9)
