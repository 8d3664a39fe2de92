"""Passes of a measurement, and the commands that make them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import distir_relax as dr
from distir_relax.analysis.profile import load_profile
from distir_relax.calibration.measure import CollectiveSample
from distir_relax.calibration.measurements import Machine, Measurements, cold_samples, joined
from distir_relax.calibration.samples import op_samples
from distir_relax.calibration.statistics import undisturbed
from tests.runtime.processes import python

COUNT = len(op_samples("float32", 1))
FIRST = Measurements(
    ranks=2,
    device="cpu",
    scale=1,
    machine=Machine("one", "2.13", 8e9, 3e7),
    ops={"float32": [[3.0, 2.0 + i] for i in range(COUNT)]},
    programs={"float32": [[5.0]]},
    alone=[[1.5] for _ in cold_samples(1)],
    collectives=[CollectiveSample("send", 2, 12)],
    collective_times=[[7.0, 8.0]],
)


def test_passes_are_joined() -> None:
    second = replace(FIRST, programs={"float32": [[4.0, 6.0]]}, collective_times=[[9.0]])
    found = joined([FIRST, second])
    assert found.programs == {"float32": [[5.0, 4.0, 6.0]]}
    assert found.collective_times == [[7.0, 8.0, 9.0]]
    assert found.ops["float32"][5] == [3.0, 7.0, 3.0, 7.0]
    assert Measurements.of(json.loads(json.dumps(found.plain()))) == found


def test_a_device_alone_is_never_slower() -> None:
    assert FIRST.bandwidth_ratio() == 2.0
    assert replace(FIRST, alone=[]).bandwidth_ratio() == 1.0
    assert replace(FIRST, alone=[[99.0] for _ in FIRST.alone]).bandwidth_ratio() == 1.0


def test_what_disturbs_half_of_the_time_does_not_count() -> None:
    quiet = [1.0 + 0.001 * i for i in range(11)]
    assert undisturbed(quiet) == 1.001
    assert undisturbed([*quiet, *(3.0 * t for t in quiet)]) == pytest.approx(1.002)
    assert undisturbed([2.0]) == 2.0


@pytest.mark.mpirun
def test_validate_calibrates_in_turn_with_the_runs(tmp_path: Path) -> None:
    """One pass of everything on two ranks, for real."""
    model = torch.nn.Sequential(torch.nn.Linear(127, 255), torch.nn.ReLU(), torch.nn.Linear(255, 63)).eval()
    mesh = dr.DeviceMesh((2,), ("tp",))
    plan = dr.compile(model, (torch.zeros(5, 127),), mesh=mesh, shardings={"0.weight": "S[0]"}, name="mlp")
    plan.save(tmp_path / "mlp.dist")
    command = ["validate", str(tmp_path / "mlp.dist"), "--calibrate", str(tmp_path / "cpu.toml"), "--passes", "1"]
    done = python("-m", "distir_relax", *command, "--json", "--plot", str(tmp_path / "plot.svg"), limit=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (outcome,) = found["outcomes"]
    assert outcome["ranks"] == 2
    assert np.isfinite(found["mape"])
    profile = load_profile(tmp_path / "cpu.toml")
    assert profile.devices == 2
    assert 0 < profile.view < 1e-3
    assert {line.collective for line in profile.lines} >= {"all_reduce", "send"}
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_validate_wants_one_source_of_a_profile(tmp_path: Path) -> None:
    for options in ((), ("--profile", "dgx-h100", "--calibrate", str(tmp_path / "x.toml"))):
        done = python("-m", "distir_relax", "validate", tmp_path, *options)
        assert done.returncode == 1
        assert "either --profile or --calibrate" in done.stderr
    assert not (tmp_path / "x.toml").exists()
