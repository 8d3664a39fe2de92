"""Weights of model folders as deferred tensors: those that transformers loads, and which of them are in files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.errors import ImportModelError
from distir_relax.frontends.pretrained_language_model import read_language_model
from distir_relax.support.deferred_tensor import DeferredTensor, read_deferred

_SIZES = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 127}
_MORE = {**_SIZES, "intermediate_size": 44, "num_key_value_heads": 3}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_MORE, "tie_word_embeddings": True},
    "gpt2": _SIZES,
    "bloom": {"hidden_size": 36, "n_layer": 2, "n_head": 3, "vocab_size": 127},
    "gemma2": {**_MORE, "head_dim": 12},
    "mamba": {"hidden_size": 36, "num_hidden_layers": 2, "vocab_size": 127},
    "mixtral": {**_MORE, "num_local_experts": 3},
    "deepseek_v3": {**_MORE, "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 20, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", _MODELS)
def test_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **_MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.5)
    model.bfloat16().save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = read_language_model(tmp_path, "float32").model
    assert not found.training
    parameters = dict(found.named_parameters(remove_duplicate=False))
    buffers = dict(found.named_buffers())
    for key, tensor in (*expected.named_parameters(remove_duplicate=False), *expected.named_buffers()):
        other = parameters.pop(key, None) if key in parameters else buffers.pop(key)
        assert other.dtype == tensor.dtype
        assert torch.equal(read_deferred(other), tensor)
    assert not parameters
    assert not buffers
    stacked = [key for key, p in found.named_parameters() if p.source is None]
    assert all(re.search(r"mlp\.experts\.(gate_up|down)_proj$", key) for key in stacked)
    assert bool(stacked) == (name in ("mixtral", "deepseek_v3"))
    # Tied parameters stay one.
    assert len([*found.parameters()]) == len([*expected.parameters()]) + (name == "deepseek_v3")
    assert isinstance(found.get_input_embeddings().weight, DeferredTensor)


def test_folders_that_are_damaged(tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=3, n_embd=24, vocab_size=127))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ImportModelError, match=r"model\.safetensors: the weights are damaged or half-written"):
        read_language_model(tmp_path)
    file.write_bytes(content)
    read = read_language_model(tmp_path).model
    file.write_bytes(content[:-10])
    with pytest.raises(Exception, match=r"model\.safetensors: the weights were (modified|truncated) while"):
        read(torch.tensor([[1, 2]]))


def test_experts_in_bfloat16_are_those_of_transformers(tmp_path: Path) -> None:
    """Experts in bfloat16 are products of `torch._grouped_mm`, which checks the strides of weights."""
    torch.manual_seed(0)
    sizes = {**_MODELS["mixtral"], "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model("mixtral", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    plan = dr.compile_generation(tmp_path, precision="bf16", max_length=16).plan
    logits = plan(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits.float(), model(ids).logits[:, -1].float(), rtol=0.05, atol=0.02)
