"""How long a 32-layer Llama of width 512 takes to become a step of training: import, gradients, placement, lowering.

    python benchmarks/compile_training.py

Of each strategy the seconds in all, those of torch.export alone, what is left, and each pass.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import distir_relax as dr


def llama(layers: int = 32) -> nn.Module:
    """Parameters without data: nothing here needs it."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    return model


def next_words(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())


def main() -> None:
    warnings.simplefilter("ignore")
    exporting, export = [0.0], torch.export.export

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = export(*args, **kwargs)
        exporting[0] += time.perf_counter() - begin
        return found

    torch.export.export = timed
    for strategy, rows in (("1/1/1/1", 8), ("2/2/1/4", 8), ("128/8/1/4", 1024), ("2/2/1/4", 8)):
        model, ids, exporting[0] = llama(), torch.zeros(rows, 128, dtype=torch.long), 0.0
        begin = time.perf_counter()
        step = dr.compile_training(
            model, next_words, optimizer=dr.optim.AdamW(), example_batch=({"input_ids": ids}, ids), strategy=strategy,
            verify=False,
        )  # fmt: skip
        taken = time.perf_counter() - begin
        passes = ", ".join(f"{name} {seconds:.2f}" for name, seconds in step.plan.seconds.items() if seconds > 0.05)
        rest = taken - exporting[0]
        print(
            f"{strategy:10} {taken:5.2f} s, torch.export {exporting[0]:5.2f}, the rest {rest:5.2f}: {passes}",
            flush=True,
        )


if __name__ == "__main__":
    main()
