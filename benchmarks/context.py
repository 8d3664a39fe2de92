"""Training on long texts, on one rank and with sequences split over two, with gathered keys and in turns:

    distir validate benchmarks/context.py:configurations --calibrate cpu.toml --steps 1 --passes 3

A small Llama, most of whose work is attention, on one text of 8,192 tokens and one of 32,768 (`LENGTHS`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

import distir_relax as dr

LENGTHS = (8192, 32768)
STRATEGIES = ("1/1/1/1", "1/1/1/1,context=2", "1/1/1/1,context=2,ring=on")


def configurations() -> dict[str, Any]:
    """All of them by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")
    config = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=max(LENGTHS), use_cache=False,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for length in LENGTHS:
        for strategy in STRATEGIES:
            torch.manual_seed(0)
            ids = torch.randint(0, 512, (1, length))
            step = dr.compile_training(
                LlamaForCausalLM(config), optimizer=dr.optim.AdamW(lr=1e-4),
                example_batch={"input_ids": ids, "labels": ids}, strategy=strategy, name=f"llama, {length} tokens",
            )  # fmt: skip
            found[f"{length} tokens, {strategy}"] = step.plan
    return found
