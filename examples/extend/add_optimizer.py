"""An optimizer added from outside: Signum, which keeps one average and steps by its sign.

Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018. Its step is written with ordinary ops
of the table; the compiler writes the new values back, splits them as the parameters are split, and shards them under
ZeRO. Run me::

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
class Signum(dr.optim.Optimizer):
    """`weight_decay` shrinks the weights, apart from the gradient's step."""

    lr: float | dr.lr.Schedule = 1e-4
    momentum: float = 0.9
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.check(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    @property
    def keeps(self) -> tuple[str, ...]:
        """The average of the gradient."""
        return ("exp_avg",)

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Mapping[str, Value]
    ) -> dict[str, Value]:
        """``m <- b m + (1 - b) g``, and ``x - rate * (sign(m) + decay x)``."""
        kept = g.emit("multiply", state["exp_avg"], g.constant(self.momentum, gradient.tensor.dtype))
        average = g.emit("add_scaled", kept, gradient, alpha=1 - self.momentum)
        direction = g.emit("sign", average)
        if decay := self.decay_of(parameter):
            direction = g.emit("add_scaled", direction, parameter, alpha=float(decay))
        new = g.emit("subtract", parameter, g.emit("multiply", direction, numbers["rate"]))
        return {"exp_avg": average, "": new}


class TorchSignum(torch.optim.Optimizer):
    """The same for torch, to compare with."""

    def __init__(self, parameters: object, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                average.mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(average.sign() + group["weight_decay"] * p, alpha=group["lr"])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 127), nn.Tanh(), nn.Linear(127, 3)).double()
    batch = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    optimizer = Signum(lr=1e-2, weight_decay=0.1)
    for strategy in ("1/1/1/1", "3/1/1/2,zero=2", "2/2/1/1,zero=1", "1/1/2/3"):
        step = dr.compile_training(
            model, F.mse_loss, optimizer=optimizer, example_batch=batch, strategy=strategy, verify=True
        )
        theirs = copy.deepcopy(model)
        signum = TorchSignum(theirs.parameters(), lr=1e-2, weight_decay=0.1)
        losses = []
        for _ in range(3):
            signum.zero_grad()
            loss = F.mse_loss(theirs(batch[0]), batch[1])
            loss.backward()
            signum.step()
            losses.append(step(*batch))
            torch.testing.assert_close(losses[-1], float(loss))
        torch.testing.assert_close(step.parameters(), dict(theirs.named_parameters()), check_dtype=False)
        print(f"{strategy:16} losses {' '.join(f'{loss:.4f}' for loss in losses)}, as with torch")


if __name__ == "__main__":
    main()
