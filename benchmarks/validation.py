"""Configurations to predict and to run on 1 and 2 ranks of this machine.

    distir validate benchmarks/validation.py:configurations --calibrate cpu.toml --plot scatter.svg

GPT-2 and MLP inference, MLP training; data, tensor and pipeline splits,
batches of 1 to 64, 1 to 8 microbatches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr

ALONE, PAIR = dr.DeviceMesh((1,), ("ranks",)), dr.DeviceMesh((2,), ("ranks",))


def configurations() -> dict[str, Any]:
    """All of them by name."""
    return {**gpt2(), **mlp_inference(), **training()}


def gpt2() -> dict[str, Any]:
    """GPT-2 of 4 layers of 384, 32 tokens a sample: whole, split by samples, split by heads and columns."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=384, n_head=6, vocab_size=5000)).eval()
    split = {"*.c_attn.weight": "S[1]", "*.c_fc.weight": "S[1]", "*.c_attn.bias": "S[0]", "*.c_fc.bias": "S[0]"}
    found: dict[str, Any] = {}
    for batch in (1, 4, 16, 64):
        tokens = torch.zeros(batch, 32, dtype=torch.long)

        def plan(mesh: dr.DeviceMesh, shardings: dict[str, str], tokens: torch.Tensor = tokens) -> dr.Plan:
            return dr.compile(
                model, (tokens,), example_kwargs={"use_cache": False}, mesh=mesh, shardings=shardings, name="gpt2"
            )

        found[f"gpt2 whole, batch {batch}"] = plan(ALONE, {})
        found[f"gpt2 tensor 2, batch {batch}"] = plan(PAIR, split)
        if batch > 1:
            found[f"gpt2 data 2, batch {batch}"] = plan(PAIR, {"input_ids": "S[0]"})
    return found


def mlp_inference() -> dict[str, Any]:
    """Linear layers with ReLUs between them: whole, split by samples, split by columns and rows in turn."""
    found: dict[str, Any] = {}
    for layers, width in ((6, 512), (4, 1024)):
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*parts).eval()
        split = {f"{4 * i}.weight": "S[0]" for i in range(layers // 2)}
        for batch in (1, 8, 64):
            x = torch.zeros(batch, width)
            what = f"mlp {layers} x {width}"
            found[f"{what} whole, batch {batch}"] = dr.compile(model, (x,), mesh=ALONE, name="mlp")
            found[f"{what} tensor 2, batch {batch}"] = dr.compile(model, (x,), mesh=PAIR, shardings=split, name="mlp")
            if batch > 1:
                plan = dr.compile(model, (x,), mesh=PAIR, shardings={"input": "S[0]"}, name="mlp")
                found[f"{what} data 2, batch {batch}"] = plan
    return found


def training() -> dict[str, Any]:
    """One step of training the paper's MLP, in float32: layers without bias, each a product and a ReLU, and SGD."""
    found: dict[str, Any] = {}
    strategies = (
        "1/1/1/1",
        "1/1/1/4",
        "2/1/1/1",
        "2/1/1/4",
        "1/2/1/1",
        "1/2/1/2",
        "1/1/2/1",
        "1/1/2/2",
        "1/1/2/4",
        "1/1/2/8",
    )
    for layers, width in ((4, 384), (6, 768)):
        linear = (nn.Linear(width, width, bias=False) for _ in range(layers))
        model = nn.Sequential(*(part for layer in linear for part in (layer, nn.ReLU())))
        for batch in (16, 64):
            for text in strategies:
                step = dr.compile_training(
                    model, F.mse_loss, optimizer=dr.optim.SGD(lr=1e-4), strategy=text, name="mlp",
                    example_batch=(torch.randn(batch, width), torch.randn(batch, width)),
                )  # fmt: skip
                found[f"training {layers} x {width}, {text}, batch {batch}"] = step.plan
    return found
