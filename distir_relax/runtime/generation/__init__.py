"""Generation of tokens and text by a program that continues a sequence."""

from distir_relax.runtime.generation.prompt import Prompt
from distir_relax.runtime.generation.results import bundle_tokenizer, stream_results, whole_result
from distir_relax.runtime.generation.sampling import (
    GREEDY,
    Sampling,
    SequenceSampler,
    TokenHistory,
    next_tokens,
    sampling_of,
)
from distir_relax.runtime.generation.token_generator import TokenGenerator, TokenOptions
from distir_relax.runtime.generation.token_loop import LanguageProgram, Run, generated_tokens

__all__ = [
    "GREEDY",
    "LanguageProgram",
    "Prompt",
    "Run",
    "Sampling",
    "SequenceSampler",
    "TokenGenerator",
    "TokenHistory",
    "TokenOptions",
    "bundle_tokenizer",
    "generated_tokens",
    "next_tokens",
    "sampling_of",
    "stream_results",
    "whole_result",
]
