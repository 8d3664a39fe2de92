"""Perplexity of a language model in each precision, and by transformers: ``python benchmarks/precision_quality.py``.

The text is that of Python's help topics (``pydoc_data.topics``), which every installation has: the first 20,000 tokens,
in windows of 512. Weights are SmolLM2-135M-Instruct's, in the folder that ``benchmarks/generation_peers.py`` makes, or
another model's.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

import distir_relax as dr
from distir_relax.compiler.perplexity import default_text, perplexity, split_windows

TORCH = {"float32": torch.float32, "bf16": torch.bfloat16}


def theirs(folder: Path, dtype: torch.dtype, windows: Sequence[Sequence[int]]) -> float:
    """Return the perplexity by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def logits(window: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = model(torch.tensor([window]), use_cache=False).logits[0]
            return scores

    return perplexity(logits, windows)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/serving/hf"))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--precisions", nargs="*", default=["bf16", "int8", "int8-channel", "int4"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder)
    ids = tokenizer(default_text()[: 8 * options.tokens])["input_ids"][: options.tokens]
    for name, dtype in TORCH.items():
        print(f"transformers, {name}: {theirs(options.folder, dtype, split_windows(ids)):.4f}", flush=True)
    dr.compare_precision(options.folder, precisions=options.precisions, tokens=options.tokens, on_result=print)


if __name__ == "__main__":
    main()
