"""Small tokenizers, trained on a few sentences: of bytes as GPT-2 and Llama 3, and of pieces as Llama 2."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = [
    "the night train from Hamburg was late again, so we slept at the station",
    "how do I bake a loaf of wild yeast bread for seven people?",
    "gr\u00fc\u00dfe aus K\u00f6ln, \u20ac 15 f\u00fcr zwei K\u00e4sebrote",
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]
CHAT = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}\n"
    "<|user|>{{ message['role'] }}:\n"
    "{% generation %}{{ message['content'] | trim }}<|end|>{% endgeneration %}{% endfor %}\n"
    "{% if add_generation_prompt %}<|user|>assistant:\n"
    "{% endif %}"
    "{% if tools is not none or documents is not none %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if enable_thinking %}think: {% endif %}"
)


@cache
def of_bytes() -> Any:
    """A byte-level BPE tokenizer that begins a text with BOS; its characters of several bytes are several tokens."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=311, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    library.train_from_iterator(WORDS, trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


@cache
def of_pieces() -> Any:
    """A BPE tokenizer with a mark for spaces, whose decoder drops the first one, and bytes for unknown characters."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=411, special_tokens=[*SPECIAL, *pieces], initial_alphabet=["\n"], show_progress=False
        ),
    )
    # The pieces of bytes are ordinary tokens.
    table = json.loads(library.to_str())
    table["added_tokens"] = [token for token in table["added_tokens"] if token["content"] in SPECIAL]
    return tokenizers.Tokenizer.from_str(json.dumps(table))


def of_transformers(library: Any) -> Any:
    """A tokenizer as the tokenizer class of transformers, with a chat template."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )
