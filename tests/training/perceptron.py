"""A small model in training."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.bundle import Manifest, read_bundle
from distir_relax.compiler.training import TrainingStep
from tests.training.data import ROWS


class Perceptron(nn.Module):
    """Two products of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric."""
    return (output - target).abs().mean()


def step(
    strategy: str, model: nn.Module | None = None, evaluates: bool = False, averaging: dr.optim.EMA | None = None,
    steps: int = 20,
) -> TrainingStep:  # fmt: skip
    """A step of training, the same for each strategy. Its learning rate falls to 0 in `steps` steps."""
    torch.manual_seed(0)
    return dr.compile_training(
        model or Perceptron(), F.mse_loss, optimizer=dr.optim.AdamW(dr.lr.Cosine(2.0**-5, steps, 3)), clip_norm=1.0,
        strategy=strategy, example_batch=(torch.randn(ROWS, 5), torch.randn(ROWS, 3)), name="perceptron",
        metrics={"error": error} if evaluates else None, averaging=averaging,
    )  # fmt: skip


def saved(strategy: str, folder: Path, steps: int = 20) -> Path:
    """Its bundle."""
    return step(strategy, steps=steps).save(folder / f"{strategy.replace('/', '_')}.dist", backends=("torch",))


def saved_manifest(strategy: str, folder: Path) -> Manifest:
    """The manifest of its bundle."""
    return read_bundle(saved(strategy, folder), verify_weights=False).manifest
