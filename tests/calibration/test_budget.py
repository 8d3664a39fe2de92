"""What a calibration does with its time, and fits that it refuses; by a clock of the tests' own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_measurements import FIRST, TRUE, few_programs, made_up
from typer.testing import CliRunner

from distir_relax.calibration import calibrate, measurements
from distir_relax.calibration.budget import Budget
from distir_relax.calibration.calibrate import Calibration
from distir_relax.calibration.measure import WARM_UP, steps_within, time_steps
from distir_relax.calibration.measurements import Measurements
from distir_relax.calibration.microbenchmarks import OpSample, op_samples
from distir_relax.cli import app
from distir_relax.errors import RunError
from distir_relax.runtime.world import ALONE, World


class Clock:
    """Tells the time that the test has let pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def passes(seconds: float, lengths: Sequence[float], most: int = 7, world: Any = ALONE) -> int:
    """How many passes there are where they take so long, in turn."""
    clock, left = Clock(), list(lengths)

    def one() -> None:
        clock.now += left.pop(0)

    return len(Budget(seconds, world, clock).passes(most, one))


def test_passes_are_made_while_there_is_time() -> None:
    assert passes(120, [10] * 7) == 7
    assert passes(120, [30] * 7) == 3
    assert passes(120, [100] * 7) == 1
    assert passes(120, [300] * 7) == 1
    assert passes(0, [300] * 7) == 7
    assert passes(120, [10] * 7, most=2) == 2
    # One long pass: another might be as long.
    assert passes(120, [10, 60, 10, 10, 10, 10, 10]) == 2


def test_time_is_shared_between_measurements() -> None:
    clock = Clock()
    budget = Budget(90, clock=clock)
    assert budget.share(30) == 3.0
    clock.now += 60
    assert (budget.left, budget.share(30)) == (30.0, 1.0)
    clock.now += 60
    assert (budget.left, budget.share(30)) == (0.0, 0.0)
    assert math.isinf(Budget(0, clock=clock).share(30))


class Ranks:
    """A world of two ranks, the first of which says the same always."""

    size = 2

    def __init__(self, first: object) -> None:
        self.first, self.asked = first, 0

    def exchange(self, value: object) -> list[Any]:
        json.dumps(value, allow_nan=False)
        self.asked += 1
        return [self.first, value]


def test_rank_0_decides_for_all() -> None:
    clock = Clock()
    world: Any = Ranks(0.5)
    assert Budget(90, world, clock).share(30) == 0.5
    assert world.asked == 1
    assert math.isinf(Budget(90, Ranks(None), clock).share(30))  # type: ignore[arg-type]
    # Its clock says that there is half a second left, whatever this one says.
    assert passes(1e6, [1.0] * 7, world=Ranks(0.5)) == 1
    assert passes(0, [1.0] * 7, world=Ranks(None)) == 7


def test_steps_that_fit_a_limit() -> None:
    assert steps_within(math.inf, 5.0, 6) == 6
    assert steps_within(10.0, 1.0, 6) == 6
    assert steps_within(3.5, 1.0, 6) == 3
    assert steps_within(0.0, 1.0, 6) == 1
    assert steps_within(1.0, 0.0, 6) == 6


@pytest.mark.parametrize(("limit", "steps"), [(math.inf, 6), (4.5, 2), (0.1, 1)])
def test_steps_of_a_program_end_in_time(limit: float, steps: int) -> None:
    calls: list[object] = []
    manifest = SimpleNamespace(inputs=(), training=None)
    session: Any = lambda inputs, outputs: calls.append(inputs)  # noqa: E731
    session.seconds, session.bundle = 2.0, SimpleNamespace(manifest=manifest)
    world: Any = SimpleNamespace(exchange=lambda value: [value])
    assert time_steps(world, session, 6, limit) == [2.0] * steps
    assert len(calls) == WARM_UP + steps


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 5), (1e-6, 1)])
def test_measuring_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: int) -> None:
    shares: list[float] = []

    def measure_pass(device: str, folder: Path, world: World | None, budget: Budget, crowded: bool) -> Measurements:
        shares.append(budget.share(1))
        return FIRST

    monkeypatch.setattr(calibrate, "measure_pass", measure_pass)
    monkeypatch.setattr(calibrate, "retain_freed_memory", lambda: None)
    calibrate.measure(tmp_path / "m.json", "cpu", 5, tmp_path, ALONE, seconds)
    found = Measurements.of(json.loads((tmp_path / "m.json").read_text()))
    assert len(found.collective_times[0]) == expected * len(FIRST.collective_times[0])
    assert len(shares) == expected
    assert all(math.isinf(share) for share in shares) == (seconds == 0)


