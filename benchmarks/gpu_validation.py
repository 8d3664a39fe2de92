"""Steps on one GPU to predict and to run, of models that no calibration uses.

    distir calibrate -o gpu.toml -n 1 --device cuda --links dgx-h100
    distir validate benchmarks/gpu_validation.py:configurations --profile gpu.toml --device cuda --passes 3

Inference, training and text generation; float32 and bfloat16; batches of 1 to 2,048. In about half of them the device
waits for its host, which starts ops from Python.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from validation_models import Encoder, Gated, Layer, next_words

import distir_relax as dr
from distir_relax.calibration.configurations import GenerationStep

LENGTH = 512
"""Tokens of a sample of a language model."""
_SIZES = {"small": (12, 768, 12, 50257), "wide": (4, 2048, 16, 8000)}


def configurations() -> dict[str, Any]:
    """All of them by name."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, batch, precision in (
        ("small", 1, "bf16"), ("small", 16, "bf16"), ("small", 4, "float32"), ("wide", 8, "bf16"),
        ("wide", 2, "float32"), ("encoder", 32, "bf16"), ("encoder", 4, "float32"), ("gated", 1, "bf16"),
        ("gated", 64, "bf16"), ("gated", 2048, "bf16"), ("gated", 300, "float32"),
    ):  # fmt: skip
        found[f"{name}, {precision}, batch {batch}"] = _plan(name, batch, precision)
    for name, batch, precision, strategy in (
        ("small", 8, "bf16", "1/1/1/1"), ("small", 4, None, "1/1/1/1"), ("wide", 8, "bf16", "1/1/1/1"),
        ("wide", 8, "bf16", "1/1/1/4"), ("wide", 8, "bf16", "1/1/1/1,checkpoint=block"),
        ("encoder", 32, "bf16", "1/1/1/1"), ("encoder", 8, None, "1/1/1/1"), ("gated", 2048, "bf16", "1/1/1/1"),
    ):  # fmt: skip
        found[f"training {name}, {precision or 'float32'}, batch {batch}, {strategy}"] = _step(
            name, batch, precision, strategy
        )
    for precision, requests, new, past in (
        ("bf16", 1, 512, 0), ("bf16", 4, 300, 0), ("bf16", 1, 1, 500), ("bf16", 8, 1, 300), ("bf16", 16, 1, 100),
        ("float32", 1, 1, 500), ("float32", 2, 400, 0),
    ):  # fmt: skip
        found[f"llama, {precision}, {requests} x {new} after {past}"] = GenerationStep(
            _language_model(precision), requests, new, past
        )
    return found


def _plan(name: str, batch: int, precision: str) -> dr.Plan:
    kwargs = {"use_cache": False} if name in _SIZES else None
    return dr.compile(
        _model(name).eval(), (_example(name, batch),), example_kwargs=kwargs, strategy="1/1/1/1", precision=precision,
        name=name,
    )  # fmt: skip


def _step(name: str, batch: int, precision: str | None, strategy: str) -> Any:
    inputs: Any = _example(name, batch)
    loss: Any = F.mse_loss
    targets = torch.randn(batch, 2048)
    if name == "encoder":
        loss, targets = F.cross_entropy, torch.randint(1000, (batch,))
    if name in _SIZES:
        loss, targets = next_words, inputs
        inputs = {"input_ids": inputs, "use_cache": False}
    return dr.compile_training(
        _model(name).train(), loss, optimizer=dr.optim.AdamW(lr=1e-4), example_batch=(inputs, targets),
        strategy=strategy, precision=precision, name=name,
    )  # fmt: skip


@cache
def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "encoder":
        return Encoder((Layer(1024, 16) for _ in range(8)), 1024, 768, 1000)
    if name == "gated":
        return nn.Sequential(*(Gated(2048, 5632) for _ in range(4)))
    layers, width, heads, words = _SIZES[name]
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, **none))


def _example(name: str, batch: int) -> torch.Tensor:
    torch.manual_seed(0)
    if name == "encoder":
        return torch.randn(batch, 197, 768)
    if name == "gated":
        return torch.randn(batch, 2048)
    return torch.randint(_SIZES[name][-1], (batch, LENGTH))


@cache
def _language_model(precision: str) -> dr.Generation:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=16000, max_position_embeddings=1024,
    )  # fmt: skip
    return dr.compile_generation(LlamaForCausalLM(config).eval(), strategy="1/1/1/1", precision=precision)
