"""Perplexity of a language model in each precision, and by transformers: ``python benchmarks/precision_quality.py``.

The text is that of Python's help topics (``pydoc_data.topics``), which every installation has: the first 20,000 tokens,
in windows of 512. Weights are SmolLM2-135M-Instruct's, in the folder that ``benchmarks/generation_peers.py`` makes, or
another model's.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

import distir_relax as dr
from distir_relax.runtime.requests import Slot, ThreadRequests

WINDOW = 512


def perplexity(logits: Callable[[list[int]], torch.Tensor], windows: Sequence[list[int]]) -> float:
    """Return exp of the mean loss of the next token, over all positions but the last of each window."""
    total, count = 0.0, 0
    for window in windows:
        scores = logits(window)[:-1].float()
        total += float(torch.nn.functional.cross_entropy(scores, torch.tensor(window[1:]), reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)


def ours(folder: Path, precision: str, strategy: str, windows: Sequence[list[int]]) -> float:
    """Return the perplexity of a compiled model."""
    plan = dr.compile_generation(folder, precision=precision, strategy=strategy, max_length=WINDOW).plan
    ranks = ThreadRequests(plan.bundle(("torch",)))
    numbers = iter(range(len(windows)))

    def logits(window: list[int]) -> torch.Tensor:
        return ranks.logits([Slot(next(numbers), 0, window, len(window), len(window))])

    try:
        return perplexity(logits, windows)
    finally:
        ranks.close()


def theirs(folder: Path, dtype: torch.dtype, windows: Sequence[list[int]]) -> float:
    """Return the perplexity by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def logits(window: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = model(torch.tensor([window]), use_cache=False).logits[0]
            return scores

    return perplexity(logits, windows)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/serving/hf"))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--strategy", default="1/1/1/1")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder)
    ids = tokenizer(text[: 8 * options.tokens])["input_ids"][: options.tokens]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    print(f"{len(ids)} tokens in windows of {WINDOW}")
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        print(f"transformers, {name}: {theirs(options.folder, dtype, windows):.4f}", flush=True)
    for precision in ("float32", "bf16", "int8", "int4"):
        start = time.perf_counter()
        found = ours(options.folder, precision, options.strategy, windows)
        print(f"distir-relax, {precision}: {found:.4f} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
