"""Linear layers with packed weights against `F.linear`, for processors that pack one row, and that do not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from distir_relax.kernels import packing
from distir_relax.kernels.packing import pack_joined, pack_linear


@pytest.mark.parametrize("packs_rows", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-12), (torch.float16, 2e-3)],
)
def test_products_are_those_of_the_layer(
    packs_rows: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_is_row_faster_packed", lambda threads: packs_rows)
    generator = torch.Generator().manual_seed(0)
    for shape in ((127, 65), (1, 3), (64, 1), (5, 0), (0, 7)):
        weight = torch.randn(shape, generator=generator).to(dtype)
        for bias in (None, torch.randn(shape[0], generator=generator).to(dtype)):
            for rows in (1, 3, 128):
                layer = pack_linear(weight, bias, rows=rows)
                for sizes in ((0,), (1,), (2, 1), (3, 5), (131,)):
                    x = torch.randn(*sizes, shape[1], generator=generator).to(dtype)
                    found, expected = layer(x), F.linear(x, weight, bias)
                    assert (found.shape, found.dtype) == (expected.shape, dtype)
                    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_joined_products_are_those_of_each_weight(dtype: torch.dtype, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = [drawn(n, 17) for n in (65, 1, 0, 127)]
    biases = [drawn(len(w)) for w in weights]
    given = [w.t().contiguous() if transposed else w for w in weights]
    pairs = [tensor for pair in zip(given, biases, strict=True) for tensor in pair]
    plain = pack_joined(given, transposed=transposed, biased=False, rows=3)
    biased = pack_joined(pairs, transposed=transposed, biased=True, rows=1)
    for rows in (0, 1, 5):
        x = drawn(2, rows, 17)
        expected = [F.linear(x, w) for w in weights], [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
        for found, right in zip((plain(x), biased(x)), expected, strict=True):
            torch.testing.assert_close(tuple(found), tuple(right), rtol=tolerance, atol=tolerance)


def test_one_row_is_packed_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(31, 17)
    monkeypatch.setattr(packing, "panel_product", lambda *_: None)
    for packs in (False, True):
        monkeypatch.setattr(packing, "_is_row_faster_packed", lambda threads, packs=packs: packs)
        assert pack_linear(weight, rows=1).packed is packs
        assert pack_linear(weight, rows=2).packed
