"""Plans of symbolic sizes on TVM's virtual machine: compiled once, and equal to torch at every size."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import RunError

tvm = pytest.importorskip("tvm")
pytestmark = pytest.mark.timeout(120)

SIZES = ((1, 1), (2, 9), (3, 7), (1, 64))


class Mlp(nn.Module):
    """Two layers, and reductions over both symbolic dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.down(torch.relu(self.up(x)))
        return y, y.sum(1), y.transpose(1, 2) @ y, y.sum((0, 1)), y * y.shape[1], torch.cat([y, x[..., :5]], 1)


class Attention(nn.Module):
    """A block of causal attention over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(12, 36), nn.Linear(12, 12), nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, 3, 4).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, 12))


@cache
def gpt2() -> nn.Module:
    """GPT-2 with a small layer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_layer=1, n_head=3, n_embd=30, vocab_size=61, n_positions=64, **ends)
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    return model


def compiled_text_model(**options: Any) -> dr.Plan:
    """GPT-2 for any batch, and any sequence of its positions."""
    dims = {"input_ids": {0: "batch", 1: dr.Dim("sequence", max=64)}}
    ids = torch.zeros(2, 9, dtype=torch.int64)
    return dr.compile(gpt2(), (ids,), {"use_cache": False}, dynamic_shapes=dims, **options)


def check_text(plan: dr.Plan) -> None:
    """Fail unless the plan, on TVM, gives what the model does."""
    for shape in SIZES:
        ids = torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(shape[1]))
        found = plan(ids, use_cache=False, backend="tvm").logits
        torch.testing.assert_close(found, gpt2()(ids).logits, rtol=1e-4, atol=1e-5)


def check_vectors(model: nn.Module, width: int, tail: str, ranks: int, shardings: dict[str, str], low: int = 1) -> None:
    """Fail unless a plan of the model, on TVM, gives what it does."""
    torch.manual_seed(0)
    dims = {"x": {0: dr.Dim("batch", min=low), 1: dr.Dim("sequence", min=low)}}
    plan = dr.compile(
        model, (torch.zeros(2, 9, width),), dynamic_shapes=dims, mesh=ranks, shardings=shardings, tail=tail
    )
    for batch, sequence in (*SIZES, *(((0, 3), (2, 0)) if low == 0 else ())):
        x = torch.randn(batch, sequence, width)
        torch.testing.assert_close(plan(x, backend="tvm"), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "placement", "tail"),
    [("x", "S[0]", "ragged"), ("x", "S[1]", "ragged"), ("x", "S[1]", "pad"), ("up.weight", "S[0]", "pad")],
)
def test_a_perceptron(name: str, placement: str, tail: str) -> None:
    check_vectors(Mlp(), 6, tail, 3, {name: placement})


def test_a_perceptron_of_no_samples() -> None:
    check_vectors(Mlp(), 6, "ragged", 1, {}, low=0)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["x", "qkv.weight"])
def test_attention(name: str) -> None:
    check_vectors(Attention(), 12, "ragged", 3, {name: "S[1]" if name == "x" else "S[0]"})


@pytest.mark.sweep
def test_a_language_model_on_one_rank_is_compiled_once() -> None:
    plan = compiled_text_model(mesh=1)
    check_text(plan)
    [program] = plan.session("tvm")._programs
    assert program._compiled.sizes == ("batch", "sequence")


@pytest.mark.sweep
def test_a_language_model_split_by_data() -> None:
    check_text(compiled_text_model(mesh=3, shardings={"input_ids": "S[1]"}, tail="pad"))


def test_a_language_model_split_by_heads() -> None:
    check_text(compiled_text_model(strategy="1/2/1/1"))


def test_a_pipeline_whose_last_stage_has_no_input() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    plan = dr.compile(
        model, (torch.zeros(6, 5, 6),), dynamic_shapes={"input": {1: dr.Dim("sequence")}}, strategy="1/1/2/3"
    )
    for size in (1, 5, 17):
        x = torch.randn(6, size, 6)
        torch.testing.assert_close(plan(x, backend="tvm"), model(x), rtol=1e-4, atol=1e-5)


def test_a_size_out_of_bounds() -> None:
    dims = {"input": {1: dr.Dim("sequence", max=64)}}
    plan = dr.compile(nn.Linear(6, 5), (torch.zeros(2, 9, 6),), dynamic_shapes=dims, mesh=1)
    with pytest.raises(RunError, match="expected sequence of at least 1 and at most 64, found 65"):
        plan(torch.zeros(2, 65, 6), backend="tvm")
