"""Language models of transformers with random weights: decoder-only models, and encoder-decoders."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

VOCABULARY, LENGTH, BINS, FRAMES = 61, 23, 7, 26
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
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 5, "conv_kernel": 3}
STATE_SPACE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", _MAMBA),
    "falcon mamba": ("FalconMamba", _MAMBA),
    "jamba": ("Jamba", {**GROUPED, "num_experts": 3, "mamba_d_state": 4, "mamba_d_conv": 3, "attn_layer_period": 2,
                        "attn_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False}),
}  # fmt: skip
_DECODER = {"decoder_layers": 2, "decoder_attention_heads": 5, "decoder_ffn_dim": 44, "decoder_start_token_id": 2}
_ENCODER = {"encoder_layers": 2, "encoder_attention_heads": 5, "encoder_ffn_dim": 44, "d_model": 30}
_SHARED = {"vocab_size": VOCABULARY, **_ENCODER, **_DECODER}
_T5 = {"vocab_size": VOCABULARY, "d_model": 30, "d_kv": 6, "d_ff": 44, "num_heads": 5, "num_layers": 2,
       "dropout_rate": 0.0, "decoder_start_token_id": 0}  # fmt: skip
_WHISPER = {**_SHARED, "num_mel_bins": BINS, "max_source_positions": FRAMES // 2, "max_target_positions": 64,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "suppress_tokens": None,
            "begin_suppress_tokens": None}  # fmt: skip
_BART = {**_SHARED, "max_position_embeddings": 64, "forced_eos_token_id": None}
EAGER = {"attn_implementation": "eager"}
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "t5 with gates, eager": ("T5", {**_T5, **EAGER, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", _BART),
    "bart eager": ("Bart", {**_BART, **EAGER}),
    "marian": ("Marian", {**_BART, "pad_token_id": 0}),
    "whisper": ("Whisper", _WHISPER),
    "whisper eager": ("Whisper", {**_WHISPER, **EAGER}),
}


@cache
def language_model(name: str) -> Any:
    """Return a decoder-only model of `MODELS` or `STATE_SPACE`, with the initial weights of transformers."""
    torch.manual_seed(0)
    kind, options = (MODELS | STATE_SPACE)[name]
    family = kind.removesuffix("LMHead")
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{kind}Model" if kind != family else f"{kind}ForCausalLM")(config).eval()


@cache
def encoder_decoder(name: str) -> Any:
    """Return a model of `ENCODER_DECODERS`, whose tokens depend on the encoder's input."""
    torch.manual_seed(0)
    kind, options = ENCODER_DECODERS[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration")(config)
    return with_large_weights(model.eval())


def with_large_weights(model: Any) -> Any:
    """Return the model with weights so large that each of its parts has an effect on the logits."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def encoder_input(name: str, batch: int, length: int) -> torch.Tensor:
    """Return tokens, (batch, length), or for Whisper features of the one length that it takes."""
    generator = torch.Generator().manual_seed(length)
    if "whisper" in name:
        return torch.randn(batch, BINS, FRAMES, generator=generator)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
