"""Pipelines that `distir validate` runs: what they are, what is compared, and what a short run says of a few."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.calibration import validate
from distir_relax.calibration.configurations import read_configurations
from distir_relax.cost.profile import load_profile
from distir_relax.errors import DistIRError, ImportModelError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
A_FEW = """
from tests.calibration.test_validate_pipelines import a_few as configurations
"""


def a_few() -> dict[str, Any]:
    """A small model under two schedules and two numbers of microbatches, and one of its weights alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(191, 383), nn.GELU(), nn.Linear(383, 191)) for _ in range(5)))
    batch, names = (torch.randn(307, 191), torch.randn(307, 191)), ("3,schedule=gpipe", "3,schedule=zb-h1", "5")
    found: dict[str, Any] = {
        name: dr.compile_training(
            model, nn.functional.mse_loss, optimizer=dr.optim.SGD(lr=0.1), example_batch=batch, strategy=f"1/1/2/{name}"
        )
        for name in names
    }
    return {**found, "plan": dr.compile(model, (batch[0],), strategy="1/1/2/3,schedule=streaming")}


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "few.py").write_text(A_FEW)
    return f"{tmp_path / 'few.py'}:configurations"


def test_there_are_forty_of_three_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import pipeline_validation as made

    asked: list[tuple[str, str]] = []

    def noted(model: Any, loss: Any, name: str, strategy: str, **options: Any) -> None:
        asked.append((name, strategy))

    monkeypatch.setattr(dr, "compile_training", noted)
    assert len(made.configurations()) == len(asked) >= 40
    assert {name for name, _ in asked} == {"gpt2", "mlp", "encoder"}
    strategies = [dr.Strategy.parse(text) for _, text in asked]
    assert {s.schedule for s in strategies} == {"gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"}
    assert {1, 2, 3, 5, 7, 11, 16} <= {s.microbatches for s in strategies}
    assert {s.checkpoint for s in strategies} == {"none", "block"}
    assert {s.devices for s in strategies} == {2}


@pytest.mark.sweep
def test_groups_differ_in_what_is_compared_alone(target: str) -> None:
    def groups(*compared: str) -> list[str]:
        return [c.group for c in read_configurations([target], compared)]

    gpipe, zero_bubble, other, plan = groups("schedule", "chunks")
    assert gpipe == zero_bubble
    assert len({gpipe, other, plan}) == 3
    # A batch that is cut into other parts is another one.
    assert len(set(groups("schedule", "checkpoint"))) == 3
    assert groups() == ["", "", "", ""]
    with pytest.raises(DistIRError, match="strategies have no field 'scheduel'"):
        groups("scheduel")


def test_a_target_without_configurations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("def configurations():\n    return {}\n\ndef wrong():\n    return {'a': 3}\n")
    with pytest.raises(ImportModelError, match="no configuration"):
        read_configurations([f"{tmp_path / 'none.py'}:configurations"], ())
    with pytest.raises(ImportModelError, match="expected a Plan"):
        read_configurations([f"{tmp_path / 'none.py'}:wrong"], ())


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_peaks_are_measured_beside_times(target: str) -> None:
    found = validate.validate([target], load_profile("cpu-local"), steps=2, passes=1)
    assert [o.name for o in found.outcomes] == ["3,schedule=gpipe", "3,schedule=zb-h1", "5", "plan"]
    assert all(o.ranks == len(o.measured_peaks) == len(o.predicted_peaks) == 2 for o in found.outcomes)
    assert all(1e-4 < o.measured < 10 and 1e-5 < o.predicted < 1 for o in found.outcomes), "seconds"
    weights = 4 * 5 * (2 * 191 * 383 + 191 + 383)
    assert all(weights < sum(o.measured_peaks) < 40 * weights for o in found.outcomes), "bytes"
    for outcome in found.outcomes[:-1]:
        assert outcome.measured_peaks == pytest.approx(outcome.predicted_peaks, rel=0.05), outcome.name
    assert {pair.faster.group for pair in found.pairs} <= {found.outcomes[0].group}
