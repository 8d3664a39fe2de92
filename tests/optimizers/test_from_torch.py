"""Torch's optimizers and schedulers, converted: the steps are torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.optim import lr_scheduler

import distir_relax as dr
from distir_relax.errors import DistIRError
from distir_relax.optimizers import from_torch
from distir_relax.optimizers.from_torch import record_rates

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5, dtype=torch.float64), nn.Tanh(), nn.Linear(5, 3, dtype=torch.float64))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(9, 7, generator=generator, dtype=torch.float64), torch.randint(3, (9,), generator=generator)


class Signum(torch.optim.Optimizer):
    """An optimizer that is not of torch."""

    def __init__(self, params: Any, lr: float = 1e-3, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad.sign(), alpha=-group["lr"] * group["scale"])


def groups(net: nn.Module, **second: Any) -> list[dict[str, Any]]:
    return [{"params": net[0].parameters()}, {"params": net[2].parameters(), **second}]  # type: ignore[index]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda net: torch.optim.Adam(net.parameters(), 0.01, betas=(0.8, 0.9), weight_decay=0.1, amsgrad=True),
    "decoupled adam": lambda net: torch.optim.Adam(net.parameters(), weight_decay=0.1, decoupled_weight_decay=True),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), 0.01, alpha=0.9, momentum=0.5, centered=True),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), 0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters(), 0.1, d=1.3, weight_decay=0.1),
    "adafactor of transformers": lambda net: transformers.optimization.Adafactor(
        net.parameters(), 0.1, eps=(1e-4, 0.2), clip_threshold=1.3, relative_step=False
    ),
    "its decay": lambda net: transformers.optimization.Adafactor(
        net.parameters(), 0.01, decay_rate=-0.6, weight_decay=0.1, relative_step=False, scale_parameter=False
    ),
    "groups": lambda net: torch.optim.AdamW(groups(net, lr=0.03, weight_decay=0.2), 0.01),
    "traced": lambda net: Signum(groups(net, scale=3.0), 0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_those_of_torch(name: str) -> None:
    theirs = model()
    step = dr.compile_training(
        model(), F.cross_entropy, optimizer=from_torch(OPTIMIZERS[name](ours := model()), ours),
        example_batch=batch(0), strategy="3/1/1/1",
    )  # fmt: skip
    optimizer = OPTIMIZERS[name](theirs)
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimizer.step()
        step(x, y)
    parameters = step.parameters()
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameters[key], parameter.detach(), rtol=1e-10, atol=1e-12)


CYCLED: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(groups(net, lr=0.05), 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True),
    "dampened": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, dampening=0.5),
    "adam": lambda net: torch.optim.Adam(groups(net, lr=0.01), 0.02, amsgrad=True),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), 0.02),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), 0.02, momentum=0.9),
}


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=1"])
@pytest.mark.parametrize("name", CYCLED)
def test_the_momentum_is_that_of_one_cycle(name: str, strategy: str) -> None:
    """`OneCycleLR` cycles the momentum, or the first beta, unless told otherwise."""
    theirs = model()
    optimizer = CYCLED[name](theirs)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    mine = CYCLED[name](ours := model())
    step = dr.compile_training(
        ours, F.cross_entropy, optimizer=from_torch(mine, ours, lr_scheduler.OneCycleLR(mine, 0.1, STEPS), steps=STEPS),
        example_batch=batch(0), strategy=strategy,
    )  # fmt: skip
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimizer.step()
        if number < STEPS - 1:
            scheduler.step()
        step(x, y)
    parameters = step.parameters()
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameters[key], parameter.detach(), rtol=1e-10, atol=1e-12)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 11, eta_min=0.001),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], 20),
    "cycles": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=True),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda s: 1 / (s + 1), lambda s: 0.9**s]),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.StepLR(o, 3)], milestones=[5]
    ),
}


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_rates_are_those_of_a_scheduler(name: str, calls: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(groups(net, lr=0.2), 0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    before = copy.deepcopy(scheduler.state_dict()) if name != "sequence" else None
    recorded = record_rates(scheduler, 17, calls)
    if before is not None:
        assert scheduler.last_epoch == before["last_epoch"]
    for step in range(17):
        assert [of_group.lr(step) for of_group in recorded] == [group["lr"] for group in optimizer.param_groups]
        momenta = [0.9 if of_group.momentum is None else of_group.momentum(step) for of_group in recorded]
        assert momenta == [group["momentum"] for group in optimizer.param_groups]
        optimizer.step()
        if (step + 1) % calls == 0:
            scheduler.step()


def test_mistakes_are_errors() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(DistIRError, match="expected the number of steps"):
        from_torch(optimizer, net, scheduler)
    with pytest.raises(DistIRError, match="depend on a metric"):
        from_torch(optimizer, net, lr_scheduler.ReduceLROnPlateau(optimizer), steps=3)
    other = torch.optim.NAdam(net.parameters(), 0.1)
    with pytest.raises(DistIRError, match="one of momenta, too"):
        from_torch(other, net, lr_scheduler.OneCycleLR(other, 0.1, 9), steps=3)
    with pytest.raises(DistIRError, match="of another tensor"):
        from_torch(optimizer, model())
    with pytest.raises(DistIRError, match=r"'0\.weight' is not"):
        from_torch(torch.optim.SGD(net[2].parameters(), 0.1), net)  # type: ignore[index]
    F.cross_entropy(net(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    with pytest.raises(DistIRError, match="that has made no step"):
        from_torch(optimizer, net)
