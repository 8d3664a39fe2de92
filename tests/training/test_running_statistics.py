"""State that torch's ops update in place, after steps of training on ranks and in torch on one process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.ops import aten_of


class Norm(nn.Module):
    """A linear layer, and a norm by one op of torch, which updates the buffers that it takes."""

    def __init__(self, op: Callable[..., torch.Tensor], channels: int = 6) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(7, 7), op
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.linear(x), self.mean, self.var)


def functional_batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, training=True, momentum=0.3)


def functional_instance_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x, mean, var, momentum=0.3)


def through_a_view(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    """A norm whose statistics are parts of the buffers."""
    return torch.cat([x[:, :2], F.instance_norm(x[:, 2:], mean[2:], var[2:])], 1)


def repeated(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    """Two norms that move the same statistics; torch has no gradient of the first then."""
    return F.batch_norm(x + functional_instance_norm(x.detach(), mean, var), mean, var, training=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(6)),
    "InstanceNorm1d": lambda: nn.Sequential(nn.Linear(7, 7), nn.InstanceNorm1d(6, track_running_stats=True)),
    "InstanceNorm2d": lambda: nn.Sequential(
        nn.Unflatten(2, (7, 1)), nn.Conv2d(6, 5, 3, padding=1),
        nn.InstanceNorm2d(5, affine=True, track_running_stats=True),
    ),
    **{op.__name__: lambda op=op: Norm(op) for op in (  # type: ignore[misc]
        functional_batch_norm, functional_instance_norm, through_a_view, repeated
    )},
}  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1", "1/2/1/1"])
@pytest.mark.parametrize("name", MODELS)
def test_statistics_equal_torch(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    batches = [(torch.randn(12, 6, 7).double() * 3 + 1, torch.zeros(())) for _ in range(3)]
    own = deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

    def loss(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (y * y).mean() + y[..., 0].sum() / 100 + targets

    step = dr.compile_training(model, loss, optimizer=dr.optim.SGD(lr=0.1), example_batch=batches[0], strategy=strategy)
    for batch in batches:
        optimizer.zero_grad()
        expected = loss(own(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        assert step(*batch) == pytest.approx(expected.item(), abs=1e-10)
    before = dict(model.named_buffers())
    assert any(not torch.equal(before[n], b) for n, b in own.named_buffers())
    step.copy_to_model(model)
    for n, tensor in own.state_dict().items():
        torch.testing.assert_close(model.state_dict()[n], tensor, rtol=1e-9, atol=1e-10)


FUNCTIONAL = {
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_batch_norm_with_update_functional"
}  # fmt: skip
"""Ops that return new statistics, or read them alone."""
WRITES_NOISE = {"rrelu_with_noise"}
"""Ops whose written operand is a scratch tensor that no one reads."""


def test_no_other_op_that_updates_statistics_is_imported() -> None:
    """Of all ops of torch that write to an operand besides the first, or take running statistics."""
    handled = set()
    for overload in torch._C._dispatch_get_all_op_names():
        namespace, _, name = overload.partition("::")
        base, _, kind = name.partition(".")
        if namespace != "aten" or "out" in kind or "backward" in base:
            continue
        arguments = torch._C._get_schema(overload.split(".")[0], kind).arguments
        writes = [a for a in arguments[1:] if a.alias_info is not None and a.alias_info.is_write and not a.is_out]
        takes_statistics = any(a.name.startswith("running_") for a in arguments) and base not in FUNCTIONAL
        if (writes or takes_statistics) and aten_of(f"{base}.{kind or 'default'}", False):
            handled.add(base)
    assert handled - WRITES_NOISE == {"batch_norm", "instance_norm"}
