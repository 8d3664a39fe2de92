"""The text of each communication step in a rank's program."""

from __future__ import annotations

import torch

import distir_relax as dr


class Layers(torch.nn.Module):
    """Two layers over all positions but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 512), torch.nn.Linear(512, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x[:, 1:]).relu())
        return y


def test_types_of_symbolic_sizes_are_left_out() -> None:
    dims = {"x": {0: dr.Dim("n", min=2), 1: dr.Dim("length", min=3, max=64)}}
    plan = dr.compile(Layers(), (torch.ones(4, 5, 6),), dynamic_shapes=dims, mesh=2, shardings={"up.weight": "S[0]"})
    text = plan.bundle(("torch",)).programs["programs/main_0.py"]
    (step,) = (line for line in text.splitlines() if " = all_reduce(" in line)
    (op,) = (op for op in plan.modules["ranked"].function("main_0").ops if op.name == "all_reduce")
    assert "," in str(op.results[0].tensor)
    result, operand = op.results[0].name, op.operands[0].name
    assert step == f'    {op.attrs["step"]}: "%{result} = all_reduce(%{operand})  # {op.location}",'
