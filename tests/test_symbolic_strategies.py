"""Strategies, placements and searches of models with symbolic dims: compiled once, right at all sizes.

Batches are smaller than the number of ranks, and than that of microbatches; sizes are 1, primes, and the typical ones.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.compiler.compile import read_model
from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.errors import DistIRError, PlacementError
from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import Autosharding, parse, print_module, verify
from distir_relax.layout import Shard
from distir_relax.ops import check, lookup
from distir_relax.report.explain import explain
from tests.imported_once import ImportedTraining, compile_imported

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(120),
    pytest.mark.shares("symbolic strategies"),
]
SIZES = ((4, 9), (1, 1), (3, 7), (7, 2), (2, 16))
SMALL = {"vocab_size": 31, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "hidden_size": 16, "intermediate_size": 20, "max_position_embeddings": 32}  # fmt: skip


class Rows(nn.Module):
    """Three products, and a normalization along the sequence, which cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(6, 13), nn.Linear(13, 7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.middle(F.gelu(self.up(x))))).softmax(1) + 1


@cache
def rows() -> Rows:
    torch.manual_seed(0)
    return Rows().eval()


@cache
def language_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_layer=2, n_head=3, n_embd=12, vocab_size=31, n_positions=32, **rates)
        return transformers.GPT2LMHeadModel(config)
    if kind == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=3, num_experts_per_tok=2, **SMALL)
        return transformers.MixtralForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def dims(*names: str) -> dict[str, dict[int, Any]]:
    return {name: {0: "batch", 1: dr.Dim("length", max=32)} for name in names}


@cache
def imported_rows() -> Imported:
    return read_model(rows(), (torch.randn(4, 9, 6),), dynamic_shapes=dims("x"))


@cache
def imported_training() -> ImportedTraining:
    example = torch.randn(4, 9, 6), torch.randn(4, 9, 5)
    return ImportedTraining(
        dr.Training(
            rows(), F.mse_loss, dr.optim.SGD(lr=0.1), example_batch=example, dynamic_shapes=dims("x", "targets")
        )
    )


def compiled_rows(**options: Any) -> dr.Plan:
    return compile_imported(imported_rows(), "rows", verify=True, **options)


def check_rows(plan: dr.Plan) -> None:
    with torch.no_grad():
        for batch, length in SIZES:
            x = torch.randn(batch, length, 6)
            torch.testing.assert_close(plan(x), rows()(x), rtol=1e-5, atol=1e-5)


def train_rows(**options: Any) -> None:
    model = deepcopy(rows())
    step = imported_training().compile(verify=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, length in SIZES:
        x, y = torch.randn(batch, length, 6), torch.randn(batch, length, 5)
        follow(step, optimizer, step(x, y), F.mse_loss(model(x), y))
    torch.testing.assert_close(step.parameters(), dict(model.named_parameters()), rtol=1e-5, atol=1e-5)


def follow(step: dr.TrainingStep, optimizer: torch.optim.Optimizer, found: float, expected: torch.Tensor) -> None:
    """Make torch's step, and compare its loss."""
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(torch.tensor(found), expected.detach(), rtol=1e-5, atol=1e-5)


@cache
def unlike() -> Profile:
    """The first of eight devices is twice as fast as the others."""
    profile = load_profile("dgx2-v100")
    groups = (Group(((0, 0),), 1.0, profile.memory), Group(((1, 7),), 0.5, profile.memory))
    return replace(profile, devices=8, groups=groups)


@pytest.mark.parametrize(
    ("strategy", "tail"),
    [("3/2/1/1", "ragged"), ("3/2/1/1", "pad"), ("2/1/1/3", "pad"), ("1/1/2/5", "ragged"),
     ("2/2/1/1,placements=auto", "pad")],
)  # fmt: skip
def test_inference(strategy: str, tail: str) -> None:
    check_rows(compiled_rows(strategy=strategy, tail=tail))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("strategy", "tail"),
    [
        ("3/1/1/1,zero=1", "ragged"), ("3/1/1/2,zero=2", "pad"), ("2/2/1/1,zero=3", "ragged"), ("5/1/1/3", "pad"),
        ("1/1/2/3,schedule=gpipe", "ragged"), ("1/1/2/3,schedule=1f1b", "pad"), ("2/1/2/5,schedule=zb-h1", "ragged"),
        ("1/1/2/2,schedule=zb-v,chunks=2", "ragged"), ("1/1/2/4,schedule=interleaved,chunks=2", "pad"),
        ("2/2/1/2,placements=auto", "ragged"),
    ],
)  # fmt: skip
def test_training(strategy: str, tail: str) -> None:
    train_rows(strategy=strategy, tail=tail)


