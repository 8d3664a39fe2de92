"""Sequences that depend on each other, or on their number, and the programs that keep them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.ir import parse
from distir_relax.ir.symbols import module_symbols
from distir_relax.lowering.ranked.sequence_rows import are_sequences_independent
from distir_relax.runtime.requests.sequence_program import SequenceProgram
from tests.imported_once import compile_language_model
from tests.incremental.language_models import language_model

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.shares("sequence rows")]
USUAL = ["gpt2", "llama", "mixtral", "falcon with alibi"]


class Mixes(nn.Module):
    """A language model of one layer of attention, with `use` of its token ids and last hidden values."""

    def __init__(self, use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.tokens, self.places = nn.Embedding(61, 32), nn.Embedding(40, 32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, 61)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.use(ids, x + 3 * attended.transpose(1, 2).flatten(2)))


DEPENDENT: dict[str, Callable[[Any, Any], Any]] = {
    "their mean": lambda ids, x: x - x.mean(0, keepdim=True),
    "the first of them": lambda ids, x: x + x[:1],
    "an order of them": lambda ids, x: x + 3 * x.sort(0).values,
    "sums over those before": lambda ids, x: x.cumsum(0),
    "their number as a factor": lambda ids, x: x * ids.shape[0],
    "their number in a tensor": lambda ids, x: x * torch.sin(torch.full((1,), 0.5) * ids.shape[0]),
    "tokens compared with it": lambda ids, x: x + 2 * (ids == ids.shape[0]).float()[..., None],
    "their numbers": lambda ids, x: x * (1 + torch.arange(ids.shape[0])[:, None, None]),
    "a term for each": lambda ids, x: x * torch.ones(ids.shape[0]).sum(),
    "parts of others": lambda ids, x: (
        x + x.unflatten(2, (2, 16)).permute(2, 0, 1, 3).flatten(0, 1)[::2].repeat(1, 1, 2)
    ),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", DEPENDENT)
def test_batch_of_dependent_sequences_has_its_own_tokens(name: str) -> None:
    model = Mixes(DEPENDENT[name]).eval()
    prompts = torch.tensor([[5] * 7, [7] * 7])
    ids = prompts
    for _ in range(6):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    generation = dr.compile_generation(model, max_length=40)
    assert torch.equal(generation.generate(prompts, 6), ids[:, 7:])
    with generation.engine() as engine:
        requests = [engine.submit(row.tolist(), 6) for row in prompts]
        engine.run()
    alone = [generation.generate(row.tolist(), 6).tolist() for row in prompts]
    assert [list(request.tokens) for request in requests] == alone


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/3/2/1"])
@pytest.mark.parametrize("name", USUAL)
def test_sequences_of_language_models_are_independent(name: str, strategy: str) -> None:
    model = language_model(name)
    plan = compile_language_model(model, max_length=32, strategy=strategy).plan
    ranked = plan.modules["ranked"]
    assert are_sequences_independent(ranked, module_symbols(ranked)["batch"], ranked.ranks)
    if name == "gpt2":
        assert {type(program) for program in plan.session("torch").programs} == {SequenceProgram}


TEXT = """
module @ranked {
  mesh[0] = device_mesh((1,), ("tensor",))
  size batch = 1.. typically 1
  size new = 1..64 typically 5
  ranks = (@main,)
  func @main(
    input %x: f32[batch, new, 6],
    parameter %weight: f32[4,6],
  ) {
    OPS
    return "result": %result
  }
}
"""
OPS = {
    "%result: f32[batch, new, 4] = linear(%x, %weight)": True,
    "%flat: f32[batch*new, 6] = reshape(%x) {shape=(batch*new, 6)}\n"
    "%result: f32[batch, new, 6] = reshape(%flat) {shape=(batch, new, 6)}": True,
    "%turned: f32[new, batch, 6] = permute_dims(%x) {axes=(1, 0, 2)}\n"
    "%flat: f32[batch*new, 6] = reshape(%turned) {shape=(batch*new, 6)}\n"
    "%result: f32[batch, new, 6] = reshape(%flat) {shape=(batch, new, 6)}": False,
    "%result: f32[batch, new, 6] = nn.softmax(%x) {axis=1}": True,
    "%result: f32[batch, new, 6] = nn.softmax(%x) {axis=0}": False,
    "%numbers: i64[batch] = arange() {start=0, end=batch, stride=1, dtype=\"int64\"}\n"
    "%result: f32[batch, new, 6] = take(%x, %numbers) {axis=0}": False,
    "%zero: f32[] = constant() {value=0.0, dtype=\"float32\"}\n"
    "%result: f32[batch] = broadcast_to(%zero) {shape=(batch,)}": True,
    "%count: f32[] = constant() {value=batch, dtype=\"float32\"}\n"
    "%result: f32[batch, new, 6] = add(%x, %count)": False,
}  # fmt: skip


@pytest.mark.parametrize("ops", OPS)
def test_ops_that_keep_sequences_apart(ops: str) -> None:
    module = parse(TEXT.replace("OPS", ops))
    assert are_sequences_independent(module, module_symbols(module)["batch"], ["main"]) is OPS[ops]
