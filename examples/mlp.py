"""A first annotated model: a feed-forward block, its inner dim split over the devices.

From Python:      python examples/mlp.py
From the shell:   distir compile examples/mlp.py:build -o mlp.dist --ranks 3
                  distir show mlp.dist --stage sharded
                  distir launch -n 3 mlp.dist --input mlp.npz --output y.npz
"""

import numpy as np
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax import annotate_sharding


class MLP(torch.nn.Module):
    """Two linear layers. One mark is enough: the rest follows from it."""

    def __init__(self, mesh: dr.DeviceMesh, width: int = 64, inner: int = 127) -> None:
        super().__init__()
        self.mesh = mesh
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = annotate_sharding(self.up.weight, self.mesh, "S[0]")
        return self.down(F.gelu(F.linear(x, weight, self.up.bias)))


def build(ranks: int = 2, tail: str = "ragged") -> dr.Plan:
    """The plan for `ranks` devices; `distir compile examples/mlp.py:build` calls this."""
    torch.manual_seed(0)
    model = MLP(dr.DeviceMesh((ranks,), ("tp",))).eval()
    return dr.compile(model, example_inputs=(torch.randn(5, 64),), tail=tail, name="mlp")


if __name__ == "__main__":
    plan = build()
    x = torch.randn(5, 64)
    np.savez("mlp.npz", x=x.numpy())
    y = plan(x)  # runs here: the ranks are threads of this process
    print(plan.text("sharded"))
    print("wrote mlp.npz; y =", tuple(y.shape))
