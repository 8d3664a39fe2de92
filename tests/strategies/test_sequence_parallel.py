"""Sequence parallelism communicates as little as tensor parallelism: in blocks, and for gradients of their weights."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.ir import Module
from distir_relax.layout import Shard

VOCABULARY, WIDTH, SEQUENCE = 96, 64, 24


@cache
def stages(strategy: str) -> dict[str, Module]:
    """A small Llama, whose keys and values have fewer heads than its queries, in training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, words = LlamaForCausalLM(config), torch.zeros(8, SEQUENCE, dtype=torch.int64)

    def loss(found: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(found.logits.flatten(0, 1), targets.flatten())

    batch = {"input_ids": words}, words
    step = dr.compile_training(model, loss, optimizer=dr.optim.AdamW(), example_batch=batch, strategy=strategy)
    return step.plan.modules


def block(strategy: str, name: str) -> Counter[str]:
    """The ops of a function of the blocks."""
    return Counter(op.name for op in stages(strategy)["distributed"].function(name).ops)


def test_a_block_communicates_as_often_backward_as_forward() -> None:
    """Gradients of the input of attention's three projections are added before they are scattered; so in the gate."""
    forward, backward, weights = (
        block("1/2/1/4,sequence_parallel", f"llama_decoder_layer_{part}")
        for part in ("forward", "backward", "backward_weights")
    )
    assert (forward["all_gather"], forward["reduce_scatter"]) == (2, 2)
    assert backward["reduce_scatter"] == 2
    for function in (forward, backward, weights):
        assert not function["all_to_all"]
        assert not function["all_reduce"]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_of_weights_are_sums_of_the_whole_sequence(zero: int) -> None:
    """The products of all three projections take the gathered input: gathered for one, it costs the others nothing."""
    weights = block(f"2/2/1/4,zero={zero},sequence_parallel", "llama_decoder_layer_backward_weights")
    assert not any(weights[name] for name in ("all_reduce", "reduce_scatter", "all_to_all", "all_gather"))


def test_only_activations_are_split_along_the_sequence() -> None:
    """The gradient of a weight, which has no samples, is laid out as ZeRO 2 says: each microbatch's is scattered."""
    strategy = "2/2/2/4,zero=2,sequence_parallel"
    weights = block(strategy, "llama_decoder_layer_backward_weights")
    assert weights["reduce_scatter"] == 7
    main = stages(strategy)["distributed"].main
    # Norms are small, and stay whole: those of two blocks and the last.
    reduced = [op.results[0].placed.shape for op in main.ops if op.name == "all_reduce"]
    assert all(len(shape) < 2 for shape in reduced)
    for item in stages(strategy)["sharded"].main.inputs:
        if item.role == "parameter" and len(item.value.dtensor.tensor.shape) == 2:
            assert isinstance(item.value.dtensor.placements[0], Shard)
