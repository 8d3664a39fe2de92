"""Ops that models spell out become one op of a rank's program, with the results of the ops that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * normal.to(x.dtype)


def t5_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    normal = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * normal.to(weight.dtype)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (normal * (1.0 + weight.float())).type_as(x)


class Norm(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(37, generator=generator).to(dtype))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


def ops(plan: Any) -> list[str]:
    return [op.name for op in plan.modules["ranked"].functions[0].ops]


def numbers(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [llama_norm, t5_norm, gemma_norm])
def test_rms_norm(norm: Callable[..., torch.Tensor], dtype: str) -> None:
    x, model = numbers(5, 7, 37, dtype=dtype), Norm(norm, DTYPES[dtype])
    plan = dr.compile(model, (x,), mesh=3, shardings={"x": "S[0]"})
    fused = "rms_norm_rounded" if norm is not gemma_norm and dtype != "float32" else "nn.rms_norm"
    assert fused in ops(plan)
    assert "rsqrt" not in ops(plan)
    # Narrow floats are rounded where the model rounds them.
    exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == "float32" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(plan(x), model(x), **exact)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-5)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-5)),
        lambda x, w: w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x[..., :1])),
        lambda x, w: w[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        lambda x, w: (scale := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) + w * (x * scale),
    ],
    ids=["another dim", "several dims", "another value", "no constant", "another weight", "used twice"],
)
def test_what_is_not_a_norm_stays(change: Callable[..., torch.Tensor]) -> None:
    x, model = numbers(5, 37, 37).abs() + 0.1, Norm(change, torch.float32)
    plan = dr.compile(model, (x,), mesh=1)
    assert "nn.rms_norm" not in ops(plan)
    torch.testing.assert_close(plan(x), model(x), rtol=1e-5, atol=1e-5)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int) -> torch.Tensor:
    """The rotation of transformers."""
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Heads(nn.Module):
    """Queries of three heads, transposed as attention takes them."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.half = half

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        queries = x.unflatten(-1, (3, -1)).transpose(1, 2)
        return rotate(queries, cos[:, None], sin[:, None], self.half)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "shardings"), [(1, {}), (5, {"x": "S[0]"}), (5, {"x": "S[1]"}), (5, {"x": "S[2]"})])
def test_rotary(batch: int, shardings: dict[str, str], dtype: str) -> None:
    x, angles = numbers(5, 7, 3 * 34, dtype=dtype), numbers(batch, 7, 34)
    inputs = x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    plan = dr.compile(Heads(17), inputs, mesh=3, shardings=shardings)
    assert "rotary" in ops(plan)
    assert "concat" not in ops(plan)
    exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == "float32" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(plan(*inputs), Heads(17)(*inputs), **exact)


def test_what_is_not_rotary_stays() -> None:
    x, angles = numbers(5, 7, 3 * 34), numbers(1, 7, 34)
    inputs = x, angles.cos(), angles.sin()
    plan = dr.compile(Heads(16), inputs, mesh=1)
    assert "rotary" not in ops(plan)
    torch.testing.assert_close(plan(*inputs), Heads(16)(*inputs))


class Gated(nn.Module):
    """An activation of one half of the features times the other, in either order."""

    def __init__(self, activation: Callable[..., torch.Tensor], is_first: bool) -> None:
        super().__init__()
        self.activation, self.is_first = activation, is_first

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gate = self.activation(x)
        return gate * y if self.is_first else y * gate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu_multiply", F.silu), ("gelu_multiply", F.gelu),
        ("gelu_tanh_multiply", partial(F.gelu, approximate="tanh")),
    ],
)  # fmt: skip
def test_gated_activations(name: str, activation: Callable[..., torch.Tensor], dtype: str) -> None:
    x, y = numbers(5, 127, dtype=dtype), numbers(5, 127, dtype=dtype).flip(0)
    for is_first, mesh, shardings in ((True, 3, {"x": "S[1]"}), (False, 1, {})):
        model = Gated(activation, is_first)
        plan = dr.compile(model, (x, y), mesh=mesh, shardings=shardings)
        assert name in ops(plan)
        assert "multiply" not in ops(plan)
        tolerance = 1e-6 if dtype == "float32" else 8e-3
        torch.testing.assert_close(plan(x, y), model(x, y), rtol=tolerance, atol=tolerance)


def test_gates_that_broadcast_stay() -> None:
    x, y = numbers(5, 127), numbers(5, 1)
    plan = dr.compile(Gated(F.silu, True), (x, y), mesh=1)
    assert "nn.silu" in ops(plan)
    torch.testing.assert_close(plan(x, y), Gated(F.silu, True)(x, y), rtol=1e-6, atol=1e-6)
