"""The memory that a step takes on real ranks is what the simulator says, and falls as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import distir_relax as dr
from tests.imported_once import ImportedTraining
from tests.runtime.processes import mpirun

COMPARED = [
    "3/1/1/1", "3/1/1/1,zero=1", "3/1/1/1,checkpoint=block", "3/1/1/4", "3/1/1/4,zero=3,checkpoint=block", "1/3/1/1",
    "1/1/3/4",
]  # fmt: skip
# The functions of whose stages take more arguments than Python passes one by one.
DEEP = "1/1/3/5,schedule=zb-h1"
OTHERS = [
    "3/1/1/1,zero=2", "3/1/1/1,zero=3", "3/1/1/1,checkpoint=selective", "1/1/3/4,schedule=gpipe", DEEP,
]  # fmt: skip


class Blocks(nn.Module):
    """Residual feed-forward blocks of odd sizes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(191), nn.Linear(191, 767), nn.GELU(), nn.Linear(767, 191)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x - target).square().mean()


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategies", [COMPARED, OTHERS], ids=["most kinds", "others"])
def test_peaks_are_as_predicted(strategies: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(997, 191), "target": torch.randn(997, 191)}
    torch.save(batch, tmp_path / "batch.pt")
    predicted = []
    imported = {
        count: ImportedTraining(dr.Training(Blocks(count), optimizer=dr.optim.AdamW(), example_batch=batch))
        for count in {14 if strategy is DEEP else 4 for strategy in strategies}
    }
    for number, strategy in enumerate(strategies):
        step = imported[14 if strategy is DEEP else 4].compile(strategy=strategy)
        step.save(tmp_path / f"{number}.dist", ("torch",))
        predicted.append([int(n) for n in dr.simulate(step.plan, profile="dgx2-v100").peak_memory])
    done = mpirun(3, Path(__file__).with_name("memory.py"), tmp_path, limit=180)
    assert done.returncode == 0, done.stderr
    measured = [json.loads((tmp_path / f"{n}.peaks").read_text()) for n in range(len(strategies))]
    for strategy, mine, real in zip(strategies, predicted, measured, strict=True):
        assert real == pytest.approx(mine, rel=0.05), strategy
    if strategies is not COMPARED:
        return
    by = dict(zip(strategies, map(max, measured), strict=True))
    plain = by["3/1/1/1"]
    assert by["3/1/1/1,zero=1"] < plain
    assert max(by["3/1/1/1,checkpoint=block"], by["3/1/1/4"]) < 0.9 * plain
    assert by["3/1/1/4,zero=3,checkpoint=block"] < by["3/1/1/4"]
