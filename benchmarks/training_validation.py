"""Steps of training to predict and to run on 1 and 2 ranks of this machine: models of 4, by data and by tensor,
microbatches, ZeRO, checkpointing.

    distir validate benchmarks/training_validation.py:configurations --calibrate cpu.toml --plot scatter.svg

None of these models is among those that a profile is calibrated on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from validation_models import next_words

import distir_relax as dr

ALONE = ("1/1/1/1", "1/1/1/3", "1/1/1/1,checkpoint=block", "1/1/1/4,checkpoint=selective")
PAIR = ("2/1/1/1", "1/2/1/1", "2/1/1/3", "1/2/1/3", "2/1/1/1,zero=1", "2/1/1/3,zero=2", "1/2/1/2,checkpoint=block")

Made = tuple[nn.Module, Callable[[Any, Any], Any] | None, Any]


def configurations() -> dict[str, Any]:
    """All of them by name."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for make in (gpt2, llama, vit, mlp):
        torch.manual_seed(0)
        model, loss, batch = make()
        for strategy in (*ALONE, *PAIR):
            blocks = make is not mlp or "checkpoint" not in strategy
            if blocks:
                step = dr.compile_training(
                    model,
                    loss,
                    optimizer=dr.optim.AdamW(lr=1e-4),
                    example_batch=batch,
                    strategy=strategy,
                    name=make.__name__,
                )
                found[f"{make.__name__} {strategy}"] = step.plan
    return found


def gpt2() -> Made:
    """2 layers of 384 on 12 samples of 32 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=384, n_head=6, vocab_size=4000, **none)).train()
    return model, next_words, ({"input_ids": _ids(4000, 12, 32), "use_cache": False}, _ids(4000, 12, 32))


def llama() -> Made:
    """3 layers of 256, queries in groups, on 12 samples of 48 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2000,
    )  # fmt: skip
    inputs = {"input_ids": _ids(2000, 12, 48), "use_cache": False}
    return LlamaForCausalLM(config).train(), next_words, (inputs, _ids(2000, 12, 48))


def vit() -> Made:
    """4 layers of 192 on 24 images of 32 x 32."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768, image_size=32, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    model = ViTForImageClassification(config).train()
    return model, lambda out, y: F.cross_entropy(out.logits, y), (torch.randn(24, 3, 32, 32), torch.randint(10, (24,)))


def mlp() -> Made:
    """6 products of 1024 on 96 samples."""
    model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.GELU())])
    return model, F.mse_loss, (torch.randn(96, 1024), torch.randn(96, 1024))


def _ids(words: int, *shape: int) -> torch.Tensor:
    return torch.randint(words, shape)
