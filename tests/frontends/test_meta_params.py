"""Models on the meta device, buffers included: trained in the simulator, and refused where data is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import BundleError

SAMPLES, TOKENS, WIDTH, WORDS = 7, 5, 31, 127


class Model(nn.Module):
    """Buffers of each kind: looked up with, mixed with a constant and with the input, a number, and written to."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.up, self.norm, self.head = nn.Linear(WIDTH, 64), nn.BatchNorm1d(TOKENS), nn.Linear(64, WORDS)
        self.register_buffer("positions", torch.arange(TOKENS))
        self.register_buffer("rows", torch.ones(TOKENS, TOKENS), persistent=False)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.rows.to(x.device) + torch.arange(TOKENS, device=x.device)
        mixed = mask.softmax(-1) @ (self.words(x) + self.places(self.positions)) * self.scale
        return self.head(self.norm(torch.relu(self.up(mixed))))


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def training(model: nn.Module, device: str) -> dr.Training:
    """The model trained on a batch on a device."""
    batch = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64, device=device)
    return dr.Training(model, loss, dr.optim.AdamW(), (batch, batch))


def hollow() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("strategy", ["3/1/1/1,zero=1", "1/2/1/3"])
def test_a_model_without_data_is_predicted_as_the_one_with_data(device: str, strategy: str) -> None:
    model = hollow()
    before = dict(model.named_buffers())
    found = dr.simulate(training(model, device), profile="dgx-h100", strategy=strategy)
    real = dr.simulate(training(Model(), "cpu"), profile="dgx-h100", strategy=strategy)
    assert found.peak_memory.tolist() == real.peak_memory.tolist()
    assert found.makespan == real.makespan
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


def test_parameters_with_data_and_buffers_without() -> None:
    """What is computed from such buffers alone has no data: a run refuses it by name."""
    model = Model()
    model.rows = model.rows.to("meta")
    x = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    plan = dr.compile(model.eval(), (x,), strategy="3/1/1/1")
    assert plan.imported.tensors["words.weight"].device.type == "cpu"
    assert [name for name, tensor in plan.imported.tensors.items() if tensor.is_meta] != []
    with pytest.raises(BundleError, match="has no data: it is on the meta device"):
        plan(x)


@pytest.mark.parametrize("use", [lambda step, x, path: step(x, x), lambda step, x, path: step.save(path)])
def test_a_step_without_data_is_neither_run_nor_saved(
    use: Callable[[dr.TrainingStep, torch.Tensor, Path], object], tmp_path: Path
) -> None:
    step = training(hollow(), "cpu").compile(strategy="3/1/1/1")
    x = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    with pytest.raises(BundleError, match="has no data: it is on the meta device"):
        use(step, x, tmp_path / "step.dist")
    assert not (tmp_path / "step.dist").exists()
