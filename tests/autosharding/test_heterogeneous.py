"""Placements on devices of unlike speed and memory: what is foreseen, what follows their speed, what has room."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import distir_relax as dr
from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.apply_solution import apply_solution
from distir_relax.autosharding.autoshard import build_graph
from distir_relax.autosharding.heterogeneous import Heterogeneity, merge_stage_devices
from distir_relax.autosharding.optimize import compute_costs
from distir_relax.autosharding.solver import solve
from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Profile
from distir_relax.ir import Autosharding
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import ToDistIR
from distir_relax.simulation.simulator import simulate_module
from tests.autosharding.random_graphs import random_module
from tests.autosharding.test_auto import FAST, model_and_input
from tests.autosharding.test_auto_training import assert_trains, training
from tests.autosharding.test_placements import MACHINE
from tests.machines import link


def slowed(profile: Profile, speeds: dict[int, float], memory: dict[int, float] | None = None) -> Profile:
    """A machine with devices of these speeds."""
    groups = tuple(Group(((n, n),), speed, (memory or {}).get(n)) for n, speed in speeds.items())
    return replace(profile, groups=groups)


def test_an_axis_is_cut_by_the_slowest_of_each_index_and_the_next_evens_out() -> None:
    mesh = DeviceMesh((2, 3), ("a", "b"))
    found = Heterogeneity.of(slowed(FAST, {3: 0.5, 4: 0.5, 5: 0.25}), mesh)
    assert found.speeds == (1.0, 1.0, 1.0, 0.5, 0.5, 0.25)
    assert found.shares[0] == pytest.approx((0.8, 0.2))
    # Of the first row all are alike, of the second the last is half as fast: the column is as slow as that.
    left = [(1 / 1.6, 1 / 1.6, 1 / 1.6), (0.5 / 0.4, 0.5 / 0.4, 0.25 / 0.4)]
    slowest = [min(column) for column in zip(*left, strict=True)]
    assert slowest == pytest.approx([slowest[0]] * 3)
    assert found.shares[1] == ()
    assert Heterogeneity.of(FAST, mesh) == Heterogeneity()


@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", range(30))
def test_what_is_foreseen_is_no_less_than_the_simulator_has(seed: int) -> None:
    """Each op counts as long as the device that is longest about it: where these take turns it is a little more."""
    draw = random.Random(seed)
    mesh = DeviceMesh(draw.choice(((2,), (3,), (2, 3))), ())
    machine = slowed(MACHINE, {mesh.size - 1: draw.choice((0.5, 0.3))})
    graph = build_graph(random_module(draw, 3), mesh, heterogeneity=Heterogeneity.of(machine, mesh))
    found = solve(graph, compute_costs(graph, machine))
    simulated = simulate_module(ToDistIR().run(apply_solution(graph, found.chosen)), machine).makespan
    assert simulated <= found.seconds * (1 + 1e-9)
    assert found.seconds <= 1.35 * simulated


def test_where_parts_are_in_proportion_the_time_is_foreseen() -> None:
    """Sending costs so much that the batch alone is split: 10 samples are 4, 2, 4, as long on each device."""
    model, _ = model_and_input()
    slow = slowed(replace(FAST, levels=link(1e-1, 1e6)), {1: 0.5})
    plan = dr.compile(model, (torch.randn(10, 11, 60),), mesh=3, shardings="auto", profile=slow)
    assert "S[0: 4|2|4]" in plan.text("sharded")
    record = next(r for r in plan.modules["sharded"].records if isinstance(r, Autosharding))
    assert record.time * 1e-12 == pytest.approx(simulate_module(plan.modules["distributed"], slow).makespan, rel=1e-6)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 3)])
def test_shards_follow_speed_and_are_faster_than_even_ones(mesh: tuple[int, ...]) -> None:
    model, x = model_and_input()
    size = DeviceMesh(mesh).size
    slow = slowed(FAST, {size - 1: 0.5})
    even = dr.compile(model, (x,), mesh=mesh, shardings="auto", profile=FAST)
    by_speed = dr.compile(model, (x,), mesh=mesh, shardings="auto", profile=slow, verify=True)
    times = [simulate_module(plan.modules["distributed"], slow).makespan for plan in (even, by_speed)]
    assert times[1] <= times[0]
    torch.testing.assert_close(by_speed(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_step_of_training_on_unlike_devices_is_right() -> None:
    given = training()
    slow = slowed(FAST, {1: 0.5})
    step = given.compile(mesh=3, shardings="auto", profile=slow, verify=True)
    assert_trains(given, step)


def test_each_device_has_room() -> None:
    """The slow device has a third of the memory of the others; the program must leave it as much less."""
    model, x = model_and_input()
    free = dr.compile(
        model, (x,), mesh=3, shardings="auto", profile=slowed(replace(FAST, levels=link(1e-3, 1e6)), {2: 0.5})
    )
    used = simulate_module(free.modules["distributed"], FAST).peak_memory
    room, little = 1.1 * float(used.max()), 0.6 * float(used.max())
    slow = slowed(replace(FAST, levels=link(1e-3, 1e6), memory=room), {2: 0.5}, {2: little})
    plan = dr.compile(model, (x,), mesh=3, shardings="auto", profile=slow)
    found = simulate_module(plan.modules["distributed"], slow)
    assert found.fits
    assert found.peak_memory[2] <= little < used[2]
    assert PlaceBySearch(plan.mesh, slow).memory_limit == room


def test_places_of_a_pipeline_share_what_the_slowest_has() -> None:
    slow = slowed(FAST, {1: 0.5, 4: 0.25}, {4: 1e9})
    found = merge_stage_devices(slow, 2, 3)
    assert found.device_specs(3) == [(1.0, 2e12), (0.25, 2e9), (1.0, 2e12)]
    assert merge_stage_devices(FAST, 2, 3).device_specs(3) == [(1.0, 2e12)] * 3
