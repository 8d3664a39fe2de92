"""Products with weights on the tvm backend, whose weights are packed as on the torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import distir_relax as dr

pytest.importorskip("tvm")
pytestmark = pytest.mark.timeout(120)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Products(torch.nn.Module):
    """Weights of both layouts, with a bias and without; one is used twice, and one product is used without its bias."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = torch.nn.Linear(63, 127)
        self.down = torch.nn.Linear(127, 63, bias=False)
        self.right = torch.nn.Parameter(torch.randn(63, 33, generator=generator) / 8)
        self.shift = torch.nn.Parameter(torch.randn(33, generator=generator))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.gelu(self.up(x), approximate="tanh")
        z = self.down(torch.sigmoid(self.up(self.down(y))))
        product = z @ self.right
        return product + self.shift, product


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 63), (3, 5, 63)], ids=str)
def test_products_are_those_of_torch(shape: Sequence[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Products().to(dtype).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    plan = dr.compile(model, (x,), mesh=1)
    with torch.no_grad():
        exact = Products.forward(model.double(), x.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 4 * torch.finfo(dtype).eps)
    for found, value in zip(plan(x, backend="tvm"), exact, strict=True):
        torch.testing.assert_close(found.double(), value, atol=tolerance, rtol=tolerance)


def test_each_weight_is_packed_once_with_its_bias() -> None:
    from distir_relax.runtime.backends.tvm.compile import ProgramText, compile_program

    plan = dr.compile(Products().eval(), (torch.ones(3, 5, 63),), mesh=1)
    bundle = plan.bundle(backends=("tvm",))
    (program,) = bundle.manifest.programs
    found = compile_program(ProgramText(bundle.texts["ranked.txt"], program.name))
    assert found.packed == ("up.weight.packed", "down.weight.packed", "right.packed")
    assert found.arguments == ("x", "shift")
    assert found.preparation.count("pack_linear(") == 3
    assert 'pack_linear(weights["up.weight"], weights["up.bias"], rows=15)' in found.preparation


class Families(torch.nn.Module):
    """Products of one input with several weights, and one of weights in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(32, n) for n in (7, 13, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tanh(part(x)) for part in self.parts)


@pytest.mark.parametrize("options", [{}, {"precision": "int8"}, {"precision": "bf16"}], ids=str)
def test_joined_and_quantized_products(options: dict[str, str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 32)
    plan = dr.compile(Families().eval(), (x,), mesh=1, **options)
    tolerance = 1e-2 if "bf16" in options.values() else 1e-5
    for found, expected in zip(plan(x, backend="tvm"), plan(x, backend="torch"), strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
