"""Predicted peaks of steps whose attention has native kernels, against those of torch's allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.bundle import local_bytes
from distir_relax.calibration.measure import random_inputs
from distir_relax.calibration.memory_peak import host_peak
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.kernels.packing import can_pack_bfloat16
from distir_relax.runtime.session import Session
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine


class Attending(nn.Module):
    """Attention to all positions, a layer that widens, and the mean over positions, whose gradient is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(56, 168), nn.Linear(56, 224), nn.Linear(224, 56)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 7, 8).permute(2, 0, 3, 1, 4).unbind()
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        y: torch.Tensor = (x + self.down(F.gelu(self.up(x)))).mean(1)
        return y


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_peak_of_a_step_with_native_attention(precision: str | None) -> None:
    torch.manual_seed(0)
    batch = torch.randn(19, 45, 56), torch.randn(19, 56)
    step = dr.compile_training(
        Attending(),
        F.mse_loss,
        optimizer=dr.optim.SGD(lr=1e-3),
        example_batch=batch,
        strategy="1/1/1/1",
        precision=precision,
    )
    bundle = step.bundle(("torch",))
    session, inputs = Session(bundle), random_inputs(bundle.manifest)
    weights = [local_bytes(w, bundle.manifest.mesh, 0) for w in bundle.manifest.weights]
    resident = sum(t.nbytes for t in inputs.values()) + sum(weights)

    def run() -> None:
        session(inputs, outputs=())

    run()
    measured = resident + host_peak(run)
    module = fuse_for_ranks(step.plan.modules["distributed"])
    predicted = simulate_module(module, replace(machine(1), kind="cpu")).peak_memory[0]
    # The gradient that is broadcast is copied before a product, 4 % of the peak in bfloat16, which is not predicted,
    # and neither are the copies of oneDNN, which multiplies bfloat16 where the processor does.
    by_onednn = precision is not None and can_pack_bfloat16()
    assert predicted == pytest.approx(measured, rel=0.09 if by_onednn else 0.05)
