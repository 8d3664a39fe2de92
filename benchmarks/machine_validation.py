"""120 steps on 1 to 4 ranks of this machine to predict and to run, of models that no calibration uses.

    distir validate benchmarks/machine_validation.py:configurations --calibrate cpu.toml --plot scatter.svg
    distir validate benchmarks/machine_validation.py:sample --calibrate cpu.toml      # every fourth of them

Inference, training and text generation (prompts, and tokens with a cache of keys and values); float32, bfloat16, and
weights of 8 bits; tensor, data and pipeline parallelism, sums of gradients overlapped and in program order; batches of
1 to 64. Steps take 2 to 300 ms on two cores. Programs of 3 and 4 ranks are data and tensor parallel, in which all ranks
compute at the same time: on two cores each has a part of one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from validation_models import Encoder, Gated, Layer, next_words

import distir_relax as dr
from distir_relax.calibration.configurations import GenerationStep

WORDS = 3000
"""Vocabulary of the language models."""

Make = Callable[[], Any]


def configurations() -> dict[str, Any]:
    """All of them by name."""
    return _made(1)


def sample() -> dict[str, Any]:
    """Every fourth of them."""
    return _made(4)


def _made(every: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    entries = [*_inference(), *_training(), *_generation()]
    return {name: make() for name, make in entries[::every]}


def _inference() -> Iterator[tuple[str, Make]]:
    """GPT-2, an encoder and a gated feed-forward network, in three formats of weights."""
    for precision in ("float32", "bf16", "int8"):
        for name, batches in (("gpt2", (1, 6, 23)), ("encoder", (3, 17)), ("gated", (1, 12, 64))):
            for batch in batches:
                strategies = ["1/1/1/1", "1/2/1/1"] if batch == 1 else ["1/1/1/1", "2/1/1/1", "1/2/1/1"]
                if precision == "int8":
                    strategies = [strategies[batch % 2]]
                for strategy in strategies:
                    yield _plan(name, batch, strategy, precision)
    yield _plan("gated", 64, "1/1/2/4,schedule=streaming", "float32")
    yield _plan("encoder", 18, "1/1/2/3,schedule=streaming", "float32")
    for strategy in ("3/1/1/1", "1/3/1/1", "4/1/1/1", "1/4/1/1"):
        yield _plan("gpt2", 12, strategy, "float32")


def _plan(name: str, batch: int, strategy: str, precision: str) -> tuple[str, Make]:
    def make() -> dr.Plan:
        model, example = _model(name, batch)
        kwargs = {"use_cache": False} if name == "gpt2" else None
        return dr.compile(
            model.eval(), (example,), example_kwargs=kwargs, strategy=strategy, precision=precision, name=name
        )

    return f"{name}, {precision}, {strategy}, batch {batch}", make


def _training() -> Iterator[tuple[str, Make]]:
    """Steps of AdamW in float32 and bfloat16: data, tensor, pipeline, ZeRO, checkpointing, overlapped sums or none."""
    pairs = ("2/1/1/1", "1/2/1/1", "1/1/2/4,schedule=1f1b", "2/1/1/2,zero=1")
    for name, batch in (("gpt2", 14), ("encoder", 16), ("gated", 60)):
        for precision in (None, "bf16"):
            for strategy in ("1/1/1/1", *pairs[:3], *(("1/1/1/3", pairs[3]) if precision is None else ())):
                yield _step(name, batch, strategy, precision)
        yield _step(name, batch, "2/1/1/1", None, overlap=0.0)
    yield _step("encoder", 16, "1/1/2/5,schedule=zb-h1", None)
    yield _step("gated", 60, "1/1/2/6,schedule=gpipe,checkpoint=block", None)
    for strategy in ("3/1/1/1", "4/1/1/1", "1/3/1/1"):
        yield _step("gated", 60, strategy, None)


def _step(
    name: str, batch: int, strategy: str, precision: str | None, overlap: float | None = None
) -> tuple[str, Make]:
    def make() -> Any:
        model, example = _model(name, batch)
        options = {} if overlap is None else {"overlap": overlap}
        targets = torch.randint(10, (batch,)) if name == "encoder" else torch.randn(batch, 640)
        inputs: Any = example
        loss: Callable[[Any, Any], Any] = F.cross_entropy if name == "encoder" else F.mse_loss
        if name == "gpt2":
            inputs, targets = {"input_ids": example, "use_cache": False}, torch.randint(WORDS, example.shape)
            loss = next_words
        return dr.compile_training(
            model.train(), loss, optimizer=dr.optim.AdamW(lr=1e-4), example_batch=(inputs, targets), strategy=strategy,
            precision=precision, name=name, **options,
        )  # fmt: skip

    kind = f"training {name}, {precision or 'float32'}, {strategy}"
    return kind + ("" if overlap is None else ", in order"), make


def _generation() -> Iterator[tuple[str, Make]]:
    """Steps of a Llama: prompts, and tokens after 40 to 300 others, of 1 to 16 requests."""
    steps = ((1, 128, 0), (3, 70, 0), (1, 1, 300), (6, 1, 90), (16, 1, 40))
    for precision in ("float32", "bf16", "int8"):
        for strategy in ("1/1/1/1", "1/2/1/1"):
            for number, step in enumerate(steps):
                if precision != "int8" or number in (0, 2):
                    yield _tokens(strategy, precision, *step)


def _tokens(strategy: str, precision: str, requests: int, new: int, past: int) -> tuple[str, Make]:
    def make() -> GenerationStep:
        return GenerationStep(_language_model(strategy, precision), requests, new, past)

    what = f"{new} new after {past}" if past else f"{new} new"
    return f"llama, {precision}, {strategy}, {requests} x {what}", make


@cache
def _language_model(strategy: str, precision: str) -> dr.Generation:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=448, intermediate_size=1216, num_hidden_layers=7, num_attention_heads=7, num_key_value_heads=7,
        vocab_size=8192, max_position_embeddings=512,
    )  # fmt: skip
    return dr.compile_generation(LlamaForCausalLM(config).eval(), strategy=strategy, precision=precision)


def _model(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and the example of its input."""
    torch.manual_seed(0)
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_layer=3, n_embd=320, n_head=5, vocab_size=WORDS, **none)
        return GPT2LMHeadModel(config), torch.randint(WORDS, (batch, 36))
    if name == "encoder":
        return Encoder((Layer(224, 7) for _ in range(4)), 224, 40, 10), torch.randn(batch, 45, 40)
    return nn.Sequential(*(Gated(640, 1536) for _ in range(6))), torch.randn(batch, 640)
