"""A script of accelerate, and the same one moved over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distir_relax.errors import DistIRError
from distir_relax.integrations.accelerate import prepare

Batches = DataLoader[tuple[torch.Tensor, ...]]


def script() -> tuple[nn.Module, torch.optim.Optimizer, Batches, torch.optim.lr_scheduler.LRScheduler]:
    """The objects that a training script makes before `prepare`."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x, y = torch.randn(36, 7), torch.randint(3, (36,))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return model, optimizer, DataLoader(TensorDataset(x, y), batch_size=9), scheduler


def test_a_script_of_accelerate_moves_over() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*script())
    theirs = []
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        theirs.append(loss.item())

    ours, moved = [], script()
    step, batches = prepare(*moved, loss=F.cross_entropy, steps=4, strategy="3/1/1/1")
    for inputs, targets in batches:
        ours.append(step(inputs, targets))

    assert ours == pytest.approx(theirs, rel=1e-5)
    step.copy_to_model(moved[0])
    for a, b in zip(moved[0].parameters(), accelerator.unwrap_model(model).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_mistakes_are_errors() -> None:
    model, optimizer, loader, _ = script()
    with pytest.raises(DistIRError, match="no, bf16 or fp16"):
        prepare(model, optimizer, loader, loss=F.cross_entropy, mixed_precision="fp8")
    with pytest.raises(DistIRError, match="with batches"):
        prepare(model, optimizer, [], loss=F.cross_entropy)
