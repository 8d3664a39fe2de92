"""Bounds of attention's masks, against the masks: of attention, of its gradients, in functions, and of whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.frontends.dynamic_shapes import Dim
from distir_relax.frontends.torch import import_torch
from distir_relax.interpret import interpret
from distir_relax.ir import Module, parse, print_module, verify
from distir_relax.ir.symbols import specialize
from distir_relax.kernels.attention import attend, within_bounds
from distir_relax.kernels.attention_gradients import attention_grads
from distir_relax.kernels.positions import indexed
from distir_relax.lowering import BoundAttention, IndexPositions
from distir_relax.ops import check

Mask = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""A mask of columns, rows, and the number of earlier positions."""

MASKS: list[tuple[Mask, str]] = [
    (lambda j, i, past: j <= i + past, "i1 * (i0 + past + 1)"),
    (
        lambda j, i, past: (j <= i + past) & (i + past - j < 4),
        "(1 - i1) * (max(0, i0 + past - 3)) + i1 * (i0 + past + 1)",
    ),
    (lambda j, i, past: (j >= 2) & (j <= i + past), "(1 - i1) * (2) + i1 * (i0 + past + 1)"),
    (lambda j, i, past: (j < i + 9) & (j <= i + past), "i1 * (min(i0 + 9, i0 + past + 1))"),
    (lambda j, i, past: (j + i >= past) & (j <= i + past), "(1 - i1) * (max(0, past - i0)) + i1 * (i0 + past + 1)"),
    (lambda j, i, past: j < past + 1 + 0 * i, "i1 * (past + 1)"),
    (lambda j, i, past: (j <= i * i) & (j <= i + past), "i1 * (min(i0 + past + 1, i0*i0 + 1))"),
]
OTHERS: list[Mask] = [
    lambda j, i, past: (j <= i + past) | (j < 3),
    lambda j, i, past: (j <= i + past) & (j != 2),
    lambda j, i, past: 2 * j <= i + past,
    lambda j, i, past: j // 8 <= i // 8,
]


