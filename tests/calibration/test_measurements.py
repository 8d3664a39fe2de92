"""Passes of a measurement, and the commands that make them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

import distir_relax as dr
from distir_relax.bundle import read_bundle, write_bundle
from distir_relax.calibration import calibrate, validate
from distir_relax.calibration.measure import CollectiveSample
from distir_relax.calibration.measurements import Machine, Measurements, cold_samples, merge_passes, with_collectives
from distir_relax.calibration.microbenchmarks import op_samples, payloads
from distir_relax.calibration.programs import ProgramSample, program_makers
from distir_relax.calibration.statistics import undisturbed
from distir_relax.calibration.step_overhead import REQUESTS, write_step_samples
from distir_relax.calibration.unlike_ranks import unlike_ranks
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.cost.network import collective_seconds
from distir_relax.cost.profile import load_profile, read_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.cost.roofline import uncached_share
from distir_relax.ir import parse
from distir_relax.runtime.hosts import HostList
from distir_relax.simulation.simulator import simulate_module
from tests.calibration import test_fit
from tests.calibration.measure_main import few
from tests.calibration.test_fit import seconds, some_programs
from tests.runtime.processes import mpirun, python

# Ranks of one machine reduce with the processors that compute.
TRUE = replace(test_fit.TRUE, levels=tuple(replace(level, overlaps=False) for level in test_fit.TRUE.levels))

COUNT = len(op_samples("float32", 1))
FIRST = Measurements(
    ranks=2,
    device="cpu",
    scale=1,
    machine=Machine("one", "2.13", 8e9, 2 * TRUE.cache),
    ops={"float32": [[3.0, 2.0 + i] for i in range(COUNT)]},
    programs={"float32": [[5.0]]},
    alone=[[1.5] for _ in cold_samples(1)],
    collectives=[CollectiveSample("send", 2, 12)],
    collective_times=[[7.0, 8.0]],
)


def test_passes_are_joined() -> None:
    second = replace(FIRST, programs={"float32": [[4.0, 6.0]]}, collective_times=[[9.0]])
    found = merge_passes([FIRST, second])
    assert found.programs == {"float32": [[5.0, 4.0, 6.0]]}
    assert found.collective_times == [[7.0, 8.0, 9.0]]
    assert found.ops["float32"][5] == [3.0, 7.0, 3.0, 7.0]
    assert Measurements.of(json.loads(json.dumps(found.plain()))) == found


def test_a_device_alone_is_never_slower() -> None:
    samples, cold = op_samples("float32", 1), cold_samples(1)
    # Products of weights in a cache take 1 s, others 3: more than twice as long, so most of that is reading.
    times = [[3.0] if sample.cold else [1.0] for sample in samples]
    measured = replace(FIRST, ops={"float32": times})
    assert measured.bandwidth_ratio() == 2.0
    assert replace(measured, alone=[]).bandwidth_ratio() == 1.0
    assert replace(measured, alone=[[99.0] for _ in cold]).bandwidth_ratio() == 1.0
    # Products that compute most of the time say nothing.
    assert (
        replace(measured, ops={"float32": [[1.9] if sample.cold else [1.0] for sample in samples]}).bandwidth_ratio()
        == 1.0
    )
    assert all(samples[i - 1].operands == samples[i].operands for i in cold if samples[i].fixed)


def test_the_size_of_a_cache_is_measured() -> None:
    sizes = [1e6 * n for n in (4, 8, 12, 16, 24, 32, 64, 96)]
    true = 20e6
    times = [[1.0 + 3.0 * uncached_share(size, true)] for size in sizes]
    read = replace(FIRST, read_bytes=sizes, read_times=times)
    assert read.cache() == pytest.approx(true, rel=0.03)
    # Without a measurement, or if memory was not reached, it is the one that is stated.
    assert FIRST.cache() == FIRST.machine.cache
    assert replace(read, read_times=[[1.0 + 0.01 * i] for i in range(len(sizes))]).cache() == FIRST.machine.cache


def test_what_disturbs_half_of_the_time_does_not_count() -> None:
    quiet = [1.0 + 0.001 * i for i in range(11)]
    assert undisturbed(quiet) == 1.001
    assert undisturbed([*quiet, *(3.0 * t for t in quiet)]) == pytest.approx(1.002)
    assert undisturbed([2.0]) == 2.0


@pytest.mark.mpirun
def test_ranks_measure_together(tmp_path: Path) -> None:
    makers = program_makers("float32", 1, 2)
    for number, make in enumerate(makers[:1] + makers[-2:]):
        write_bundle(make().bundle, tmp_path / f"float32-{number:03}.dist")
    write_step_samples(tmp_path, 2)
    done = mpirun(2, Path(__file__).parent / "measure_main.py", tmp_path / "measured.json", tmp_path, limit=150)
    assert done.returncode == 0, done.stderr
    found = Measurements.of(json.loads((tmp_path / "measured.json").read_text()))
    chosen = few("float32", 1)
    assert len(found.ops["float32"]) == len(chosen)
    assert len(found.alone) == sum(sample.cold for sample in chosen) > 0
    assert len(found.programs["float32"]) == 3
    assert len(found.step_times) == 1 + len(REQUESTS)
    kinds = {(kind.collective, kind.bytes) for kind in found.collectives}
    assert kinds >= {("all_reduce", 12), ("all_reduce", 12_400), ("send", 12_400), ("all_gather", 12)}
    (slow,) = unlike_ranks(found.rank_seconds, found.rank_memory)
    assert str(slow) == "1"
    assert 0.09 < slow.speed < 0.6
    # A processor without a native kernel for a recorded op has no times of it.
    ops = [times for times, sample in zip(found.ops["float32"], chosen, strict=True) if times or not sample.recorded]
    several = (ops, found.alone, found.programs["float32"], found.collective_times, found.step_times)
    for times in chain.from_iterable(several):
        assert len(times) >= 4, "two passes"
        assert all(0 < t < 10 for t in times)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A small model on two ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(127, 255), torch.nn.ReLU(), torch.nn.Linear(255, 63)).eval()
    mesh = dr.DeviceMesh((2,), ("tp",))
    plan = dr.compile(model, (torch.zeros(5, 127),), mesh=mesh, shardings={"0.weight": "S[0]"}, name="mlp")
    plan.save(tmp_path / "mlp.dist")
    return tmp_path / "mlp.dist"


@pytest.mark.sweep
@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_validate_calibrates_in_turn_with_the_runs(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are real; the measurements are those of a made-up machine."""
    taken = []

    def measured(ranks: int, device: str, passes: int, budget: float, hosts: HostList) -> Measurements:
        assert not hosts
        taken.append((ranks, device, passes))
        return made_up(ranks)

    monkeypatch.setattr(validate, "measure_ranks", measured)
    monkeypatch.setattr(calibrate, "programs", few_programs)
    found = validate.validate([str(bundle)], None, steps=2, passes=2)
    assert taken == [(2, "cpu", 1), (2, "cpu", 1)]
    assert found.calibration is not None
    (outcome,) = found.outcomes
    assert outcome.ranks == 2
    module = fuse_for_ranks(parse(read_bundle(bundle).stage("distributed"), ""))
    assert outcome.predicted == simulate_module(module, found.calibration.profile).makespan
    assert outcome.predicted == pytest.approx(simulate_module(module, TRUE).makespan, rel=0.15)
    assert outcome.measured > 1e-5
    found.calibration.write(tmp_path / "made-up.toml")
    assert load_profile(tmp_path / "made-up.toml").devices == 2


