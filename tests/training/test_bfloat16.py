"""Training with ``precision="bf16"``: what torch's autocast keeps in float32 is not rounded, and sums are float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError


def by_torch(model: nn.Module, loss: Callable[..., Any], batches: list[Any], lr: float) -> list[float]:
    """The losses of SGD under autocast."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def compiled(model: nn.Module, batch: Any, strategy: str = "1/1/1/1", loss: Any = F.mse_loss, **options: Any) -> Any:
    options = {"optimizer": dr.optim.SGD(lr=0.1), "precision": "bf16", **options}
    return dr.compile_training(copy.deepcopy(model), loss, example_batch=batch, strategy=strategy, **options)


class Net(nn.Module):
    """Products, norms of both kinds, and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 127), nn.LayerNorm(127), nn.Linear(127, 5)
        self.batch_norm, self.last = nn.BatchNorm1d(5, momentum=0.01), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.norm(self.up(x))))
        return self.last(self.batch_norm(x))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=3", "1/2/1/1", "1/1/2/3", "2/1/1/3,zero=2"])
def test_steps_are_those_of_autocast(strategy: str) -> None:
    torch.manual_seed(0)
    model = Net()
    batches = [(torch.randn(13, 5), torch.randn(13, 3)) for _ in range(4)]
    step = compiled(model, batches[0], strategy)
    losses = [step(*batch) for batch in batches]
    torch.testing.assert_close(losses, by_torch(model, F.mse_loss, batches, 0.1), rtol=3e-3, atol=0.0)
    assert {value.dtype for value in step.parameters().values()} == {torch.float32}


def test_models_without_data_are_cast_too() -> None:
    """Torch has no autocast of the meta device."""
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, batch = Net(), (torch.zeros(13, 5), torch.zeros(13, 3))
        module = dr.Training(model, F.mse_loss, dr.optim.AdamW(), batch, precision="bf16").read().imported.module
        found.append([(op.name, [str(v.type) for v in op.results]) for op in module.main.ops])
    assert found[0] == found[1]
    assert ("linear", ["bf16[13,127]"]) in found[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_gradients_of_microbatches_are_summed_in_float32(precision: str) -> None:
    """A sum of 512 gradients of about one, of bfloat16, would stay at 256."""
    torch.manual_seed(0)
    model = nn.Linear(7, 5, bias=False)
    x, y = 1 + 0.1 * torch.randn(512, 7), torch.zeros(512, 5)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.float().sum() + (0 * target).sum()

    before = model.weight.detach().clone()
    step = compiled(model, (x, y), "1/1/1/512", loss, optimizer=dr.optim.SGD(lr=1.0), precision=precision)
    step(x, y)
    gradient = before - step.parameters()["weight"]
    torch.testing.assert_close(gradient, x.bfloat16().float().sum(0).expand(5, 7), rtol=3e-3, atol=0.0)


def test_gradients_of_ranks_are_summed_in_float32_unless_asked_otherwise() -> None:
    model = nn.Sequential(nn.Linear(7, 31), nn.GELU(), nn.Linear(31, 3))
    batch = torch.randn(12, 7), torch.randn(12, 3)
    for strategy in ("3/1/1/1", "3/1/1/2,zero=2"):
        for dtype in (None, "float32", "bf16"):
            step = compiled(model, batch, strategy, reduce_dtype=dtype)
            module = step.plan.modules["distributed"]
            ops = [op for f in module.functions for op in f.ops if op.name in ("all_reduce", "reduce_scatter")]
            matrices = {op.operands[0].placed.dtype for op in ops if len(op.operands[0].placed.local(0).shape) == 2}
            assert matrices == {"bfloat16" if dtype == "bf16" else "float32"}
            losses = [step(*batch) for _ in range(3)]
            torch.testing.assert_close(losses, by_torch(model, F.mse_loss, [batch] * 3, 0.1), rtol=5e-3, atol=0.0)
    wide = nn.Linear(512, 2048)
    traffic = [
        max(dr.simulate(compiled(wide, (torch.randn(6, 512), torch.randn(6, 2048)), "3/1/1/1", reduce_dtype=dtype).plan,
                        profile="dgx-a100").communicate)
        for dtype in (None, "bf16")
    ]  # fmt: skip
    assert traffic[0] > 1.3 * traffic[1]
    with pytest.raises(DistIRError, match="expected a reduce_dtype of None, float32, bf16, fp16, found 'bfloat16'"):
        compiled(model, batch, reduce_dtype="bfloat16")
    with pytest.raises(DistIRError, match="`deterministic` adds up gradients in float32"):
        compiled(model, batch, "3/1/1/1", reduce_dtype="bf16", deterministic=6)


class Counting(nn.Module):
    """A linear layer with a running mean and a count of its calls, in buffers of float32."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.tensor(255.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            self.calls += 1
            self.mean.mul_(0.999).add_(0.001 * y.detach().float().mean(0))
        return y - self.mean


def test_state_is_not_rounded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), nn.BatchNorm1d(5, momentum=0.003))
    batches = [(2 + torch.randn(11, 3), torch.randn(11, 5)) for _ in range(40)]
    step = compiled(model, batches[0], optimizer=dr.optim.SGD(lr=1e-3))
    for batch in batches:
        step(*batch)
    by_torch_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(by_torch_model.parameters(), lr=1e-3)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = F.mse_loss(by_torch_model(x), y)
        value.backward()
        optimizer.step()
    state = {name.removesuffix(".new"): value for name, value in step.plan.session().state().items()}
    for name, value in by_torch_model.named_buffers():
        if value.is_floating_point():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)
    assert state["0.calls"] == 295


class Years(nn.Module):
    """A model that normalizes its input, which bfloat16 would round to multiples of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, year: torch.Tensor) -> torch.Tensor:
        return self.layers((year - 2010) / 20)


def test_inputs_and_targets_are_not_rounded() -> None:
    torch.manual_seed(0)
    years = torch.arange(1990.0, 2031)[:, None]
    batch = years, torch.sin((years - 2010) / 10)
    model = Years()
    step = compiled(model, batch)
    losses = [step(*batch) for _ in range(60)]
    torch.testing.assert_close(losses, by_torch(model, F.mse_loss, [batch] * 60, 0.1), rtol=0.02, atol=0.0)
    assert losses[-1] < 0.2 * losses[0]
    # Numbers of 998 to 1002 would be one of two.
    targets = 1000 + 2 * batch[1]
    assert compiled(Offset(), (targets, targets))(targets, targets) == 0


class Offset(nn.Module):
    """The identity at first."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset
