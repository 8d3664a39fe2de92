"""Configurations of transformers made small: few layers, narrow, a short vocabulary.

No family is named here. A field is recognised by its name, as far as the many authors agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

VOCABULARY = 211
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MULTIPLIERS = ("depth_coefficient", "width_coefficient")
_MISSING = {"vocab_size": VOCABULARY, "pad_token_id": 1, "prediction_length": 5}
# (pattern of a field's name, its small value); the first that matches counts.
_INTEGERS: tuple[tuple[str, int | Callable[[int], int]], ...] = (
    (r"(num|n)_(key_value|kv)_heads|multi_query_group_num|num_kv_heads", 2),
    (
        r"(.*_)?(num_)?attention_heads|n_heads?|(.*_)?num_(attention_)?heads|num_heads|num_attn_heads|.*_attention_heads",
        4,
    ),
    (
        r"(num|n)_(hidden_layers|layers?|blocks)|n_layers?|(encoder|decoder)_layers|num_(encoder|decoder)_layers|depth|.*num_hidden_layers|.*_depth|n_embd_layers",
        2,
    ),
    (r"vocab_size|.*_vocab_size|n_vocab", VOCABULARY),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_experts", 4),
    (r"num_experts_per_tok|moe_top_?k|moe_k|top_k_experts|num_selected_experts|num_experts_per_token", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts", 1),
    (r"moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_.*", 24),
    (
        r"intermediate_size|(encoder_|decoder_)?ffn_dim|d_ff|mlp_dim|n_inner|.*_ffn_dim|dim_feedforward|.*intermediate_size|ffn_hidden_size|.*feedforward_dim",
        72,
    ),
    (r"head_dim|d_kv|attention_head_dim|.*_head_dim|kv_channels|attention_head_size", lambda width: width // 4),
    (r"kv_lora_rank", 16),
    (r"q_lora_rank", 24),
    (
        r"hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|width|embedding_size|model_dim|d_embed|.*_hidden_size|.*_embed_dim|.*_hidden_dim|.*_d_model|emb_dim|hidden_size_per_layer_input",
        lambda width: width,
    ),
    (r"projection_dim|.*_projection_dim|out_hidden_size|proj_dim|out_dim", lambda width: width),
    (r"image_size|img_size|input_size|.*image_size", 64),
)


def small(kind: type, keep: tuple[str, ...] = (), width: int = 48) -> Any:
    """A configuration of class `kind` with small numbers; fields whose names match a pattern of `keep` stay.

    Raises whatever the class raises for numbers that do not fit each other.
    """
    return kind(**small_fields(kind(), keep, width))


def small_fields(config: Any, keep: tuple[str, ...] = (), width: int = 48) -> dict[str, Any]:
    """The fields of `config` to change, with their small values; nested configurations become dictionaries."""
    fields = _fields(config)
    layers = next((fields[n] for n in _LAYERS if isinstance(fields.get(n), int)), 0)
    kept = _kept_layers([v for v in fields.values() if isinstance(v, (list, tuple)) and len(v) == layers > 2])
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if any(re.fullmatch(p, name) for p in keep):
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            changed[name] = {**value.to_diff_dict(), **small_fields(value, keep, width)}
        elif kept and name in _LAYERS:
            changed[name] = len(kept)
        elif isinstance(value, (list, tuple)) and kept and len(value) == layers:
            changed[name] = type(value)(value[i] for i in kept)
        elif isinstance(value, (list, tuple)) and re.fullmatch(r"depths?|num_blocks|layers|.*_depths", name):
            changed[name] = type(value)(min(x, 2) if isinstance(x, int) else x for x in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            changed[name] = _small_integer(name, value, fields, width)
        elif name in _MULTIPLIERS:
            changed[name] = 1.0
        elif value is None and name in _MISSING:
            changed[name] = _MISSING[name]
    return {name: value for name, value in changed.items() if value != fields[name]}


def _fields(config: Any) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else list(vars(config))
    aliases = dict(getattr(config, "attribute_map", {}) or {})
    found = {}
    for name in names:
        if not name.startswith("_") and name not in aliases:
            # Some say by an error that each layer has a value of its own.
            with contextlib.suppress(Exception):
                found[name] = getattr(config, name)
    return found


def _kept_layers(lists: list[Any]) -> list[int]:
    """Up to four layers, of as many different kinds as these lists tell apart."""
    if not lists:
        return []
    kinds = [repr(kind) for kind in zip(*lists, strict=True)]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    return sorted({0, len(kinds) - 1, *first[:3]})[:4]


def _small_integer(name: str, value: int, fields: dict[str, Any], width: int) -> int:
    if name.endswith(("_token_id", "_token_index")):
        return value if 0 <= value < 10 else VOCABULARY - 1 - value % 60
    if value <= 2:
        return value
    if re.fullmatch(_INTEGERS[0][0], name) and value == fields.get("num_attention_heads"):
        return min(value, 4)
    for pattern, number in _INTEGERS:
        if re.fullmatch(pattern, name):
            return min(value, number if isinstance(number, int) else number(width))
    return min(value, 16) if name == "patch_size" else value
