"""Quantized weights: their format, their errors, and products against torch's with inputs rounded in the same way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distir_relax.kernels.native import QUANTIZED_PANEL, Capability, host_target, quantized_product
from distir_relax.kernels.quantized import (
    GROUP,
    dequantize,
    linear,
    quantize_int4,
    quantize_int8,
    quantize_int8_groups,
    weights,
)
from distir_relax.kernels.quantized.experts import pack_quantized_experts
from distir_relax.kernels.quantized.linear import QuantizedLinear, pack_quantized

Weight = tuple[torch.Tensor, ...]


def int8(n: int, k: int, generator: torch.Generator) -> Weight:
    values = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    return values, torch.rand(n, 1, generator=generator) + 0.1


def int8_in_groups(n: int, k: int, generator: torch.Generator) -> Weight:
    values = torch.randint(-127, 128, (n, k // GROUP, GROUP), dtype=torch.int8, generator=generator)
    return values, (torch.rand(n, k // GROUP, 1, generator=generator) + 0.1).half()


def int4(n: int, k: int, generator: torch.Generator) -> Weight:
    values = torch.randint(0, 256, (n, k // GROUP, GROUP // 2), dtype=torch.uint8, generator=generator)
    scales, minimums = ((size * torch.rand(n, k // GROUP, 1, generator=generator) + 0.1).half() for size in (1, -9))
    return values, scales, minimums


BYTES_OF_GROUP = {int8: 32, int8_in_groups: 32 + 2, int4: 16 + 2 * 2}


def spelled_out(weight: Weight) -> torch.Tensor:
    """The weight, element by element."""
    values, scales, *minimums = weight
    n, inner = len(values), values.shape[1] * (GROUP if values.dim() == 3 else 1)
    result = torch.empty(n, inner, dtype=torch.float64)
    for row in range(n):
        for column in range(inner):
            group, element = divmod(column, GROUP)
            if values.dim() == 2:
                result[row, column] = values[row, column].item() * scales[row, 0].item()
            elif not minimums:
                result[row, column] = values[row, group, element].item() * scales[row, group, 0].item()
            else:
                byte = int(values[row, group, element % 16])
                value = byte % 16 if element < 16 else byte // 16
                result[row, column] = value * scales[row, group, 0].item() + minimums[0][row, group, 0].item()
    return result


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """The input that a product uses instead of `x`."""
    groups = x.float().view(len(x), -1, group)
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    numbers = torch.round(groups * torch.div(torch.tensor(127.0), largest))
    return (numbers.double() * (largest / 127).double()).view(x.shape)


@pytest.mark.parametrize("make", [int8, int8_in_groups, int4])
def test_dequantized_weights(make: Callable[..., Weight]) -> None:
    weight = make(5, 96, torch.Generator().manual_seed(0))
    exact = spelled_out(weight)
    torch.testing.assert_close(dequantize(*weight).double(), exact, rtol=1e-6, atol=1e-5)
    assert torch.equal(dequantize(*weight, dtype=torch.bfloat16), dequantize(*weight).bfloat16())
    # Outputs and groups are sliced along the first two dims.
    groups = slice(GROUP, 3 * GROUP) if make is int8 else slice(1, 3)
    part = [t[1:4, slice(None) if make is int8 and i else groups] for i, t in enumerate(weight)]
    assert torch.equal(dequantize(*part), dequantize(*weight)[1:4, GROUP : 3 * GROUP])


@pytest.mark.parametrize(
    ("make", "dtype", "instruction"),
    [
        (make, dtype, instruction)
        for instruction in (False, True)[: 1 + host_target().can(Capability.INT8_DOT)]
        for make, dtype in (
            *((make, torch.float32) for make in (int8, int8_in_groups, int4)),
            *((make, torch.bfloat16) for make in (int8, int4)),
        )
    ],
)
def test_products(
    make: Callable[..., Weight], dtype: torch.dtype, instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = lambda *given: quantized_product(*given) if given[-1] == instruction else None  # noqa: E731
    monkeypatch.setattr(linear, "quantized_product", only)
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    for n, k in ((127, 96), (1, 32), (200, 544)):
        weight = make(n, k, generator)
        bias = torch.randn(n, generator=generator).to(dtype)
        layer = pack_quantized(*weight, *([None] if len(weight) == 2 else []), bias, dtype=dtype, rows=1)
        assert isinstance(layer, QuantizedLinear)
        assert layer.weight.nbytes == -(-n // QUANTIZED_PANEL) * QUANTIZED_PANEL * k // GROUP * BYTES_OF_GROUP[make]
        exact_weight = dequantize(*weight).double()
        x = torch.randn(127, k, generator=generator).to(dtype)
        # Groups of different magnitudes, and of zeros.
        x = (x * torch.logspace(-2, 2, k)).to(dtype)
        x[3] = 0
        x[:, :GROUP] = x[:, :GROUP].where(torch.arange(127)[:, None] % 5 > 0, 0)
        result = layer(x)
        assert (result.dtype, result.shape) == (dtype, (127, n))
        group = k if make is int8 else GROUP
        inputs = rounded(x, group)
        expected = F.linear(inputs, exact_weight, bias.double())
        values, scales, *minimums = weight
        magnitudes = dequantize(values, scales, *(m.abs() for m in minimums)).double().abs()
        size = F.linear(inputs.abs(), magnitudes, bias.double().abs())
        precision = 2e-7 * size + (expected.abs() * 2**-8 if dtype == torch.bfloat16 else 0)
        assert ((result.double() - expected).abs() <= precision).all()
        # Rounding an input is wrong by half a scale at most.
        unrounded = F.linear(x.double(), exact_weight, bias.double())
        steps = (x.double().view(127, -1, group).abs().amax(-1, keepdim=True) / 127).expand(-1, -1, group).flatten(1)
        assert ((expected - unrounded).abs() <= 0.501 * steps @ exact_weight.abs().T).all()
        for rows in (1, 2, 3, 5, 16):
            assert torch.equal(layer(x[-rows:]), result[-rows:])
        try:
            torch.set_num_threads(1 if threads > 1 else 3)
            assert torch.equal(layer(x), result)
            assert torch.equal(layer(x[-1:]), result[-1:])
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("make", [int8, int8_in_groups, int4])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_products_of_experts(make: Callable[..., Weight], is_sorted: bool) -> None:
    """Each row by the weight of its expert, with the bits of that product alone; of none it is zero, and others cost
    nothing."""
    generator = torch.Generator().manual_seed(0)
    weights = [make(37, 96, generator) for _ in range(5)]
    stacks = [torch.stack(parts) for parts in zip(*weights, strict=True)]
    experts = pack_quantized_experts(*stacks, dtype=torch.float32, is_sorted=is_sorted)
    x = torch.randn(11, 96, generator=generator)
    if is_sorted:
        of_row = [-1, 0, 0, 0, 2, 2, 2, 2, 2, 4, -1]
        places = torch.tensor([1, 4, 4, 9, 9], dtype=torch.int32), torch.tensor([4, 4, 9, 9, 10], dtype=torch.int32)
    else:
        of_row = [4, 0, -1, 2, 0, -1, 2, 4, 0, 0, 2]
        # The group of a weight, and those of rows: this device has not all groups.
        groups = torch.tensor([3, 4, 7, 8, 10])
        places = torch.tensor([6 if place < 0 else int(groups[place]) for place in of_row]), groups
    called = list[int]()
    layers = list(experts.packed)
    experts.packed = [
        lambda rows, number=number: called.append(number) or layers[number](rows)  # type: ignore[func-returns-value]
        for number in range(5)
    ]
    found = experts(x, *places)
    assert called == [0, 2, 4]
    group = 96 if make is int8 else GROUP
    for row, place in enumerate(of_row):
        expected = torch.zeros(37) if place < 0 else layers[place](x[row])
        assert torch.equal(found[row], expected)
        exact = torch.zeros(37).double() if place < 0 else spelled_out(weights[place]) @ rounded(x, group)[row]
        torch.testing.assert_close(found[row].double(), exact, rtol=1e-4, atol=1e-3)
    assert sum(layer.weight.nbytes for layer in layers) == 5 * 2 * QUANTIZED_PANEL * 96 // GROUP * BYTES_OF_GROUP[make]
    assert experts(x[:0], *(places if is_sorted else (places[0][:0], places[1]))).shape == (0, 37)


def test_experts_of_a_device_that_has_none() -> None:
    values, scales = torch.zeros(0, 5, 96, dtype=torch.int8), torch.zeros(0, 5, 1)
    experts = pack_quantized_experts(values, scales, dtype=torch.float32, is_sorted=False)
    found = experts(torch.randn(3, 96), torch.tensor([0, 1, 2]), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(found, torch.zeros(3, 5))


def test_shapes_of_inputs() -> None:
    weight = int8_in_groups(7, 64, torch.Generator().manual_seed(0))
    layer = pack_quantized(*weight, dtype=torch.float32, rows=1)
    x = torch.randn(3, 64, 5).transpose(1, 2)
    assert torch.equal(layer(x), layer(x.reshape(15, 64)).view(3, 5, 7))
    assert torch.equal(layer(x[1, 2]), layer(x)[1, 2])
    assert layer(x[:0]).shape == (0, 5, 7)


@pytest.mark.parametrize("make", [int8, int4])
def test_numbers_that_are_not_finite_reach_the_results_of_their_rows(make: Callable[..., Weight]) -> None:
    layer = pack_quantized(*make(5, 96, torch.Generator().manual_seed(0)), dtype=torch.float32, rows=1)
    x = torch.randn(4, 96)
    result = layer(x)
    x[1, 70], x[2, 3] = torch.nan, torch.inf
    found = layer(x)
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[::3], result[::3])


def test_quantization_to_8_bits() -> None:
    weight = torch.randn(127, 96, generator=torch.Generator().manual_seed(0))
    weight[5] = 0
    values, scales = quantize_int8(weight)
    assert (values.dtype, values.shape, scales.shape) == (torch.int8, (127, 96), (127, 1))
    assert (values.abs().amax(1) == 127).sum() == 126
    assert ((dequantize(values, scales) - weight).abs() <= scales * 0.501).all()
    assert torch.equal(quantize_int8(weight.bfloat16())[0], quantize_int8(weight.bfloat16().float())[0])


def test_quantization_to_4_bits() -> None:
    weight = torch.randn(127, 96, generator=torch.Generator().manual_seed(0)) + 1
    weight[5] = 0
    weight[6] = 3
    values, scales, minimums = quantize_int4(weight)
    assert (values.dtype, values.shape, scales.shape, minimums.shape) == (
        torch.uint8, (127, 3, 16), (127, 3, 1), (127, 3, 1),
    )  # fmt: skip
    found = dequantize(values, scales, minimums)
    assert scales.dtype == minimums.dtype == torch.float16
    assert torch.equal(found[5:7], weight[5:7])
    low, high = weight.view(127, 3, GROUP).aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).where(high > low, 1)
    plain = torch.round((weight.view(127, 3, GROUP) - low) / step) * step + low
    assert (found - weight).square().sum() < 0.9 * (plain.flatten(1) - weight).square().sum()
    # Each value is the closest one.
    unpacked = torch.cat([values & 15, values >> 4], -1)
    choices = torch.arange(16) * scales.float()[..., None] + minimums.float()[..., None]
    errors = (weight.view(127, 3, GROUP, 1) - choices).abs()
    chosen = errors.gather(-1, unpacked[..., None].long())[..., 0]
    assert (chosen <= errors.amin(-1) + 1e-6).all()


@pytest.mark.parametrize(("quantize", "levels"), [(quantize_int8_groups, 127), (quantize_int4, 15)])
def test_scales_that_float16_cannot_hold_are_refused(quantize: Callable[[torch.Tensor], Weight], levels: int) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight /= weight.abs().max()
    for size in (levels**2 * 2**-24 * 1.01, 1.0, 32000.0):
        found = dequantize(*quantize(weight * size)) / size
        exact = dequantize(*quantize(weight))
        assert (found - weight).norm() < 2 * (exact - weight).norm()
    for size in (levels**2 * 2**-24 * 0.99, 1e-9, 33000.0, 1e9):
        with pytest.raises(
            ValueError, match=r"expected a weight whose largest number is from .* to 32,752, as float16"
        ):
            quantize(weight * size)
    # Groups that are much smaller than others are zeros.
    weight[0] *= 1e-9
    weight[1] = 0
    assert dequantize(*quantize(weight))[:2].abs().max() < 1e-8


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_weights_that_cannot_be_quantized(quantize: Callable[[torch.Tensor], Weight]) -> None:
    for shape in ((3, 33), (3, 0), (96,)):
        with pytest.raises(ValueError, match=r"expected a weight \(n, k\) with k a multiple of 32, found"):
            quantize(torch.ones(shape))
    with pytest.raises(ValueError, match="expected a weight of finite numbers"):
        quantize(torch.tensor([[1.0] * 31 + [torch.inf]]))


def test_formats_are_checked() -> None:
    generator = torch.Generator().manual_seed(0)
    values, scales, minimums = int4(5, 96, generator)
    wrong = [
        (values, scales),
        (values, scales[:, :2], minimums[:, :2]),
        (values, scales, minimums[:3]),
        (values, scales.float(), minimums),
        (values[..., :8], scales, minimums),
        (torch.zeros(5, 33, dtype=torch.int8), scales[:, 0]),
        (torch.zeros(5, 3, 16, dtype=torch.int8), scales),
    ]
    for weight in wrong:
        with pytest.raises(ValueError, match=r"expected .*, found torch.u?int8 \(5, .*, torch.float"):
            pack_quantized(*weight, dtype=torch.float32, rows=1)


@pytest.mark.parametrize(
    ("make", "n", "k", "dtype"),
    [
        (int4, 5, 96, torch.float64),
        (int8, 0, 96, torch.float32),
        # Sums of that many products of 8 bits may be too large for int32.
        (int8, 3, (1 << 16) + GROUP, torch.float32),
    ],
)
def test_other_products_use_the_dequantized_weight(
    make: Callable[..., Weight], n: int, k: int, dtype: torch.dtype
) -> None:
    values, scales, *minimums = make(n, k, torch.Generator().manual_seed(0))
    bias = torch.ones(n)
    layer = pack_quantized(values, scales, *(minimums or [None]), bias, dtype=dtype, rows=3)
    assert not isinstance(layer, QuantizedLinear)
    x = torch.randn(3, k, dtype=dtype)
    expected = F.linear(x, dequantize(values, scales, *minimums, dtype=dtype), bias.to(dtype))
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5 * k)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums(sign: int) -> None:
    values = torch.full((3, 1 << 16), sign * 127, dtype=torch.int8)
    layer = pack_quantized(values, torch.ones(3, 1), dtype=torch.float32, rows=1)
    assert isinstance(layer, QuantizedLinear)
    assert torch.equal(layer(torch.full((5, 1 << 16), 127.0)), torch.full((5, 3), sign * 127.0 * 127 * (1 << 16)))


WITHOUT = """
import torch
from distir_relax.kernels.quantized import dequantize, quantize_int8
from distir_relax.kernels.quantized.linear import pack_quantized
weight = quantize_int8(torch.randn(7, 64))
layer, x = pack_quantized(*weight, dtype=torch.float32, rows=1), torch.randn(3, 64)
torch.testing.assert_close(layer(x), x @ dequantize(*weight).T)
"""


def test_products_without_native_kernels() -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "DISTIR_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", WITHOUT], env=environment, timeout=120, check=True)


@pytest.mark.parametrize("quantize", [quantize_int8_groups, quantize_int4])
def test_blocks_of_several_threads(quantize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(1))
    expected = quantize(weight)
    monkeypatch.setattr(weights, "_BLOCK", 5 * 96)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            # Also of a weight that is stored transposed.
            for operand in (weight, weight.t().contiguous().t()):
                assert all(map(torch.equal, quantize(operand), expected))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)


def test_memory_of_quantization() -> None:
    weight = torch.randn(4096, 2048).bfloat16()
    quantize_int4(weight[:512])
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    quantize_int4(weight)
    assert _status("VmHWM") - before < 1.5 * weight.nbytes


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])
