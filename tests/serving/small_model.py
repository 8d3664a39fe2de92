"""A small language model with random weights, as a bundle that can be served."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import distir_relax as dr
from tests.tokenizers_of_tests import of_bytes, of_transformers


def saved(folder: Path, strategy: str = "1/2/1/1", heads: int = 3, spread: float = 0.02) -> Path:
    """A bundle with a tokenizer and a chat template, in a folder that also gets the model.

    With a larger `spread` of its weights, the tokens that it generates differ.
    """
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=heads,
        n_embd=8 * heads,
        vocab_size=311,
        n_positions=512,
        eos_token_id=1,
        initializer_range=spread,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    of_transformers(of_bytes()).save_pretrained(folder / "gpt2")
    generation = dr.compile_generation(folder / "gpt2", strategy=strategy)
    generation.plan.save(folder / "gpt2.dist", backends=("torch",))
    return folder / "gpt2.dist"
