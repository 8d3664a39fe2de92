"""Steps of training by a program and by torch's own optimizers, on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import distir_relax as dr
from distir_relax.autodiff import Differentiate
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret import interpret
from distir_relax.ir import Module, parse, print_module, verify
from distir_relax.ops import check
from distir_relax.optimizers import Optimize, rates_of, with_state

Args = tuple[torch.Tensor, ...]


class Perceptron(nn.Module):
    """Two products of odd sizes, and half the mean squared error."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((self.down(torch.tanh(self.norm(self.up(x)))) - target) ** 2).mean() / 2


def batches(count: int, rows: int = 11, dtype: torch.dtype = torch.float64) -> list[Args]:
    """Inputs and targets, the first of which are far larger than the others."""
    drawn = torch.Generator().manual_seed(3)
    shapes = (rows, 5), (rows, 3)
    return [
        tuple(torch.randn(shape, generator=drawn, dtype=dtype) * (40 if i == 0 else 1) for shape in shapes)
        for i in range(count)
    ]


def training(model: nn.Module, args: Args, step: Optimize, *before: Any) -> tuple[Any, Module]:
    """The imported model, and its module with a step of training."""
    imported = import_torch(model, args)
    module = imported.module
    for one in (*before, Differentiate(), step):
        module = one.run(module)
        verify(module, check)
    assert parse(print_module(module)) == module
    return imported, module


def training_plan(model: nn.Module, args: Args, step: Optimize, **options: Any) -> dr.Plan:
    """A plan of a step of training, its state at zero."""

    def passes(given: Sequence[Any]) -> list[Any]:
        outline, *rest = given
        return [outline, Differentiate(), step, *rest]

    plan = dr.compile(model, args, passes=passes, **options)
    tensors = with_state(plan.modules["global"], plan.imported.tensors)
    return replace(plan, imported=replace(plan.imported, tensors=tensors))


def trained(imported: Any, module: Module, step: Optimize, data: Sequence[Args]) -> list[dict[str, torch.Tensor]]:
    """What all tensors that the program changes are after each step, by name; the loss as ``loss``."""
    tensors = with_state(module, imported.tensors)
    found = []
    for number, args in enumerate(data):
        schedules = rates_of(step.optimizer).items()
        rate = {name: torch.tensor(schedule(number), dtype=torch.float64) for name, schedule in schedules}
        outputs = interpret(module, {**tensors, **imported.flatten(args, {}), **rate})
        new = updated(outputs)
        tensors |= new
        found.append({**new, "loss": outputs["output"]})
    return found


def updated(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The new values among a program's outputs, by the names of what they replace."""
    return {name.removesuffix(".new"): value for name, value in outputs.items() if name.endswith(".new")}


def by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Args], clip: float | None = None
) -> list[dict[str, torch.Tensor]]:
    """The same by torch: parameters, and their state under ``NAME.KEY``."""
    found = []
    for args in data:
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        new = {"loss": loss.detach().clone()}
        for name, parameter in model.named_parameters():
            new[name] = parameter.detach().clone()
            new |= {
                f"{name}.{key}": value.clone()
                for key, value in optimizer.state[parameter].items()
                if torch.is_tensor(value) and value.dim()
            }
        found.append(new)
    return found
