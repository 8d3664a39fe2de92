"""Experts split by their number: which ranks have them, what is sent, and that training is as on one rank."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, inline
from distir_relax.ops import Trait, lookup
from tests.families import Loss, sizes, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GATE_UP, DOWN = "*.experts.gate_up_proj", "*.experts.down_proj"


@cache
def mixtral(layers: int = 2, experts: int = 5) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **sizes(num_key_value_heads=3, intermediate_size=20, num_local_experts=experts, num_experts_per_tok=2,
                num_hidden_layers=layers)
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    return Loss(model, use_cache=False, output_router_logits=True).float().train()


def compiled(model: nn.Module, **options: Any) -> dr.TrainingStep:
    return dr.compile_training(
        deepcopy(model), optimizer=dr.optim.AdamW(lr=1e-2), example_batch=words(), verify=True, **options
    )


def trained(model: nn.Module, strategy: str) -> tuple[dr.TrainingStep, list[float]]:
    step = compiled(model, strategy=strategy)
    torch.manual_seed(1)
    return step, [step(words()) for _ in range(3)]


@cache
def usual(strategy: str) -> tuple[dr.TrainingStep, list[float]]:
    """The model of two layers, trained."""
    return trained(mixtral(), strategy)


def sent(module: Module) -> Counter[str]:
    ops = inline(module).main.ops
    return Counter(op.name for op in ops if Trait.COMMUNICATES in lookup(op.name).traits)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "strategy",
    [
        "3/1/1/1,experts=data",
        "2/2/1/1,experts=data,sequence_parallel",
        "1/2/1/1,experts=tensor,sequence_parallel",
        "2/1/1/1,experts=data,zero=3,checkpoint=block",
    ],
)
def test_training_is_as_on_one_rank(strategy: str) -> None:
    one, expected = usual("1/1/1/1")
    step, losses = usual(strategy)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    parameters = one.parameters()
    for name, tensor in step.parameters().items():
        # AdamW moves a weight by the sign of a gradient, however small; what that is, rounding decides.
        torch.testing.assert_close(tensor, parameters[name], rtol=1e-4, atol=1e-4)


def test_experts_that_get_no_tokens_and_all() -> None:
    """A gate that knows no difference sends all tokens to the same two experts of five."""
    model = deepcopy(mixtral(1))
    for layer in model.model.model.layers:
        nn.init.zeros_(layer.mlp.gate.weight)
    _, expected = trained(model, "1/1/1/1")
    _, losses = trained(model, "3/1/1/1,experts=data")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_sends_its_rows_twice_forward_and_twice_backward() -> None:
    """Nothing else is sent for it, but the numbers of its tokens' experts: gradients of experts are whole."""
    step = compiled(mixtral(), strategy="3/1/1/1,experts=data", overlap=0)
    found = sent(step.plan.modules["distributed"])
    assert (found["rows_to_groups"], found["rows_from_groups"], found["all_gather"]) == (4, 4, 2)
    assert "reduce_scatter" not in found
    moved = [op for f in step.plan.modules["distributed"].functions for op in f.ops if op.name == "rows_to_groups"]
    assert all(op.attrs["packed"] for op in moved)  # no op of a layer is told how many rows there are
    plain = compiled(mixtral(), strategy="3/1/1/1", overlap=0)
    # Of each layer two gradients less are reduced; tokens of ranks do not meet in either.
    reduced = sent(plain.plan.modules["distributed"])
    assert set(reduced) == {"all_reduce"}
    assert reduced["all_reduce"] - found["all_reduce"] == 2 * 2


def test_each_expert_and_its_state_lie_on_one_rank() -> None:
    """8 experts on 3 ranks: 3, 3 and 2, with what the optimizer keeps of them."""
    step = compiled(mixtral(1, 8), strategy="3/1/1/1,experts=data")
    kinds = {i.value.name: i.value.dtensor for i in step.plan.modules["sharded"].main.inputs}
    mine = {name: kind for name, kind in kinds.items() if "gate_up_proj" in name or "down_proj" in name}
    assert len(mine) == 2 * 3  # a weight, and two moments
    assert {str(kind.placements[0]) for kind in mine.values()} == {"S[0: 3|3|2]"}
    others = {str(kind.placements[0]) for name, kind in kinds.items() if name not in mine and "input" not in name}
    assert "R" in others


def test_marks_give_the_program_that_the_strategy_gives() -> None:
    mesh = dr.DeviceMesh((3, 1), ("data", "tensor"))
    marks = dict.fromkeys((GATE_UP, DOWN), "S[0], R")
    by_mark = compiled(mixtral(), strategy="3/1/1/1", shardings=marks, mesh=mesh)
    by_strategy, _ = usual("3/1/1/1,experts=data")
    assert sent(by_mark.plan.modules["distributed"]) == sent(by_strategy.plan.modules["distributed"])


def test_parts_of_a_batch_do_not_meet_in_a_sort() -> None:
    """Microbatches and data-parallel ranks each work on their own tokens: blocks stay functions."""
    step = compiled(mixtral(), strategy="2/1/1/2")
    module = step.plan.modules["distributed"]
    assert set(sent(module)) == {"all_reduce"}
    assert sum(bool(op.callee) for op in module.main.ops) >= 2 * 2 * 2  # microbatches, layers, both ways


def test_a_model_without_experts_says_so() -> None:
    with pytest.raises(DistIRError, match="no experts that can be split by number"):
        dr.compile(nn.Linear(3, 5), (torch.randn(4, 3),), strategy="2/1/1/1,experts=data")