@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_shares_of_unlike_devices(tail: str) -> None:
    plan = compiled_rows(strategy="2/1/1/1", tail=tail, profile=unlike())
    assert "S[0: ((2*batch) // 3)|(batch - (2*batch) // 3)]" in plan.text("sharded")
    check_rows(plan)
    check_rows(compiled_rows(shardings="auto", mesh=(2, 2), tail=tail, profile=unlike()))
    train_rows(strategy="2/2/1/3", tail=tail, profile=unlike())


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("kind", "strategy", "tail"),
    [
        ("gpt2", "1/2/1/1,sequence_parallel", "pad"), ("gpt2", "2/1/1/1,checkpoint=selective", "ragged"),
        ("llama", "2/1/1/3,zero=3,checkpoint=block", "ragged"), ("llama", "1/2/2/2", "pad"),
        ("mixtral", "2/1/1/1,experts=data", "pad"), ("mixtral", "1/2/1/1,experts=tensor", "ragged"),
    ],
)  # fmt: skip
def test_training_of_language_models(kind: str, strategy: str, tail: str) -> None:
    model = deepcopy(language_model(kind)).train()
    example = torch.randint(0, 31, (2, 9))
    batch = {"input_ids": example, "labels": example, "use_cache": False}
    step = dr.compile_training(
        model, optimizer=dr.optim.SGD(lr=0.1), example_batch=batch,
        dynamic_shapes={name: {0: "batch", 1: dr.Dim("length", min=2, max=32)} for name in ("input_ids", "labels")},
        strategy=strategy, tail=tail, verify=True,
    )  # fmt: skip
    if kind == "mixtral":
        orders = [
            lookup(op.name).split.order for f in step.plan.modules["global"].functions for op in f.ops if not op.callee
        ]
        assert not any(order is not None and order.sorts for order in orders)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, length in ((3, 7), (1, 2), (4, 16)):
        ids = torch.randint(0, 31, (batch, length))
        loss = model(input_ids=ids, labels=ids).loss
        follow(step, optimizer, step({"input_ids": ids, "labels": ids, "use_cache": False}), loss)
    parameters = step.parameters()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("placement", "mesh", "tail"),
    [
        ("S[0]", 5, "ragged"), ("S[0]", 5, "pad"), ("S[0: 2:1]", 2, "pad"), ("S[1: 1:2:3]", 3, "ragged"),
        ("S[0: chunk]", 4, "pad"), ("S[1: chunk]", 3, "ragged"), ("S[0], S[0]", (2, 3), "ragged"),
        ("S[1], S[1]", (2, 3), "pad"), ("S[0: 1:2], S[0]", (2, 3), "ragged"),
        ("S[0: chunk], S[1: 2:1]", (2, 2), "pad"), ("S[2], S[0]", (2, 2), "ragged"),
    ],
)  # fmt: skip
def test_placements(placement: str, mesh: Any, tail: str) -> None:
    check_rows(compiled_rows(shardings={"x": placement}, mesh=mesh, tail=tail))


def test_numbers_do_not_cut_a_symbolic_dim() -> None:
    with pytest.raises(PlacementError, match=r"add up to 4, but dim 0 of shape \(batch, length, 6\) has batch"):
        compiled_rows(shardings={"x": "S[0: 2|2]"}, mesh=2)


def test_a_search_costs_typical_sizes() -> None:
    """Its times are those of the program for these sizes alone; its cuts are for all sizes."""
    plan = compiled_rows(shardings="auto", mesh=(2, 3), profile="dgx2-v100")
    fixed = dr.compile(rows(), (torch.randn(4, 9, 6),), shardings="auto", mesh=(2, 3), profile="dgx2-v100")
    (found,), (expected,) = (
        [record for record in p.modules["sharded"].records if isinstance(record, Autosharding)] for p in (plan, fixed)
    )
    assert found == expected
    assert "(batch + 1) // 2" in plan.text("sharded")
    check_rows(plan)
    alternatives = plan.alternatives
    layouts = alternatives.layouts("main", "x")
    split_dims, split_dims_of_fixed = (
        [[p.dim if isinstance(p, Shard) else None for p in layout] for layout in each]
        for each in (layouts, fixed.alternatives.layouts("main", "x"))
    )
    assert split_dims == split_dims_of_fixed
    assert all(alternatives.best("main", "x", layout).outcome is not None for layout in layouts[:3])


def test_a_saved_search_is_explained_at_sizes(tmp_path: Any) -> None:
    plan = compiled_rows(shardings="auto", mesh=2, profile="dgx2-v100")
    bundle = plan.bundle(("torch",))
    assert "those of batch = 4, length = 9\n" in explain(bundle, "%linear_1")
    text = explain(bundle, "%linear_1", dims={"length": 32, "batch": 64})
    assert "those of batch = 64, length = 32\n" in text
    assert "(chosen)" in text
    with pytest.raises(DistIRError, match="expected length of at least 1 and at most 32, found 33"):
        explain(bundle, "%linear_1", dims={"length": 33})


@pytest.mark.parametrize(("strategy", "tail"), [("3/2/1/2", "ragged"), ("1/1/2/2", "pad")])
def test_bound_plans(strategy: str, tail: str, tmp_path: Any) -> None:
    plan = compiled_rows(strategy=strategy, tail=tail)
    half = dr.bind(plan, length=7)
    whole = dr.bind(half, batch=3)
    assert set(half.symbols) == {"batch"}
    assert whole.modules == dr.bind(plan, batch=3, length=7).modules
    for bound in (plan, half, whole):
        for module in bound.modules.values():
            verify(module, check)
            assert parse(print_module(module)) == module
    times = {dr.simulate(p, profile="dgx2-v100", dims=sizes).makespan for p, sizes in (
        (plan, {"batch": 3, "length": 7}), (half, {"batch": 3}), (whole, {}))}  # fmt: skip
    assert len(times) == 1
    x = torch.randn(3, 7, 6)
    for bound in (half, whole):
        torch.testing.assert_close(bound(x), rows()(x), rtol=1e-5, atol=1e-5)
        bound.save(tmp_path / "bound.dist", backends=("torch",))
    with pytest.raises(DistIRError, match="the program has no size 'length'"):
        dr.bind(half, length=7)
    with pytest.raises(DistIRError, match=r"expected float32 \(3, 7, 6\), found float32 \(3, 8, 6\)"):
        half(torch.randn(3, 8, 6))
