"""Products with weights on the tvm backend, whose weights are packed as on the torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import distir_relax as dr
from distir_relax.kernels.packing import can_pack_bfloat16

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_weight_is_packed_once_with_its_bias(dtype: torch.dtype) -> None:
    from distir_relax.runtime.backends.tvm.compile import ProgramText, compile_program
    from distir_relax.runtime.backends.tvm.hoist_constants import Product

    plan = dr.compile(Products().to(dtype).eval(), (torch.ones(3, 5, 63, dtype=dtype),), mesh=1)
    bundle = plan.bundle(backends=("tvm",))
    (program,) = bundle.manifest.programs
    weights = {tensor.name for tensor in bundle.manifest.weights}
    inputs = [i for i, name in enumerate(program.arguments) if name not in weights]
    found = compile_program(ProgramText(bundle.texts["ranked.txt"], program.name), inputs).products
    if dtype in (torch.float32, torch.float64) or (dtype == torch.bfloat16 and can_pack_bfloat16()):
        expected = {Product(True, True, 15), Product(True, False, 15), Product(False, False, 15)}
    else:
        # Narrow floats are multiplied in float32: the weights are transposed and cast before, the bias comes after.
        expected = {Product(False, False, 15)}
    assert set(found) == expected
    assert len(found) == 3
