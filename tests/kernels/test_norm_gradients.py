"""Gradients of norms, by native kernels and by torch, against torch's autograd in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from distir_relax.kernels import norms

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def agree(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> None:
    """Fail unless the gradients of both norms are those of autograd, relative to the largest."""
    wide = [t.detach().double().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    axes, shape = tuple(range(x.dim() - weight.dim(), x.dim())), weight.shape
    layer = torch.autograd.grad(F.layer_norm(wide[0], shape, *wide[1:], 1e-3), wide, grad.double())
    rms = torch.autograd.grad(F.rms_norm(wide[0], shape, wide[1], 1e-3), wide[:2], grad.double())
    of_weights = norms.layer_norm_weight_grad(x, grad, axes, 1e-3, weight.dtype)
    found = [
        (norms.layer_norm_grad(x, weight, grad, 1e-3), layer[0], x.dtype),
        *zip(of_weights, layer[1:], [weight.dtype] * 2, strict=True),
        (norms.rms_norm_grad(x, weight, grad, 1e-3), rms[0], x.dtype),
        (norms.rms_norm_weight_grad(x, grad, axes, 1e-3, weight.dtype), rms[1], weight.dtype),
    ]  # fmt: skip
    for one, exact, dtype in found:
        assert one.dtype == dtype
        assert one.shape == exact.shape
        error = (one.double() - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCE[x.dtype], error


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) + 0.5).to(dtype) for shape in shapes]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 89, 127), (2, 513, 5, 7), (1, 5, 7001)])
def test_gradients_are_those_of_autograd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inner = shape[2:] if len(shape) == 4 else shape[-1:]
    x, weight, grad = drawn(shape, inner, shape, dtype=dtype)
    agree(x, weight, grad)
    # Weights in float32, other layouts, few rows, which are left to torch, and one row without others.
    agree(x, weight.to(torch.float64 if dtype == torch.float64 else torch.float32), grad)
    agree(torch.stack([x, x], -1)[..., 0], weight, grad.transpose(0, 1).contiguous().transpose(0, 1))
    agree(x[:, :2], weight, grad[:, :2])
    agree(x.flatten()[: weight.numel()].view(inner), weight, grad.flatten()[: weight.numel()].view(inner))


def test_nan_stays_in_its_row() -> None:
    x, weight, grad = drawn((300, 127), (127,), (300, 127), dtype=torch.float32)
    grad[7, 5] = torch.nan
    assert norms.layer_norm_grad(x, weight, grad, 1e-3).isnan().any(1).nonzero().tolist() == [[7]]
    of_weight, of_bias = norms.layer_norm_weight_grad(x, grad, (1,), 1e-3, torch.float32)
    assert of_weight.isnan().nonzero().tolist() == of_bias.isnan().nonzero().tolist() == [[5]]
