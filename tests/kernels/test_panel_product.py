"""The native product, on forms of oneDNN for processors with AVX-512, and beside oneDNN."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from distir_relax.kernels import packing
from distir_relax.kernels.native import PANEL, Capability, host_target, panel_product
from distir_relax.kernels.packing import pack_linear


def panels(weight: torch.Tensor) -> torch.Tensor:
    """The form that oneDNN has on processors with AVX-512: it may be another on this one."""
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    rows, columns = -(-weight.shape[1] // 16) * 16, -(-weight.shape[0] // PANEL) * PANEL
    padded = weight.new_zeros(columns, rows)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(columns // PANEL, PANEL, rows // pair, pair).permute(0, 2, 1, 3).contiguous()


DOTS = [False, True][: 1 + host_target().can(Capability.BFLOAT16_DOT)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "dots"), [(torch.float32, 1e-5, False), *((torch.bfloat16, 4e-3, dots) for dots in DOTS)]
)
def test_products(dtype: torch.dtype, tolerance: float, dots: bool, biased: bool) -> None:
    dtype_name = str(dtype).removeprefix("torch.")
    kernel = panel_product(dtype_name, biased, dots)
    assert kernel is not None
    generator = torch.Generator().manual_seed(0)
    for columns, inner in ((1, 2), (64, 16), (127, 66), (200, 1536)):
        weight = torch.randn(columns, inner, generator=generator).to(dtype)
        bias = torch.randn(columns, generator=generator).to(dtype)
        packed = panels(weight)
        for rows in (1, 2, 3, 7, 9, 21, 57):
            x = torch.randn(rows, inner, generator=generator).to(dtype)
            result = torch.full((rows, columns), torch.nan, dtype=dtype)
            addresses = x.data_ptr(), packed.data_ptr(), bias.data_ptr(), result.data_ptr()
            kernel(*addresses, rows, columns, inner, packed.shape[1] * packed.shape[3], 1)
            exact = F.linear(x.double(), weight.double(), bias.double() if biased else None)
            torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance * 10)
            for threads in (2, 3, 5, 7):
                other = torch.full((rows, columns), torch.nan, dtype=dtype)
                ends = other.data_ptr(), rows, columns, inner, packed.shape[1] * packed.shape[3], threads
                kernel(*addresses[:3], *ends)
                assert torch.equal(other, result)


@pytest.mark.parametrize("dots", DOTS)
def test_sums_are_rounded_to_the_nearest_bfloat16(dots: bool) -> None:
    kernel = panel_product("bfloat16", False, dots)
    assert kernel is not None
    # Each column is one number times one and another times a small one: their sum needs more bits than bfloat16 has.
    bits = torch.arange(0, 1 << 16, 7, dtype=torch.int32).to(torch.int16)
    large = bits.view(torch.bfloat16)
    weight = torch.stack([large, large], 1).contiguous()
    packed = panels(weight)
    x = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)
    result = torch.empty(1, len(weight), dtype=torch.bfloat16)
    kernel(x.data_ptr(), packed.data_ptr(), 0, result.data_ptr(), 1, len(weight), 2, packed.shape[1] * 2, 1)
    expected = (large.float() + large.float() * 2.0**-8).to(torch.bfloat16)
    # Compilers and torch may treat numbers below the least normal one as zero.
    normal = expected.isnan() | (large.abs() >= torch.finfo(torch.bfloat16).tiny * 2**8) | (expected == 0)
    torch.testing.assert_close(result[0][normal], expected[normal], rtol=0, atol=0, equal_nan=True)


def test_panels_are_recognized_by_their_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(127, 66, generator=generator)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    found = packing._panel_rows(packed, weight)
    # Of another weight, they are not.
    assert packing._panel_rows(packed, weight.flip(0)) is None
    assert packing._panel_rows(packed, weight[:, :65]) is None
    layer = pack_linear(weight, rows=1)
    assert (layer.by_panels is None) == (found is None)


def test_a_layer_uses_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    layer = pack_linear(torch.ones(3, 5), rows=1)
    monkeypatch.setattr(layer, "by_panels", lambda *given: calls.append(given[-2]))
    monkeypatch.setattr(layer, "packed", True)
    monkeypatch.setattr(layer, "by_onednn", lambda x: calls.append(-len(x)))
    monkeypatch.setattr(packing, "_most_rows", lambda *_: 2)
    for rows in (0, 1, 2, 3):
        layer(torch.ones(rows, 5))
    assert calls == [1, 2, -3]


def test_products_are_compared() -> None:
    if pack_linear(torch.ones(3, 5), rows=1).by_panels is not None:
        found = packing._measure_rows("rows", torch.float32)
        assert found.chosen in (0, *packing._MEASURED_ROWS)
        assert {"native, 1 rows", "oneDNN, 1 rows"} <= found.seconds.keys()


def test_no_form_reads_the_weight_that_another_has_just_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be in a cache: between two uses of a layer all others are used."""
    used: list[int] = []

    class Layer:
        def __init__(self, number: int) -> None:
            self.by_panels = self.by_onednn = lambda *_: used.append(number)

    monkeypatch.setattr(packing, "_layers", lambda _: list(map(Layer, range(packing._LAYERS))))
    found = packing._measure_rows("rows", torch.float32)
    assert found.seconds
    last, nearest = dict[int, int](), list[int]()
    for place, number in enumerate(used):
        nearest.append(place - last.get(number, -packing._LAYERS))
        last[number] = place
    assert min(nearest) >= packing._LAYERS - 1