def test_each_kind_of_measurement_has_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    def ops(samples: Sequence[OpSample], device: str, world: World | None, limit: float) -> list[list[float]]:
        limits["ops"] = limit
        return [[1.0] for _ in samples]

    def of_programs(folder: Path, dtype: str, device: str, world: World | None, limit: float) -> list[list[float]]:
        limits["programs"] = limit
        return []

    monkeypatch.setattr(measurements, "time_ops", ops)
    monkeypatch.setattr(measurements, "time_programs", of_programs)
    (tmp_path / "float32-000.dist").mkdir()
    measurements.measure_pass("cpu", tmp_path, ALONE, Budget(100, clock=Clock()))
    count = len(op_samples("float32", 1))
    assert 0 < limits["ops"] < 100 / count
    assert limits["programs"] == 10 * limits["ops"]
    assert limits["ops"] * count + limits["programs"] < 100
    measurements.measure_pass("cpu", tmp_path, ALONE)
    assert math.isinf(limits["ops"])


def few(dtype: str, scale: int) -> list[OpSample]:
    """Every ninth sample, of all groups."""
    return op_samples(dtype, scale)[::9]


def measured(noise: float) -> Measurements:
    """Times of a machine like `TRUE`, but for a factor: every other op takes `noise` times as long."""
    whole = made_up(1)
    times = whole.ops["float32"][::9]
    noisy = [[t * (noise if i % 2 else 1.0) for t in row] for i, row in enumerate(times)]
    return Measurements(**{**vars(whole), "ops": {"float32": noisy}, "collectives": [], "collective_times": []})


@pytest.mark.sweep
def test_a_fit_that_is_far_off_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "op_samples", few)
    monkeypatch.setattr(calibrate, "programs", few_programs)
    output = tmp_path / "cpu.toml"

    def run(noise: float, *options: str) -> Any:
        monkeypatch.setattr(calibrate, "measure_ranks", lambda ranks, device, passes, budget: measured(noise))
        return CliRunner().invoke(app, ["calibrate", "-n", "1", "-o", str(output), *options])

    done = run(40.0)
    assert isinstance(done.exception, RunError)
    assert "the fit is not usable: the median error is above 50% for " in done.exception.message
    assert "stop other work" in done.exception.hint
    assert "--budget" in done.exception.hint
    assert [*tmp_path.iterdir()] == []
    done = run(40.0, "--max-error", "1000")
    assert done.exit_code == 0, done.exception
    assert "median error of the fit" in done.stdout
    output.unlink()
    done = run(1.0)
    assert done.exit_code == 0, done.exception
    assert output.exists()
    done = CliRunner().invoke(app, ["calibrate", "-n", "1", "-o", str(tmp_path / "cpu.json")])
    assert "expected the name of a .toml file for the profile" in done.exception.message


def test_the_groups_that_are_off_are_named() -> None:
    with pytest.raises(RunError, match=r"above 50% for rows 110%, sums nan% \(within it: products 12%, views 50%\)"):
        Calibration(TRUE, {"products": 0.12, "rows": 1.1, "views": 0.5, "sums": math.nan}, "a machine").check()
    Calibration(TRUE, {"products": 0.12}, "a machine").check()
