"""Devices of unlike speed and memory: what is cut follows them, results are as on one process, times as worked out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.options import CompileOptions
from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Profile
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies.chain_partition import SLACK, balanced_cuts
from distir_relax.strategies.heterogeneous import Shares
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search import Candidate, Evaluator, Outcome, Space
from tests import search_models
from tests.families import FAMILIES
from tests.machines import link, machine
from tests.runtime.processes import mpirun
from tests.simulation.schedules import schedule
from tests.training.test_steps_of_training import ADAM, SGD, Tied, agrees, words

SPEEDS = (1.0, 1 / 2, 1 / 3)


def unlike(*speeds: float, memory: tuple[float, ...] = (), like: Profile | None = None) -> Profile:
    """A machine of one device for each speed, or each size of memory."""
    each = memory or (None,) * len(speeds)
    groups = tuple(Group(((i, i),), s, m) for i, (s, m) in enumerate(zip(speeds, each, strict=True)))
    return replace(like or machine(len(speeds), link(1e-9, 1e15)), groups=groups)


def sizes(plan: dr.Plan, name: str) -> str:
    """How an input or a parameter lies."""
    items = {item.value.name: item.value.dtensor for item in plan.modules["sharded"].main.inputs}
    return ", ".join(map(str, items[name].placements))


def layers(hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, hidden, bias=False), nn.Linear(hidden, 15, bias=False)).double()


def test_an_op_cut_by_speed_takes_as_long_on_every_device() -> None:
    """127 x 15 by 15 x 11 n at speeds 1, 1/2, 1/3: columns 6 n, 3 n and 2 n, each 2 * 127 * 15 * 6 n operations long.

    Cut evenly the slowest takes 11 n / 3 / (1/3) = 11 n columns' time; cut by speed all take that of 6 n.
    """
    machine_of_three = unlike(*SPEEDS)
    model, x = layers(11 * 240), torch.randn(127, 15, dtype=torch.float64)
    plan = dr.compile(model, (x,), strategy="1/3/1/1", profile=machine_of_three)
    assert sizes(plan, "0.weight") == "R, S[0: 1440|720|480]"
    assert sizes(plan, "1.weight") == "R, S[1: 1440|720|480]"
    torch.testing.assert_close(plan(x), model(x).detach(), rtol=1e-12, atol=1e-12)
    found = dr.simulate((model, (x,)), profile=machine_of_three, strategy="1/3/1/1")
    two_products = 2 * (2 * 127 * 15 * 1440) / 1e9
    assert found.compute == pytest.approx([two_products] * 3, rel=1e-9)
    even = simulate_module(dr.compile(model, (x,), strategy="1/3/1/1").modules["distributed"], machine_of_three)
    assert even.makespan / found.makespan == pytest.approx(11 / 6, rel=1e-3)
    assert "1 of speed 1, 1 of speed 0.5, 1 of speed 0.333" in str(found)
    assert found.as_json()["speed"] == list(SPEEDS)


def test_the_batch_is_cut_by_speed_microbatch_by_microbatch() -> None:
    """22 samples in two microbatches of 11: 6, 3 and 2 of each."""
    model, x = layers(7), torch.randn(22, 15, dtype=torch.float64)
    plan = dr.compile(model, (x,), strategy="3/1/1/2", profile=unlike(*SPEEDS))
    assert [sizes(plan, f"input.{i}") for i in range(2)] == ["S[0: 6|3|2], R"] * 2
    torch.testing.assert_close(plan(x), model(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["3/1/1/2", "1/3/1/1", "1/1/3/2"])
def test_processes_compute_what_the_model_does(strategy: str, tmp_path: Path) -> None:
    """22 samples in parts of 6, 3 and 2 of each microbatch, 7 columns as 4, 2 and 1, and layers cut by speed."""
    model, x = layers(7), torch.randn(22, 15, dtype=torch.float64)
    model.append(nn.Linear(15, 15, dtype=torch.float64))
    plan = dr.compile(model, (x,), strategy=strategy, profile=unlike(*SPEEDS))
    plan.save(tmp_path / "plan.dist", backends=("torch",))
    np.savez(tmp_path / "in.npz", input=x.numpy())
    files = ("--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    done = mpirun(3, "-m", "distir_relax", "run", tmp_path / "plan.dist", *files, "--timeout", 60)
    assert done.returncode == 0, done.stderr
    (found,) = np.load(tmp_path / "out.npz").values()
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-12, atol=1e-12)


def test_stages_are_as_long_as_their_devices_are_fast() -> None:
    """Eleven equal layers on speeds 1, 1/2, 1/3 are 6, 3 and 2: all stages take the time of 6 layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(31, 31, bias=False) for _ in range(11))).double()
    x = torch.randn(15, 31, dtype=torch.float64)
    found = dr.simulate((model, (x,)), profile=unlike(*SPEEDS), strategy="1/1/3/5")
    assert found.compute == pytest.approx([5 * 6 * 2 * 3 * 31 * 31 / 1e9] * 3)
    plan = dr.compile(model, (x,), strategy="1/1/3/5", profile=unlike(*SPEEDS))
    torch.testing.assert_close(plan(x), model(x).detach(), rtol=1e-12, atol=1e-12)


