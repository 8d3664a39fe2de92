"""Language models of transformers, unmodified: a sequence in random chunks gives the logits of the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.analysis.causality import check_causality
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.ir import CachedState
from tests.incremental.chunks import cuts, derived, in_chunks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
VOCABULARY, LENGTH, WAYS = 61, 23, 13
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "intermediate_size": 44, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "n_embd": 32}),
    "gpt2 eager": ("GPT2LMHead", {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "n_embd": 32,
                                  "attn_implementation": "eager"}),
    "llama": ("Llama", GROUPED),
    "llama eager": ("Llama", {**GROUPED, "attn_implementation": "eager"}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 8}),
    "gemma2 with a window of 5": ("Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 5}),
    "mistral with a window of 7": ("Mistral", {**GROUPED, "sliding_window": 7}),
    "phi": ("Phi", GROUPED),
    "phi3": ("Phi3", {**GROUPED, "pad_token_id": 0}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 44, "word_embed_proj_dim": 32}),
    "gpt neox": ("GPTNeoX", {**SMALL, "intermediate_size": 44}),
    "falcon": ("Falcon", SMALL),
    "falcon with alibi": ("Falcon", {**SMALL, "alibi": True}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_logits_of_the_whole(name: str) -> None:
    torch.manual_seed(0)
    kind, options = MODELS[name]
    family = kind.removesuffix("LMHead")
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{kind}Model" if kind != family else f"{kind}ForCausalLM")(config).eval()
    dims = {"input_ids": {0: "batch", 1: dr.Dim("sequence", max=256)}}
    example = torch.randint(0, VOCABULARY, (2, 9))
    imported = import_torch(model, (example,), {"use_cache": False}, dynamic_shapes=dims)
    check_causality(imported.module, imported.tensors, "sequence")
    module = derived(imported)
    grown = [record for record in module.records if isinstance(record, CachedState)]
    # Keys and values of both layers, before they are repeated for the heads of a group.
    assert len(grown) == 4
    kept = {i.value.name: i.value.tensor for i in module.main.inputs if i.value.name in {s.input for s in grown}}
    heads = config.num_attention_heads
    groups = 1 if family == "Falcon" else getattr(config, "num_key_value_heads", heads)
    width = groups * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    assert all(kind.typical.elements == 2 * 8 * width for kind in kept.values()), kept
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for seed in range(WAYS):
        found = in_chunks(module, imported, {"input_ids": ids}, cuts(LENGTH, seed))
        torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-6)