def few_programs(dtype: str, scale: int, ranks: int) -> tuple[ProgramSample, ...]:
    """Every fourth of those whose fit `test_fit.py` looks at."""
    return some_programs(dtype, scale, ranks)[::4]


def made_up(ranks: int) -> Measurements:
    """What a machine like `TRUE` would take for everything that is measured."""
    kinds = [CollectiveSample(name, 2, 4 * n) for name in ("all_reduce", "all_gather", "send") for n in payloads(1)]
    return replace(
        FIRST,
        ranks=ranks,
        ops={"float32": [[seconds(TRUE, sample)] for sample in op_samples("float32", 1)]},
        programs={"float32": [[simulate_module(s.module, TRUE).makespan] for s in few_programs("float32", 1, ranks)]},
        alone=[],
        collectives=kinds,
        collective_times=[[collective_seconds(TRUE, k.collective, (0, 1), [k.bytes] * 2)] for k in kinds],
    )


def test_a_fit_says_how_sure_it_is_and_of_which_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times with random errors of 10 % leave about as large residuals; the second rank takes twice as long."""
    draw = random.Random(11)
    found = made_up(2)
    machine = replace(found.machine, instructions="AVX2 FMA", cores=2)
    ops = {"float32": [[t * math.exp(draw.gauss(0, 0.1)) for t in row] for row in found.ops["float32"]]}
    moments = [1e-3 * draw.uniform(1, 2) for _ in range(21)]
    programs = {"float32": [[t, t] for (t,) in found.programs["float32"]]}
    ranks = [moments, [2 * t * draw.uniform(0.98, 1.02) for t in moments]]
    monkeypatch.setattr(calibrate, "programs", few_programs)
    measured = replace(found, machine=machine, ops=ops, programs=programs, rank_seconds=ranks, rank_memory=[8e9, 8e9])
    profile = calibrate.fit(measured).profile
    assert (profile.processor, profile.instructions, profile.cores) == ("one", "AVX2 FMA", 2)
    assert [str(group) for group in profile.groups] == ["1"]
    assert profile.groups[0].speed == pytest.approx(0.5, rel=0.02)
    errors = profile.uncertainty
    assert errors is not None
    assert errors.repeatability == 0.0
    residuals = calibrate.op_residuals(profile, op_samples("float32", 1), [t for (t,) in ops["float32"]])
    assert set(residuals) == {"products", "elementwise", "views", "rows"}
    assert 0.0 < errors.products < 0.2
    load = read_profile(print_profile(profile))
    assert load.uncertainty is not None
    assert load.uncertainty.products == pytest.approx(errors.products, rel=1e-4)


def test_collectives_of_more_ranks_than_cores_are_added() -> None:
    kinds = [CollectiveSample("send", 2, 12), CollectiveSample("all_reduce", 3, 40)]
    of_three = replace(FIRST, ranks=3, ops={}, programs={}, collectives=kinds[1:], collective_times=[[4.0]])
    found = with_collectives(replace(FIRST, machine=replace(FIRST.machine, cores=2)), [of_three])
    assert (found.ranks, found.together) == (3, 2)
    assert found.collectives == kinds
    assert found.collective_times == [[7.0, 8.0], [4.0]]
    assert found.ops == FIRST.ops


def test_validate_wants_one_source_of_a_profile(tmp_path: Path) -> None:
    for options in ((), ("--profile", "dgx-h100", "--calibrate", str(tmp_path / "x.toml"))):
        done = python("-m", "distir_relax", "validate", tmp_path, *options)
        assert done.returncode == 2
        assert "either --profile or --calibrate" in done.stderr
    assert not (tmp_path / "x.toml").exists()


def test_hosts_are_compared_by_their_undisturbed_times() -> None:
    times = [[52.0, 80.0, 53.0, 90.0, 52.5], [140.0, 105.0, 104.0, 106.0, 150.0], [212.0, 300.0, 214.0, 213.0, 290.0]]
    of_hosts = replace(FIRST, ranks=3, rank_seconds=times, host_of=[0, 1, 2])
    assert of_hosts.comparable_rank_seconds()[0] == [52.0, 52.5, 53.0]
    (fast, slow) = unlike_ranks(of_hosts.comparable_rank_seconds())
    assert (fast.speed, slow.speed) == (pytest.approx(2.0, rel=0.02), pytest.approx(0.495, rel=0.02))
    assert replace(of_hosts, host_of=[0, 0, 0]).comparable_rank_seconds() == times