def test_what_one_axis_leaves_unlike_another_evens_out() -> None:
    """A device is on several axes: of 2 x 2 with one at half speed, the row of that one gets a third."""
    found = Shares.of(unlike(1.0, 1.0, 1.0, 0.5), Strategy(2, 2, 1, 1))
    assert (found.along("data"), found.along("tensor")) == ((0.666667, 0.333333), ())
    found = Shares.of(unlike(1.0, 0.5, 1.0, 0.5), Strategy(2, 2, 1, 1))
    assert found.axes == (("tensor", (0.666667, 0.333333)),)
    found = Shares.of(unlike(1.0, 0.5, 1.0, 0.5), Strategy(2, 1, 1, 1, context=2))
    assert found.axes == (("context", (0.666667, 0.333333)),)
    found = Shares.of(unlike(1.0, 1.0, 0.5, 0.5), Strategy(1, 2, 2, 1))
    assert (found.axes, found.group_speeds) == ((), (1.0, 0.5))
    found = Shares.of(unlike(1.0, 0.5, 1.0), Strategy(1, 1, 3, 1))
    assert found.group_speeds == (1.0, 0.5, 1.0)
    assert Shares.of(machine(4), Strategy(2, 2, 1, 1)) == Shares()


def test_a_device_with_little_memory_holds_less_of_what_is_cut() -> None:
    """Equal speeds; weights of 2 x 15 x 1200 in float64 are 288,000 bytes, of which device 1 has room for a quarter."""
    model, x = layers(1200), torch.randn(3, 15, dtype=torch.float64)
    tight = unlike(1.0, 1.0, 1.0, memory=(1e6, 72000.0, 1e6))
    plan = dr.compile(model, (x,), strategy="1/3/1/1", profile=tight)
    assert sizes(plan, "0.weight") == "R, S[0: 450|300|450]"
    less = replace(tight, groups=(Group(((1, 1),), memory=120_000.0),))
    found = dr.simulate((model, (x,)), profile=less, strategy="1/3/1/1")
    assert found.fits
    assert found.memory.tolist() == [1e12, 120_000.0, 1e12]
    small = dr.simulate((model, (x,)), profile=replace(tight, memory=1e6), strategy="1/3/1/1")
    assert not small.fits
    assert small.fullest == 1
    assert "of 72 kB on device 1" in str(small)


