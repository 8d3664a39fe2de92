"""Generation of tokens by a program that continues a sequence."""

from distir_relax.runtime.generation.prompt import prompt_ids, result_tokens, step_tokens
from distir_relax.runtime.generation.sampling import GREEDY, Sampling, TokenOptions, next_tokens
from distir_relax.runtime.generation.token_loop import LanguageProgram, generated_tokens

__all__ = [
    "GREEDY",
    "LanguageProgram",
    "Sampling",
    "TokenOptions",
    "generated_tokens",
    "next_tokens",
    "prompt_ids",
    "result_tokens",
    "step_tokens",
]
