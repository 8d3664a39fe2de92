"""Products with weights that change, by oneDNN and by the native kernel, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distir_relax.calibration.memory_peak import host_peak
from distir_relax.kernels import products


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use these products on processors for which torch's are faster, too."""
    monkeypatch.setattr(products, "_is_onednn_faster", lambda threads: torch.backends.mkldnn.is_available())
    monkeypatch.setattr(products, "_is_native_faster", lambda threads: True)
    monkeypatch.setattr(products, "_LEAST", 1000)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def agree(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(127, 101, 37), (1, 129, 65), (255, 7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_with_weights(rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, bias = (torch.randn(shape).to(dtype) for shape in ((3, rows, inner), (columns, inner), (columns,)))
    exact = x.double() @ w.double().t()
    agree(products.linear(x, w), exact, dtype)
    agree(products.linear(x[0, 0], w), exact[0, 0], dtype)
    agree(products.linear(x, w, bias), exact + bias, dtype)
    # A weight (in, out), of another layout too, and rows apart from each other.
    agree(products.matmul(x, w.t()), exact, dtype)
    agree(products.matmul(x, w.t().contiguous(), bias), exact + bias, dtype)
    agree(products.linear(x.transpose(0, 1), w), exact.transpose(0, 1), dtype)
    agree(products.linear(torch.stack([x, x], -1)[..., 0], w), exact, dtype)
    # Stacks of matrices, and no rows.
    agree(products.matmul(x, x.mT), x.double() @ x.double().mT, dtype)
    assert products.linear(x[:, :0], w).shape == (3, 0, columns)


@pytest.mark.parametrize("shape", [(771, 127, 101), (3, 96, 333), (256, 97, 128), (513, 299, 96)])
def test_gradients_of_weights(threads: int, shape: tuple[int, int, int]) -> None:
    """Blocks of rows, chunks of columns and tiles that are not whole."""
    torch.manual_seed(0)
    rows, n, k = shape
    a, b = torch.randn(rows, n), torch.randn(rows, k)
    exact = a.double().t() @ b.double()
    agree(products.linear_weight_grad(a, b), exact)
    agree(products.linear_weight_grad(a.view(1, rows, n), b.view(1, rows, k)), exact)
    agree(products.linear_weight_grad(a.t().contiguous().t(), torch.stack([b, b], -1)[..., 1]), exact)
    narrow = a.bfloat16(), b.bfloat16()
    agree(products.linear_weight_grad(*narrow), narrow[0].double().t() @ narrow[1].double(), torch.bfloat16)
    assert products.linear_weight_grad(a[0], b[0]).shape == (n, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_that_was_broadcast_copies_no_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(19, 1, 37).to(dtype).expand(19, 5, 37), torch.randn(37, 101).to(dtype)
    agree(products.matmul(x, w), x.double() @ w.double(), dtype)
    # The result, a copy of the gradient, and workspace; torch's own product takes 19 copies of the weight in bfloat16.
    assert host_peak(lambda: products.matmul(x, w)) < 19 * w.nbytes / 2


def test_nan_stays_in_its_row_and_column() -> None:
    a, b = torch.ones(300, 101), torch.ones(300, 97)
    a[7, 5], b[9, 11] = torch.nan, torch.inf
    found = products.linear_weight_grad(a, b)
    assert found.isnan().any(1).nonzero().tolist() == [[5]]
    assert found.isinf().any(0).nonzero().tolist() == [[11]]
