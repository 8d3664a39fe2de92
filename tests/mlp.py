"""The paper's training of an MLP, for programs of any size: layers without bias, half the squared error, SGD."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.ir import Module


def half_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the squared error of each sample, averaged over samples."""
    return F.mse_loss(output, target, reduction="sum") * (0.5 / output.shape[0])


def perceptron(layers: int, width: int, dtype: torch.dtype = torch.float16, device: str = "meta") -> nn.Sequential:
    """Layers of ``width x width``, each a product and a ReLU."""
    linear = (nn.Linear(width, width, bias=False, dtype=dtype, device=device) for _ in range(layers))
    return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in linear))


def training(layers: int, width: int, batch: int, dtype: torch.dtype = torch.float16) -> dr.Training:
    """A step on the meta device: nothing is made."""
    x, y = (torch.empty(batch, width, dtype=dtype, device="meta") for _ in range(2))
    return dr.Training(perceptron(layers, width, dtype), half_squared_error, dr.optim.SGD(lr=0.01), (x, y))


def program(layers: int, width: int, strategy: str, batch: int, dtype: torch.dtype = torch.float16) -> Module:
    """The distributed program of such a step."""
    return training(layers, width, batch, dtype).compile(strategy=strategy).plan.modules["distributed"]
