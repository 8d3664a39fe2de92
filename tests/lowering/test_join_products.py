"""Products of one input, joined in ranks' programs."""

from __future__ import annotations

import pytest
import torch

import distir_relax as dr
from distir_relax.ir import parse, verify
from distir_relax.lowering import JoinProducts
from distir_relax.ops import check

PROGRAM = """module @distributed {
  mesh[0] = device_mesh((2,), ("tp",))
  func @main(
    input %x: f32[6,6] @ {0,1},
    parameter %a: f32[6,6] @ {0,1},
    parameter %b: f32[6,3] @ {0,1},
    parameter %c: f32[6,5] @ {0,1},
    parameter %bias: f32[5] @ {0,1},
  ) {
    %xa: f32[6,6] @ {0,1} = matmul(%x, %a)
    %ya: f32[6,6] @ {0,1} = matmul(%xa, %a)
    %xb: f32[6,3] @ {0,1} = matmul(%x, %b)
    %xc: f32[6,5] @ {0,1} = matmul_bias(%x, %c, %bias)
    %xxa: f32[6,6] @ {0,1} = matmul(%x, %xa)
    %sum: f32[6,6] @ {0,1} = all_reduce(%ya) {axis="tp", op="sum"}
    %late: f32[6,5] @ {0,1} = matmul(%x, %c)
    return "xa": %xa, "xb": %xb, "xc": %xc, "xxa": %xxa, "sum": %sum, "late": %late
  }
}
"""


def test_a_product_moves_neither_before_its_weight_nor_across_communication() -> None:
    joined = JoinProducts().run(parse(PROGRAM))
    verify(joined, check)
    assert [(op.name, [v.name for v in op.results]) for op in joined.main.ops] == [
        ("joined_matmul", ["xa", "xb"]),
        ("matmul", ["ya"]),
        ("matmul_bias", ["xc"]),
        ("matmul", ["xxa"]),
        ("all_reduce", ["sum"]),
        ("matmul", ["late"]),
    ]


class Gated(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(11, 127, bias=bias), torch.nn.Linear(11, 127, bias=bias)
        self.down = torch.nn.Linear(127, 11, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True])
def test_a_sharded_model_runs_joined_products(bias: bool) -> None:
    torch.manual_seed(0)
    model, x = Gated(bias), torch.randn(3, 11)
    plan = dr.compile(model, (x,), shardings={"gate.*": "S[0]", "up.*": "S[0]"}, mesh=3)
    name = "joined_linear_bias" if bias else "joined_linear"
    assert name in {op.name for function in plan.modules["ranked"].functions for op in function.ops}
    torch.testing.assert_close(plan(x), model(x), rtol=1e-5, atol=1e-5)
