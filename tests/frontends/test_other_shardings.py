"""Shardings in the words of transformers, torch and JAX: each device has those parts, and results are the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

import distir_relax as dr
from distir_relax.bundle import local_intervals
from distir_relax.errors import AnnotationError, DistIRError

WORDS, LENGTH = 61, 5
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 4, "initializer_range": 0.3, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Phi3": {}, "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 3, "num_experts_per_tok": 2},
}  # fmt: skip


class PartitionSpec(tuple[Any, ...]):
    """As in JAX: a tuple of the axes of each dim."""

    __slots__ = ()

    def __new__(cls, *axes: Any) -> PartitionSpec:
        return super().__new__(cls, axes)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 7)
        self.up, self.norm, self.down = nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.norm(self.up(self.words(ids)).relu()))
        return y


def language_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return model


def held(plan: dr.Plan, name: str, rank: int) -> list[list[tuple[int, int]]]:
    """The elements of each dim of a weight that a rank has."""
    manifest = plan.bundle(("torch",)).manifest
    return local_intervals(next(t for t in manifest.weights if t.name == name), manifest.mesh, rank)


@pytest.mark.parametrize("mesh", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_a_transformers_model(name: str, mesh: int) -> None:
    model, ids = language_model(name), torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    plan = dr.compile(model, (ids,), mesh=mesh, shardings="tp_plan", check=True)
    expected = model(ids).logits
    torch.testing.assert_close(plan(ids).logits, expected, rtol=1e-5, atol=1e-5)
    # As torch cuts a dim.
    rows = [len(part) for part in torch.arange(24).chunk(mesh)]
    ends = [sum(rows[: number + 1]) for number in range(mesh)]
    if name in ("Llama", "Qwen3"):
        weight = held(plan, "model.layers.1.self_attn.q_proj.weight", 1)
        assert weight == [[(ends[0], ends[1])], [(0, 24)]]
        weight = held(plan, "model.layers.1.self_attn.o_proj.weight", 1)
        assert weight == [[(0, 24)], [(ends[0], ends[1])]]


@pytest.mark.parametrize("mesh", [2, 3])
def test_packed_weights_are_cut_part_by_part(mesh: int) -> None:
    """Gates and their inputs are one weight: a device has as much of each."""
    model, ids = language_model("Mixtral"), torch.zeros(1, LENGTH, dtype=torch.int64)
    plan = dr.compile(model, (ids,), mesh=mesh, shardings="tp_plan")
    size = 36 // mesh
    held_of = held(plan, "model.layers.0.mlp.experts.gate_up_proj", 1)
    assert held_of == [[(0, 3)], [(size, 2 * size), (36 + size, 36 + 2 * size)], [(0, 24)]]


RULES: list[dict[str, Any]] = [
    {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel(), "words": RowwiseParallel()},
    {"up": "colwise", "down": "rowwise", "words": "embedding_rowwise", "norm": "replicate"},
    {"up.*": Shard(0), "down.weight": [Shard(1)], "words.weight": Shard(0), "norm.*": Replicate()},
    {
        "up.weight": PartitionSpec("tp", None), "up.bias": PartitionSpec("tp"), "words.weight": PartitionSpec("tp"),
        "down.weight": PartitionSpec(None, ("tp",)), "norm.*": PartitionSpec(),
    },
    {"up.weight": "S[0]", "up.bias": Shard(0), "down.weight": "S[1]", "words.weight": "S[0]"},
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=["torch styles", "transformers styles", "torch", "jax", "mixed"])
def test_one_layout_in_the_words_of_each(rules: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, ids = Block().double().eval(), torch.randint(0, WORDS, (2, LENGTH))
    plan = dr.compile(model, (ids,), mesh=dr.DeviceMesh((3,), ("tp",)), shardings=rules, check=True)
    torch.testing.assert_close(plan(ids), model(ids), rtol=1e-12, atol=1e-12)
    assert held(plan, "up.weight", 2) == [[(8, 11)], [(0, 7)]]
    assert held(plan, "up.bias", 2) == [[(8, 11)]]
    assert held(plan, "down.weight", 0) == [[(0, 7)], [(0, 4)]]
    assert held(plan, "words.weight", 1) == [[(21, 41)], [(0, 7)]]


def test_styles_split_along_the_tensor_axis() -> None:
    torch.manual_seed(0)
    model, ids = Block().double().eval(), torch.randint(0, WORDS, (2, LENGTH))
    plan = dr.compile(model, (ids,), strategy="2/3/1/1", shardings={"up": "colwise", "down": RowwiseParallel()})
    torch.testing.assert_close(plan(ids), model(ids), rtol=1e-12, atol=1e-12)
    assert [held(plan, "up.weight", rank)[0] for rank in range(6)] == [[(0, 4)], [(4, 8)], [(8, 11)]] * 2


def test_trainings_and_generation_take_them() -> None:
    model = language_model("Llama")
    ids = torch.randint(0, WORDS, (2, LENGTH))
    batch, losses = {"input_ids": ids, "labels": ids}, []
    for options in ({}, {"mesh": 3, "shardings": "tp_plan"}):
        step = dr.compile_training(model.train(), optimizer=dr.optim.SGD(0.1), example_batch=batch, **options)
        losses.append([float(step(batch)) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    found = [
        dr.compile_generation(model.eval(), max_length=32, **options).generate([[3, 4]], 7).tolist()
        for options in ({}, {"mesh": 3, "shardings": "tp_plan"})
    ]
    assert found[0] == found[1]


class Unknown(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("tp_plan", 'expected a model with a tp_plan for shardings="tp_plan", found none\n  hint: give a strategy'),
        ({"upp": "colwise"}, "'upp' matches no module and no parameter of the model\n  hint: the nearest .* up"),
        ({"up": Unknown()}, "up.weight: expected a placement, a style of transformers or torch, or a PartitionSpec"),
        ({"up.weight": Partial()}, r"up.weight: expected Shard\(dim\) or Replicate\(\) for a parameter, found"),
        ({"up.weight": [Shard(0), Shard(1)]}, "up.weight: expected a placement for each axis of"),
        ({"up.weight": PartitionSpec("dp")}, "up.weight: expected axes of .*, found 'dp'"),
        ({"up.bias": PartitionSpec("tp", None)}, "up.bias: expected at most 1 axes for 1 dims"),
        ({"up.weight": Shard(2)}, r"up.weight: S\[2\] names dim 2, but a tensor of shape \(11, 7\) has dims 0 to 1"),
        ({"up": "packed_colwise"}, "up.weight: expected 2 equal parts of dim 0 to split, found 11"),
    ],
)  # fmt: skip
def test_wrong_rules_are_refused(rules: Any, message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        dr.compile(Block(), (torch.zeros(1, 2, dtype=torch.int64),), mesh=dr.DeviceMesh((2,), ("tp",)), shardings=rules)


def test_rules_of_a_plan_for_other_models_of_its_family_are_left_out() -> None:
    """All layers of this one have experts."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SMALL, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12)
    model, ids = transformers.Qwen3MoeForCausalLM(config).eval(), torch.randint(0, WORDS, (2, LENGTH))
    assert "model.layers.*.mlp.gate_proj" in model.tp_plan
    plan = dr.compile(model, (ids,), mesh=2, shardings="tp_plan")
    torch.testing.assert_close(plan(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_mesh_and_a_torch_model_are_needed() -> None:
    with pytest.raises(AnnotationError, match='expected a mesh for shardings="tp_plan", found none'):
        dr.compile(language_model("Llama"), (torch.zeros(1, 2, dtype=torch.int64),), shardings="tp_plan")
