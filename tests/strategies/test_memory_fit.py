"""The nearest strategy that fits: what is tried in which order, against a formula of memory and on a real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import DistIRError
from distir_relax.ir import Module
from distir_relax.simulation.simulation import Alternative, Peak, Simulation
from distir_relax.strategies.memory_fit import MOST, nearest_fit
from tests.machines import machine


def predicted(strategy: dr.Strategy, memory: float, activations: float = 6400.0, devices: int = 64) -> Simulation:
    """A run of a model whose memory is a formula: 160 of weights, as much of gradients, twice that of state."""
    s = strategy
    lies = [s.data if s.zero >= stage else 1 for stage in (3, 2, 1)]
    weights = sum(size / (s.tensor * parts) for size, parts in zip((160, 160, 320), lies, strict=True))
    kept = {"none": 1.0, "selective": 0.6, "block": 0.2}[s.checkpoint]
    live = activations * kept / (s.data * s.tensor * s.microbatches)
    peak = Peak(int(weights + live), (0, 0, 0, 0, 0), ())
    profile = replace(machine(devices), memory=memory)
    ranks = np.zeros(s.devices, dtype=int)
    return Simulation(
        Module("distributed", ()), profile, ranks, [np.arange(s.devices)], [10**15], [[0]], [0], [peak], [], []
    )


@pytest.mark.parametrize(
    ("given", "activations", "memory", "expected"),
    [
        ("4/2/1/1", 800, 300, "4/2/1/1,zero=1"),  # 420: state 160 -> 40
        ("4/2/1/1", 800, 250, "4/2/1/1,zero=2"),  # 300: gradients 80 -> 20
        ("4/2/1/1,zero=1", 800, 250, "4/2/1/1,zero=2"),
        ("4/2/1/1", 6400, 730, "4/2/1/2"),  # 1120: activations 800 -> 400
        ("4/2/1/3", 19200, 730, "4/2/1/6"),
        ("4/2/1/1", 6400, 425, "4/2/1/8"),
        ("2/2/1/32,zero=2", 2560, 205, "2/2/1/32,zero=2,checkpoint=block"),
        ("1/1/1/64", 640, 648, "1/1/1/64,checkpoint=selective"),
        ("1/1/1/64", 640, 643, "1/1/1/64,checkpoint=block"),
        ("4/2/1/1", 8, 85, "4/2/1/1,zero=3"),
        ("4/2/1/1", 6400, 270, "4/2/1/8,zero=2"),
        ("4/2/1/1", 6400, 165, "4/2/1/8,zero=2,checkpoint=block"),
        ("4/2/1/1", 6400, 105, "4/2/1/8,zero=3,checkpoint=block"),
        ("5/1/1/1,zero=3,checkpoint=block", 6400, 300, "5/1/1/2,zero=3,checkpoint=block"),
        ("1/3/1/64", 6, 108, "1/6/1/64"),
        ("1/3/1/64", 6, 55, "1/12/1/64"),
    ],
)  # fmt: skip
def test_the_change_that_costs_least_is_found(given: str, activations: float, memory: float, expected: str) -> None:
    """Samples are 64: as many as ranks times microbatches may be."""
    strategy = dr.Strategy.parse(given)
    found = predicted(strategy, memory, activations)
    assert not found.fits
    alternative = nearest_fit(found, strategy, True, 64, lambda s: predicted(s, memory, activations))
    assert alternative is not None
    assert alternative.fits
    assert alternative.peak <= memory
    assert alternative.strategy == expected
    assert alternative.tried <= MOST


def test_where_nothing_fits_the_search_ends_with_what_needs_least() -> None:
    tried: dict[dr.Strategy, Simulation] = {}

    def simulate(strategy: dr.Strategy) -> Simulation:
        if strategy.checkpoint == "selective":
            raise DistIRError("the model has no blocks")
        assert strategy not in tried
        tried[strategy] = predicted(strategy, 1.0)
        return tried[strategy]

    given = dr.Strategy.parse("4/2/1/1")
    found = nearest_fit(predicted(given, 1.0), given, True, 64, simulate)
    assert found is not None
    assert not found.fits
    assert found.tried == len(tried) <= MOST
    assert found.peak == min(s.peaks[0].bytes for s in tried.values())
    assert {s.devices for s in tried} == {8, 16, 32}
    assert all(s.data * s.microbatches <= 64 for s in tried)
    assert str(found).startswith(f"none of {len(tried)} other strategies tried would; {found.strategy} needs least")


def test_what_has_no_gradients_is_not_given_checkpoints_or_state_in_parts() -> None:
    given = dr.Strategy.parse("3/1/1/1")
    tried: list[dr.Strategy] = []

    def simulate(strategy: dr.Strategy) -> Simulation:
        tried.append(strategy)
        return predicted(strategy, 1.0, devices=6)

    nearest_fit(predicted(given, 1.0, devices=6), given, False, 7, simulate)
    assert {s.checkpoint for s in tried} == {"none"}
    assert {s.zero for s in tried} <= {0, 3}
    assert max(s.devices for s in tried) == 6
    assert nearest_fit(predicted(dr.Strategy(), 1.0, devices=1), dr.Strategy(), False, 1, simulate) is None


def test_microbatches_that_do_not_help_are_not_combined() -> None:
    def simulate(strategy: dr.Strategy) -> Simulation:
        seen.append(strategy)
        return predicted(strategy.replace(microbatches=1), 100, 800)

    seen: list[dr.Strategy] = []
    given = dr.Strategy.parse("4/2/1/1")
    found = nearest_fit(predicted(given, 100, 800), given, True, 64, simulate)
    assert found is not None
    assert found.strategy == "4/2/1/1,zero=3,checkpoint=block"
    assert [str(s) for s in seen if s.microbatches > 1] == ["4/2/1/8"]


def test_another_split_is_found_where_a_batch_is_not_worked_through_in_parts() -> None:
    def simulate(strategy: dr.Strategy) -> Simulation:
        """Activations are whole along the tensor axis."""
        if strategy.microbatches > 1:
            raise DistIRError("no parts")
        return predicted(strategy, 172, 80 * strategy.tensor, devices=4)

    given = dr.Strategy.parse("1/4/1/1")
    found = nearest_fit(simulate(given), given, True, 8, simulate)
    assert found is not None
    assert found.strategy == "2/2/1/1,zero=3,checkpoint=block"


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (1.03, "4/2/1/8 would (27.9 GB, 3% slower)"),
        (0.5, "4/2/1/8 would (27.9 GB, 50% faster)"),
        (1.001, "4/2/1/8 would (27.9 GB, as fast)"),
    ],
)
def test_an_alternative_says_what_it_costs(times: float, text: str) -> None:
    assert str(Alternative("4/2/1/8", 8, True, 27_900_000_000, times, 3)) == text


class Block(nn.Module):
    """A residual block whose inside is wider than what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(31), nn.Linear(31, 127), nn.Linear(127, 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def training(samples: int) -> dr.Training:
    """Four blocks, trained with Adam on a batch of so many samples."""
    model = nn.Sequential(*(Block() for _ in range(4)))
    return dr.Training(
        model, nn.functional.mse_loss, dr.optim.AdamW(), (torch.randn(samples, 31), torch.randn(samples, 31))
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        (15, 0.8, "3/1/1/1,zero=1"),
        (3000, 0.8, "3/1/1/2"),
        (3, 0.02, ""),
    ],
)
def test_on_a_real_model_what_is_named_fits(samples: int, share: float, expected: str) -> None:
    """The alternative, compiled by itself, has the memory and time that were told, without another import."""
    task = training(samples)
    roomy = dr.load_profile("dgx-h100")
    whole = dr.simulate(task, profile=roomy, strategy="3/1/1/1")
    assert whole.fits
    assert whole.alternative is None
    small = replace(roomy, devices=3, memory=float(whole.peak_memory.max()) * share)
    found = dr.simulate(task, profile=small, strategy="3/1/1/1")
    other = found.alternative
    assert other is not None
    own = dr.simulate(task, profile=small, strategy=other.strategy)
    assert other.peak == own.peak_memory.max()
    assert other.times == own.makespan / found.makespan
    assert other.fits == own.fits == bool(expected)
    assert not expected or other.strategy == expected
    assert repr(found).splitlines()[-1].startswith("does not fit: ")
    assert found.as_json()["alternative"]["strategy"] == other.strategy


MODEL = """
import torch
import distir_relax as dr
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(31, 127), nn.ReLU(), nn.Linear(127, 31))
    return dr.Training(model, nn.functional.mse_loss, dr.optim.AdamW(), (torch.zeros(7, 31), torch.zeros(7, 31)))
"""


def test_the_command_says_what_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and state of 2 x 31 x 127 weights are 32 kB each, and twice that."""
    file, machine_file = tmp_path / "train.py", tmp_path / "small.toml"
    file.write_text(MODEL)
    text = (Path(dr.__file__).parent / "cost" / "profiles" / "dgx-h100.toml").read_text()
    lines = ["memory = 1e5" if line.startswith("memory") else line for line in text.splitlines()]
    machine_file.write_text("\n".join(lines))
    calls: list[str] = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: calls.append("") or export(*a, **k))
    done = CliRunner().invoke(
        app, ["simulate", f"{file}:build", "--profile", str(machine_file), "--strategy", "3/1/1/1"]
    )
    assert done.exit_code == 0, done.output
    assert "does not fit: " in done.output
    assert " of 100 kB on device 0; 3/1/1/1,zero=1 would (" in done.output
    assert len(calls) == 1
