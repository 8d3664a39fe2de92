"""Sensitivity: the times of a step on faster machines, against machines written by hand and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from distir_relax.compiler.simulate import simulate
from distir_relax.cost.profile import Level, Line, Matrix, load_profile
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import parse
from distir_relax.simulation.sensitivity import Gain, sensitivity, sensitivity_within
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from tests import mlp
from tests.machines import machine

TEXT = """
module @distributed {
  mesh[0] = device_mesh((3,), ("d",))
  func @main(input %x: f32[7,127] @ {0..2}, input %w: f32[127,127] @ {0..2}) {
    %a = matmul(%x, %w)
    %b = nn.relu(%a)
    %c = all_reduce(%b) {axis="d", op="sum"}
    return "c": %c
  }
}
"""
BYTES, PRODUCT = 7 * 127 * 4, 2 * 7 * 127 * 127


def run(flops: float = 1e12, overhead: float = 0.0, latency: float = 1e-6, bandwidth: float = 1e9) -> Simulation:
    levels = (Level("inner", 2, 5e-7, 7e9), Level("outer", 100, latency, bandwidth))
    return simulate_module(infer_types(parse(TEXT)), machine(3, levels, flops=flops, overhead=overhead))


def of(found: Simulation) -> dict[str, Gain]:
    return {gain.name: gain for gain in sensitivity(found).gains}


def test_times_are_those_of_the_closed_form() -> None:
    found = run(flops=1e11, overhead=1e-6)
    compute = (PRODUCT + 7 * 127) / 1e11
    ring = 4 * (1e-6 + BYTES / 3 / 1e9)
    doubling = 2 * (1e-6 + BYTES / 1e9)
    assert found.makespan == pytest.approx(compute + 2e-6 + min(ring, doubling), rel=1e-9)
    gains = of(found)
    assert gains["device.flops"].twice == pytest.approx(found.makespan - compute / 2)
    assert gains["device.flops"].unlimited == pytest.approx(found.makespan - compute, abs=1e-14)
    assert gains["device.overhead"].unlimited == pytest.approx(found.makespan - 2e-6)
    assert gains["network.latency"].unlimited == pytest.approx(compute + 2e-6 + 4 * BYTES / 3 / 1e9, rel=1e-6)
    assert gains["network.bandwidth"].unlimited == pytest.approx(compute + 2e-6 + 2e-6, rel=1e-6)
    # All of them are joined by the outer links.
    assert gains["level.outer.latency"].twice == gains["network.latency"].twice
    assert gains["level.inner.latency"].twice == pytest.approx(found.makespan)


@pytest.mark.parametrize(
    ("found", "bound"),
    [
        (run(flops=1e8), "flops"),
        (run(overhead=1.0), "op overhead"),
        (run(latency=1.0), "network latency"),
        (run(bandwidth=10.0), "network bandwidth"),
    ],
)
def test_the_scarce_resource_is_named(found: Simulation, bound: str) -> None:
    result = sensitivity(found)
    assert result.bound_by == bound
    assert result.gains[0].twice == pytest.approx(found.makespan / 2, rel=0.01)
    assert result.as_json()["bound_by"] == bound


def test_memory_bandwidth_counts_caches_and_measured_products() -> None:
    slow = replace(
        machine(3, flops=1e15, bandwidth=1e6), cache=1e4, cache_bandwidth=3e6,
        matrix={"float32": Matrix(1e15, bandwidth=5e5)},
    )  # fmt: skip
    found = simulate_module(infer_types(parse(TEXT)), slow)
    result = sensitivity(found)
    assert result.bound_by == "memory bandwidth"
    # Only the compute of 1e15 flop/s and the communication are left.
    communication = found.communicate.max()
    assert result.gains[0].unlimited == pytest.approx(communication, rel=1e-4)


@pytest.mark.parametrize("strategy", ["1/1/3/5", "3/1/2/4,zero=1"])
def test_times_are_those_of_a_machine_written_by_hand(strategy: str) -> None:
    """And no resource that is faster makes a step slower."""
    profile = replace(
        load_profile("dgx-h100:2"),
        lines=(Line("all_reduce", 3, 1e-5, 1e-10, ((1e3, 1.2e-5), (1e6, 2e-4))),), view=1e-6,
        dispatch=5e-6, shape_op=2e-6,
    )  # fmt: skip
    module = mlp.program(5, 127, strategy, 35)
    found = simulate(module, profile=profile)
    result = sensitivity(found)
    assert result.seconds == found.makespan
    gains = {gain.name: gain for gain in result.gains}
    matrix = {k: replace(m, flops=2 * m.flops, thin=2 * m.thin) for k, m in profile.matrix.items()}
    vector = {k: 2 * rate for k, rate in profile.vector.items()}
    fast = replace(profile, matrix=matrix, vector=vector)
    assert gains["device.flops"].twice == simulate(module, profile=fast).makespan
    quiet = replace(profile, overhead=0.0)
    assert gains["device.overhead"].unlimited == pytest.approx(simulate(module, profile=quiet).makespan, rel=1e-6)
    issued = replace(profile, dispatch=1e-30, view=0.0, shape_op=1e-30)
    assert gains["runtime.times"].unlimited == pytest.approx(simulate(module, profile=issued).makespan, rel=1e-6)
    assert all(g.unlimited <= g.twice <= found.makespan for g in result.gains)
    assert [g.twice for g in result.gains] == sorted(g.twice for g in result.gains)


def test_nothing_bounds_a_program_without_time() -> None:
    idle = machine(3, (Level("link", 100, 0.0, math.inf),), flops=math.inf)
    result = sensitivity(simulate_module(infer_types(parse(TEXT)), idle))
    assert result.bound_by is None
    assert result.seconds == 0.0


def test_a_slow_simulation_is_left_out() -> None:
    found = run()
    assert sensitivity_within(found, -1.0) is None
    assert sensitivity_within(found, 60.0) == sensitivity(found)