def test_a_stage_on_little_memory_is_short() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(31, 31, bias=False) for _ in range(6))).double()
    x = torch.randn(9, 31, dtype=torch.float64)
    tight = unlike(1.0, 1.0, memory=(1e6, 2.5 * 31 * 31 * 8))
    found = dr.simulate((model, (x,)), profile=tight, strategy="1/1/2/3")
    assert found.compute[0] == pytest.approx(2 * found.compute[1])


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_of_stages_suits_their_speeds_better(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(2, 8)
    count = draw.randint(1, n)
    costs = [draw.choice([0.0, 1.0, draw.random(), 5.0]) for _ in range(n)]
    crossing = [0.0, *(draw.random() for _ in range(n - 1))]
    speeds = [draw.choice([1.0, 0.5, draw.random() + 0.1]) for _ in range(count)]
    held = [float(draw.randint(0, 3)) for _ in range(n)]
    rooms = [float(draw.randint(0, 9)) for _ in range(count)]

    def dearest(cuts: tuple[int, ...]) -> float:
        ends = pairwise([0, *cuts, n])
        return max(max(sum(costs[a:b]) / s, crossing[a]) for (a, b), s in zip(ends, speeds, strict=True))

    def fits(cuts: tuple[int, ...]) -> bool:
        return all(sum(held[a:b]) <= r for (a, b), r in zip(pairwise([0, *cuts, n]), rooms, strict=True))

    ways = list(combinations(range(1, n), count - 1))
    allowed = [cuts for cuts in ways if fits(cuts)] or ways
    found = tuple(balanced_cuts(costs, crossing, count, speeds, held, rooms))
    assert found in allowed
    assert dearest(found) <= min(map(dearest, allowed)) * (1 + SLACK) + 1e-12


CASES = [
    ("gpt2", "3/1/1/2,zero=3,checkpoint=block", *ADAM),
    ("llama", "1/3/1/2,sequence_parallel", *SGD),
    ("bert", "3/1/1/2,zero=2", *ADAM),
    ("mixtral", "1/3/1/1,experts=tensor", *SGD),
    ("resnet", "3/1/1/2", *ADAM),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "strategy", "ours", "theirs"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_family_trains_on_unlike_devices_as_torch_trains_it(name: str, strategy: str, ours: Any, theirs: Any) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]()
    model = family.model.to(torch.float32 if name == "mixtral" else torch.float64).train()
    tolerance = 1e-5 if name == "mixtral" else family.tolerance
    agrees(model, [family.args] * 2, ours, theirs, strategy, tolerance, profile=unlike(*SPEEDS))


@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/3/1/1", "3/1/1/2", "2/2/1/1"])
def test_means_weigh_each_sample_as_much(strategy: str) -> None:
    """Parts of unlike size, with unequally many labels that count; plain SGD shows a wrong factor at once."""
    torch.manual_seed(0)
    batches = [words(11, ignored) for ignored in (3, 0, 9)]
    profile = unlike(*SPEEDS, 0.25)
    step = agrees(
        Tied().double(), batches, dr.optim.SGD(lr=1.0), lambda p: torch.optim.SGD(p, lr=1.0), strategy, 1e-12, 0.05,
        profile=profile,
    )  # fmt: skip
    cut = {str(item.value.dtensor.placements) for item in step.plan.modules["sharded"].main.inputs}
    even = dr.compile_training(Tied().double(), example_batch=batches[0], optimizer=dr.optim.SGD(), strategy=strategy)
    assert cut != {str(item.value.dtensor.placements) for item in even.plan.modules["sharded"].main.inputs}


def each_alone(profile: Profile, devices: int) -> Profile:
    """The machine with devices that are all told apart, and as fast as before."""
    kinds = profile.device_specs(devices)
    return replace(profile, groups=tuple(Group(((d, d),), s, 1e12 + d) for d, (s, _) in enumerate(kinds)))


@pytest.mark.parametrize("seed", range(12))
def test_devices_of_a_class_are_as_fast_as_each_other(seed: int) -> None:
    """What is simulated as one is what each device does by itself; without unlike devices nothing changes."""
    module = schedule(seed)
    plain = machine(8, flops=1e8, bandwidth=1e10, overhead=2e-7)
    half = replace(plain, groups=(Group(((1, 2), (5, 5)), 0.5),))
    for profile in (plain, half):
        one, other = simulate_module(module, profile), simulate_module(module, each_alone(profile, 8))
        assert len(other.members) == other.devices >= len(one.members)
        for name in ("compute", "communicate", "idle", "peak_memory"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert one.makespan == other.makespan
    assert busy(module, half) >= busy(module, plain)


def busy(module: Any, profile: Profile) -> float:
    found: Simulation = simulate_module(module, profile)
    return float(found.compute.sum())


@pytest.mark.sweep
def test_a_search_finds_what_each_strategy_simulates_alone() -> None:
    profile = unlike(1.0, 0.5, 1.0, 0.5, 0.5, 0.25, like=dr.load_profile("dgx2-v100"))
    space = Space(6, (12, 36), True, (1, 3), schedules=("1f1b", "auto"), zero=(0, 1))
    source = search_models.train(120).read(CompileOptions(profile=profile))
    evaluator = Evaluator(source, profile, space.candidates())
    for candidate in space.candidates()[::7]:
        alone = source.with_strategy(candidate.strategy).simulate(profile, candidate.samples)
        assert evaluator.outcome(candidate) == Outcome.of(candidate, alone)


def test_programs_in_between_are_used_where_parts_are_in_proportion() -> None:
    """Speeds 2 to 1: microbatches of 6, 9 and 12 are 4|2, 6|3 and 8|4; 10 would be 7|3."""
    profile = unlike(1.0, 0.5, like=dr.load_profile("dgx2-v100"))
    source = search_models.train(48).read(CompileOptions(profile=profile))
    strategy = Strategy(2, 1, 1, 2)
    candidates = [Candidate(strategy, 2 * n) for n in (6, 9, 10, 12)]
    evaluator = Evaluator(source, profile, candidates)
    assert [evaluator._interpolate(candidate) is not None for candidate in candidates] == [True, True, False, True]
    for candidate in candidates:
        alone = source.with_strategy(strategy).simulate(profile, candidate.samples)
        assert evaluator.outcome(candidate) == Outcome.of(candidate, alone)
