"""An optimizer added from outside: Lion, which keeps one average and steps by its sign.

Chen et al., Symbolic Discovery of Optimization Algorithms, 2023. Its step is written with ordinary ops of the table;
the compiler writes the new values back, splits them as the parameters are split, and shards them under ZeRO. Run me::

    python examples/extend/add_optimizer.py
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.ir import Value
from distir_relax.ops import Builder


@dataclass(frozen=True)
class Lion(dr.Optimizer):
    """Options as in the paper; `weight_decay` shrinks the weights, apart from the gradient's step."""

    lr: float | dr.Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.check(lr=self.lr, weight_decay=self.weight_decay)

    @property
    def keeps(self) -> tuple[str, ...]:
        """The average of the gradient."""
        return ("exp_avg",)

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Mapping[str, Value]
    ) -> dict[str, Value]:
        """``x - rate * (sign(b1 m + (1 - b1) g) + decay x)``, and ``m <- b2 m + (1 - b2) g``."""
        first, second = self.betas
        average = state["exp_avg"]

        def mixed(beta: float) -> Value:
            kept = g.emit("multiply", average, g.constant(beta, average.tensor.dtype))
            return g.emit("add_scaled", kept, gradient, alpha=1 - beta)

        direction = g.emit("sign", mixed(first))
        if decay := self.decay_of(parameter):
            direction = g.emit("add_scaled", direction, parameter, alpha=float(decay))
        new = g.emit("subtract", parameter, g.emit("multiply", direction, numbers["rate"]))
        return {"exp_avg": mixed(second), "": new}


class TorchLion(torch.optim.Optimizer):
    """The same for torch, to compare with."""

    def __init__(self, parameters: object, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (0.9 * average + 0.1 * p.grad).sign() + group["weight_decay"] * p
                average.mul_(0.99).add_(p.grad, alpha=0.01)
                p.sub_(direction, alpha=group["lr"])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 127), nn.Tanh(), nn.Linear(127, 3)).double()
    batch = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    optimizer = Lion(lr=1e-2, weight_decay=0.1)
    for strategy in ("1/1/1/1", "3/1/1/2,zero=2", "2/2/1/1,zero=1", "1/1/2/3"):
        step = dr.compile_training(
            model, F.mse_loss, optimizer=optimizer, example_batch=batch, strategy=strategy, verify=True
        )
        theirs = copy.deepcopy(model)
        lion = TorchLion(theirs.parameters(), lr=1e-2, weight_decay=0.1)
        losses = []
        for _ in range(3):
            lion.zero_grad()
            loss = F.mse_loss(theirs(batch[0]), batch[1])
            loss.backward()
            lion.step()
            losses.append(step(*batch))
            torch.testing.assert_close(losses[-1], float(loss))
        torch.testing.assert_close(step.parameters(), dict(theirs.named_parameters()), check_dtype=False)
        print(f"{strategy:16} losses {' '.join(f'{loss:.4f}' for loss in losses)}, as with torch")


if __name__ == "__main__":
    main()
