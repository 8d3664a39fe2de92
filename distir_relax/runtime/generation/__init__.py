"""Generation of tokens and text by a program that continues a sequence."""

from distir_relax.runtime.generation.prompt import Prompt
from distir_relax.runtime.generation.sampling import GREEDY, Sampling, next_tokens
from distir_relax.runtime.generation.text_output import bundle_tokenizer, text_pieces
from distir_relax.runtime.generation.token_generator import (
    SessionGenerator,
    TokenGenerator,
    TokenOptions,
    check_stop_text,
)
from distir_relax.runtime.generation.token_loop import LanguageProgram, generated_tokens

__all__ = [
    "GREEDY",
    "LanguageProgram",
    "Prompt",
    "Sampling",
    "SessionGenerator",
    "TokenGenerator",
    "TokenOptions",
    "bundle_tokenizer",
    "check_stop_text",
    "generated_tokens",
    "next_tokens",
    "text_pieces",
]
