"""Unmodified transformers models give what unsharded torch gives.

Transformers are tensor-parallel by names of their parameters, convolutional models are split along the picture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.compiler.compile import read_model
from distir_relax.ir import inline
from distir_relax.ops import Trait, lookup
from tests.imported_once import compile_imported
from tests.vision import convnext, mobilenet_v2, resnet50, vit

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 60, "intermediate_size": 71, "vocab_size": 97}
ATTENTION = {"model.layers.*.self_attn.[qkv]_proj.weight": "S[0]"}
DECODER = {**ATTENTION, "model.layers.*.mlp.gate_proj.weight": "S[0]", "lm_head.weight": "S[0]"}

Made = tuple[Any, dict[str, Any], dict[str, str]]


def tokens(length: int = 9) -> torch.Tensor:
    return torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(0))


def llama() -> Made:
    """Grouped queries, rotary positions, RMS norms, SwiGLU."""
    config = transformers.LlamaConfig(num_key_value_heads=3, **SMALL)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(), "use_cache": False}, DECODER


def qwen2() -> Made:
    config = transformers.Qwen2Config(num_key_value_heads=2, **SMALL)
    return transformers.Qwen2ForCausalLM(config), {"input_ids": tokens(), "use_cache": False}, DECODER


def bert() -> Made:
    shardings = {"*attention.self.*.weight": "S[0]", "*.intermediate.dense.weight": "S[0]"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), {"input_ids": tokens()}, shardings


def t5() -> Made:
    config = transformers.T5Config(d_model=60, d_ff=71, d_kv=10, num_layers=2, num_heads=6, vocab_size=97)
    call = {"input_ids": tokens(), "decoder_input_ids": tokens(5), "use_cache": False}
    shardings = {"*Attention.[qkv].weight": "S[0]", "*.wi.weight": "S[0]"}
    return transformers.T5ForConditionalGeneration(config), call, shardings


def mixtral(shardings: dict[str, str], experts: str = "") -> Made:
    """A mixture of experts: tokens sorted by expert, or (``batched_mm``) every token with its experts' own matrices."""
    # torch's own grouped product wants rows of a multiple of 16 bytes.
    sizes = {**SMALL, "intermediate_size": 76}
    config = transformers.MixtralConfig(num_key_value_heads=3, num_local_experts=7, num_experts_per_tok=2, **sizes)
    model = transformers.MixtralForCausalLM(config)
    if experts:
        model.set_experts_implementation(experts)
    return model, {"input_ids": tokens(), "use_cache": False}, {**ATTENTION, **shardings}


def mixtral_by_experts() -> Made:
    return mixtral({"*.experts.gate_up_proj": "S[0]", "*.experts.down_proj": "S[0]"})


def mixtral_by_width() -> Made:
    return mixtral({"*.experts.down_proj": "S[2]"})


def mixtral_batched_by_experts() -> Made:
    return mixtral({"*.experts.gate_up_proj": "S[0]", "*.experts.down_proj": "S[0]"}, "batched_mm")


def mixtral_batched_by_width() -> Made:
    return mixtral({"*.experts.down_proj": "S[2]"}, "batched_mm")


MIXTURES = [mixtral_by_experts, mixtral_by_width, mixtral_batched_by_experts, mixtral_batched_by_width]
MODELS = [llama, qwen2, bert, t5, *MIXTURES, vit]


def plans(made: Made, ways: Iterable[tuple[int, str]]) -> Iterator[dr.Plan]:
    """Yield a plan of the model for each number of ranks and tail; it is imported once."""
    model, call, shardings = made
    imported = read_model(model.eval(), (), call)
    for ranks, tail in ways:
        mesh = dr.DeviceMesh((ranks,), ("tp",))
        yield compile_imported(imported, "model", shardings=shardings, mesh=mesh, tail=tail, check=True)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_it_gives_what_torch_gives(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    model, call, shardings = make()
    with torch.no_grad():
        expected = model.eval()(**call).logits
    for plan in plans((model, call, shardings), ((2, "ragged"), (3, "pad"), (5, "ragged"))):
        torch.testing.assert_close(plan(**call).logits, expected, atol=1e-5, rtol=1e-5)
        split = [i for i in plan.modules["sharded"].main.inputs if "S[" in str(i.value.type)]
        assert len(split) >= len(shardings)


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize("make", [resnet50, mobilenet_v2, convnext], ids=lambda f: f.__name__)
def test_pictures_are_split_from_the_first_layer_to_the_last(make: Callable[[], Made]) -> None:
    """Halos are sent, and the one sum over the picture is reduced: rows or columns are never gathered."""
    torch.manual_seed(0)
    model, call, shardings = make()
    with torch.no_grad():
        expected = model.eval()(**call).logits
    assert expected.std() > 1e-3
    for plan in plans((model, call, shardings), ((2, "ragged"), (3, "pad"), (5, "ragged"), (5, "pad"))):
        torch.testing.assert_close(plan(**call).logits, expected, atol=1e-4, rtol=1e-4)
        names = [op.name for op in plan.modules["distributed"].main.ops if Trait.COMMUNICATES in lookup(op.name).traits]
        assert set(names) == {"send", "all_reduce"}
        assert names.count("all_reduce") == 1


def test_a_mixture_cut_by_width_is_reduced_twice_a_layer() -> None:
    """Once behind the attention, once behind the experts: the rows sorted by expert are never gathered."""
    torch.manual_seed(0)
    [plan] = plans(mixtral_by_width(), [(3, "ragged")])
    ops = inline(plan.modules["distributed"]).main.ops
    assert [op.name for op in ops if Trait.COMMUNICATES in lookup(op.name).traits] == ["all_reduce"] * 4


def test_the_25_heads_of_gpt2_xl_on_any_number_of_ranks() -> None:
    """25 heads of 64 divide by no number of ranks but 5: each rank runs its own, without padding."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=1600, n_head=25, vocab_size=97, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    call = {"input_ids": tokens(), "use_cache": False}
    shardings = {"*.attn.c_attn.weight": "S[1]", "*.mlp.c_fc.weight": "S[1]"}
    with torch.no_grad():
        expected = model(**call).logits
    counts = (2, 3, 5, 7)
    ways = [(ranks, "ragged") for ranks in counts]
    for ranks, plan in zip(counts, plans((model, call, shardings), ways), strict=True):
        torch.testing.assert_close(plan(**call).logits, expected, atol=2e-5, rtol=2e-5)
        heads = "|".join(str(64 * (25 // ranks + (rank < 25 % ranks))) for rank in range(ranks))
        types = {i.value.name: str(i.value.type) for i in plan.modules["sharded"].main.inputs}
        assert types["transformer.h.0.attn.c_attn.weight"].endswith(f'"S[1: 3*({heads})]")')
        assert types["transformer.h.0.attn.c_proj.weight"].endswith(f'"S[0: {heads}]")')
        assert not [op for op in plan.modules["distributed"].main.ops if "pad" in op.name]