class Attention(nn.Module):
    """Of a sequence's new positions to all of them, with a mask of positions."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        new, past = q.shape[2], earlier.shape[2]
        mask = self.mask(torch.arange(past + new), torch.arange(new)[:, None], past)
        k = torch.cat([earlier, q], 2)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask[None, None])


def imported(mask: Mask) -> tuple[Module, Module]:
    """The program of attention with a mask, and the same by the pass."""
    shapes = {"q": {2: Dim("new", max=40)}, "earlier": {2: Dim("past", max=80)}}
    example = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 13, 4)
    module = IndexPositions().run(import_torch(Attention(mask), example, dynamic_shapes=shapes).module)
    changed = BoundAttention().run(module)
    verify(changed, check)
    assert parse(print_module(changed)) == changed
    return module, changed


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("number", range(len(MASKS)))
def test_bounds_are_those_of_the_mask(number: int) -> None:
    mask, value = MASKS[number]
    module, changed = imported(mask)
    assert [op.name for op in changed.main.ops].count("indexed") == 1
    (of_mask,) = [op for op in changed.main.ops if op.name == "indexed"]
    assert of_mask.attrs["value"] == value
    assert "bool[" not in print_module(changed)
    for new, past in ((1, 1), (5, 13), (7, 24)):
        inputs = {"q": drawn(1, 2, new, 4), "earlier": drawn(1, 2, past, 4, seed=1)}
        found, expected = (
            next(iter(interpret(specialize(m, {"new": new, "past": past}), inputs).values())) for m in (changed, module)
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        bounds = indexed(value, ("past",), (past,), (new, 2), torch.int64, "cpu")
        expected_mask = mask(torch.arange(new + past), torch.arange(new)[:, None], past)
        assert torch.equal(within_bounds(bounds, new + past), expected_mask)


@pytest.mark.parametrize("backend", ["torch", "tvm"])
def test_backends_take_bounds(backend: str) -> None:
    mask = MASKS[1][0]
    shapes = {"q": {2: Dim("new", max=40)}, "earlier": {2: Dim("past", max=80)}}
    example = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 13, 4)
    plan = dr.compile(Attention(mask), example, dynamic_shapes=shapes, mesh=1)
    for new, past in ((1, 1), (5, 13)):
        inputs = drawn(1, 2, new, 4), drawn(1, 2, past, 4, seed=1)
        torch.testing.assert_close(plan(*inputs, backend=backend), Attention(mask)(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", OTHERS)
def test_other_masks_stay(mask: Mask) -> None:
    module, changed = imported(mask)
    assert changed == module


def test_functions_take_bounds_if_all_their_calls_have_them() -> None:
    text = """module @ranked {
  mesh[0] = device_mesh((1,), ("x",))
  ranks = (@main_0,)
  func @main_0(input %q: f32[1,2,3,4], input %other: bool[3,3]) {
    %mask: bool[3,3] = indexed() {value="i1 <= i0", names=(), sizes=(), shape=(3, 3), dtype="bool"}
    %a: f32[1,2,3,4] = call @layer(%q, %mask)
    %b: f32[1,2,3,4] = call @layer(%a, %SECOND)
    return "b": %b
  }
  func @layer(input %x: f32[1,2,3,4], input %mask: bool[3,3]) {
    %y: f32[1,2,3,4] = call @inner(%x, %mask)
    return "y": %y
  }
  func @inner(input %x: f32[1,2,3,4], input %mask: bool[3,3]) {
    %y: f32[1,2,3,4] = nn.scaled_dot_product_attention(%x, %x, %x, %mask) {scale=0.5, causal=False, masked=True, boolean=True, dtype="float32"}
    return "y": %y
  }
}
"""  # noqa: E501 - a program
    inputs = {"q": drawn(1, 2, 3, 4), "other": torch.ones(3, 3, dtype=torch.bool)}
    module = parse(text.replace("SECOND", "mask"))
    changed = BoundAttention().run(module)
    verify(changed, check)
    assert [f.inputs[1].value.tensor.shape for f in changed.functions[1:]] == [(3, 2), (3, 2)]
    torch.testing.assert_close(interpret(changed, inputs)["b"], interpret(module, inputs)["b"])
    other = parse(text.replace("SECOND", "other"))
    assert BoundAttention().run(other) == other


@pytest.mark.parametrize("second", ["packed", "mask"])
def test_calls_give_bounds_of_one_type(second: str) -> None:
    """Those of packed documents have a sample, which those of positions do not."""
    text = """module @global {
  mesh[0] = device_mesh((1,), ("x",))
  func @main(input %q: f32[1,2,3,4], input %numbers: i64[1,3]) {
    %one: i64[] = constant() {value=1, dtype="int64"}
    %start: bool[1,3] = not_equal(%numbers, %one)
    %number: i64[1,3] = astype(%start) {dtype="int64"}
    %sum: i64[1,3] = cumsum(%number) {axis=1}
    %row: i64[1,1,3,1] = reshape(%sum) {shape=(1, 1, 3, 1)}
    %key: i64[1,1,1,3] = reshape(%sum) {shape=(1, 1, 1, 3)}
    %same: bool[1,1,3,3] = equal(%row, %key)
    %mask: bool[1,1,3,3] = indexed() {value="i3 <= i2", names=(), sizes=(), shape=(1, 1, 3, 3), dtype="bool"}
    %packed: bool[1,1,3,3] = logical_and(%same, %mask)
    %a: f32[1,2,3,4] = call @layer(%q, %packed)
    %b: f32[1,2,3,4] = call @layer(%a, %SECOND)
    return "b": %b
  }
  func @layer(input %x: f32[1,2,3,4], input %mask: bool[1,1,3,3]) {
    %y: f32[1,2,3,4] = nn.scaled_dot_product_attention(%x, %x, %x, %mask) {scale=0.5, causal=False, masked=True, boolean=True, dtype="float32"}
    return "y": %y
  }
}
"""  # noqa: E501 - a program
    module = parse(text.replace("SECOND", second))
    changed = BoundAttention().run(module)
    verify(changed, check)
    if second == "mask":
        assert changed == module
        return
    assert changed.functions[1].inputs[1].value.tensor.shape == (1, 3, 2)
    for numbers in ([1, 1, 1], [0, 1, 5], [1, 0, 0], [0, 0, 1]):
        inputs = {"q": drawn(1, 2, 3, 4), "numbers": torch.tensor([numbers])}
        torch.testing.assert_close(interpret(changed, inputs)["b"], interpret(module, inputs)["b"])


BOUNDS: dict[str, Callable[[int, int], Any]] = {
    "causal": lambda rows, tokens: [(0, row + 1) for row in range(rows)],
    "window": lambda rows, tokens: [(max(0, row - 6), min(tokens, row + 2)) for row in range(rows)],
    "one for all": lambda rows, tokens: [(2, tokens - 1)],
    "one key": lambda rows, tokens: [(row * 7 % tokens, row * 7 % tokens + 1) for row in range(rows)],
    "all": lambda rows, tokens: [(0, tokens)],
    "of each sample": lambda rows, tokens: [[(n * (row // 2), row + 1) for row in range(rows)] for n in range(2)],
}


@pytest.mark.parametrize("rows", [3, 19, 200])
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_within_bounds(name: str, rows: int, dtype: torch.dtype) -> None:
    """By the native kernel, which takes large ones, and by torch."""
    for heads, tokens in ((1, rows), (6, rows), (6, rows + 13)):
        bounds = torch.tensor(BOUNDS[name](rows, tokens))
        q, k, v = (drawn(2, heads, n, 20, seed=seed).to(dtype) for seed, n in enumerate((rows, tokens, tokens)))
        expected = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=within_bounds(bounds, tokens), scale=0.3
        )
        found = attend(q, k, v, bounds, 0.3)
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [3, 19, 200])
@pytest.mark.parametrize("name", [*BOUNDS, "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_within_bounds(name: str, rows: int, dtype: torch.dtype) -> None:
    """A row without keys has no gradients."""
    for heads, tokens in ((1, rows), (6, rows), (6, rows + 13)):
        numbers = [(5, 5)] * rows if name == "none" else BOUNDS[name](rows, tokens)
        bounds = torch.tensor(numbers)
        q, k, v = (drawn(2, heads, n, 20, seed=seed).to(dtype) for seed, n in enumerate((rows, tokens, tokens)))
        grad = drawn(2, heads, rows, 20, seed=5).to(dtype)
        found = attention_grads(q, k, v, grad, bounds, 0.3, False)
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        allowed = within_bounds(bounds, tokens)
        scores = torch.where(allowed, wide[0] @ wide[1].mT * 0.3, -1e30)
        weights = torch.where(allowed, scores.softmax(-1), 0.0)
        expected = torch.autograd.grad(weights @ wide[2], wide, grad.double())
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("window", [None, 7])
def test_the_program_of_a_language_model_has_no_mask(window: int | None) -> None:
    import transformers

    options: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "max_position_embeddings": 64,
    }  # fmt: skip
    config = transformers.MistralConfig(**options, sliding_window=window)
    model = transformers.MistralForCausalLM(config).eval()
    generation = dr.compile_generation(model, strategy="1/3/1/1", max_length=64)
    text = generation.plan.bundle(("torch",)).programs["programs/main_0.py"]
    first = "(1 - i1) * (max(0, i0 + past - 6)) + " if window else ""
    assert f"positions.indexed('{first}i1 * (i0 + past + 1)', ('past',), (past,), (new, 2), torch.int64, " in text
    assert "torch.bool" not in text
    prompt = torch.arange(20)[None] % 61
    model.generation_config.eos_token_id = None
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False)[:, 20:]
    assert generation.generate(prompt, max_new_tokens=9).tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", ["1/2/1/1", "2/1/1/2", "1/1/2/2"])
def test_no_stage_of_a_training_has_a_mask_of_positions(strategy: str) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=35, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 61, (4, 19), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    step = dr.compile_training(model, example_batch=batch, optimizer=dr.optim.SGD(lr=0.1), strategy=strategy)
    for stage in ("global", "sharded", "distributed", "ranked"):
        text = step.plan.text(stage)
        assert "bounded=True" in text
        assert "19,19]" not in text
    expected = pytest.approx(float(model(input_ids=ids, labels=ids).loss.detach()), rel=1e-5)
    assert step(batch) == expected
    other = dr.compile_training(model, example_batch=batch, optimizer=dr.optim.SGD(lr=0.1), strategy=strategy)
    assert other(batch, backend="tvm") == expected


def test_constant_masks_that_leave_out_keys_between_others_stay() -> None:
    class Model(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(5, 5).tril().bool()
            own = mask & (torch.arange(5) != 2)
            y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return y + F.scaled_dot_product_attention(q, q, q, attn_mask=own)

    q = drawn(2, 3, 5, 4)
    plan = dr.compile(Model(), (q,), mesh=1)
    text = plan.text("ranked")
    assert (text.count("bounded=True"), text.count("boolean=True")) == (1, 1)
    torch.testing.assert_close(plan(q), Model()(q), rtol=1e-5, atol=1e-6)
