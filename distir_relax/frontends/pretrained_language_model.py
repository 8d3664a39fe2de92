"""Import of causal language models with their tokenizers, from folders of transformers and from GGUF files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distir_relax.bundle import model_files
from distir_relax.errors import ImportModelError
from distir_relax.frontends.precision import precision_dtype
from distir_relax.frontends.pretrained import (
    checkpoint_dtype,
    generating_class,
    is_pretrained,
    load_pretrained,
    most_common_dtype,
    quiet_library,
    transformers_library,
    unreadable,
)
from distir_relax.support import check_regular
from distir_relax.support.precisions import PRECISIONS
from distir_relax.text import text_files

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
_WITHOUT_TEXT = "remove the tokenizer's files, to compile the model for token ids alone"


@dataclass(frozen=True)
class LanguageModel:
    """A language model, decoder-only or an encoder-decoder.

    `texts` are the files of its tokenizer in a bundle, by name; none without one. `precision`, of `PRECISIONS`, is that
    of the model as it was loaded, and `stored` the type of the numbers of most weights in its files.
    """

    model: Any
    texts: Mapping[str, str]
    precision: str
    stored: str


def is_gguf(target: str | Path) -> bool:
    """Return whether a path has the name of a GGUF file."""
    return Path(target).suffix == ".gguf"


def language_model_files(path: Path) -> list[Path]:
    """Return the files of weights that `read_language_model` reads."""
    return [path] if is_gguf(path) else model_files(path)


def read_language_model(path: str | Path, precision: str | None = None) -> LanguageModel:
    """Load a language model from a folder with ``config.json`` and safetensors files, or from a GGUF file.

    An encoder-decoder is of the class that its configuration names. Weights of other dtypes are converted to the
    `precision`, of `PRECISIONS`; without one bfloat16 stays bfloat16 if most weights are, as the configuration or the
    GGUF file says, and all others become float32. They are deferred tensors, which are read when an op needs them.
    Nothing is downloaded, and no code of the folder runs.

    Raises ImportModelError if there is no such folder or file, as `read_pretrained` does, and for a tokenizer that
    transformers cannot read.
    """
    target = Path(path)
    if is_gguf(target):
        check_regular(target, ImportModelError)
        folder, options = target.parent, {"gguf_file": target.name}
    elif is_pretrained(target):
        folder, options = target, {}
    else:
        kind = "a folder without it" if target.is_dir() else "a file" if target.exists() else "nothing"
        raise ImportModelError(
            f"expected a folder with config.json, or a .gguf file, found {kind}", str(target),
            "give a folder that save_pretrained wrote, or a downloaded one",
        )  # fmt: skip
    kind = transformers_library().AutoModelForCausalLM if options else generating_class(folder)
    stored = _gguf_dtype(target) if options else checkpoint_dtype(folder)
    chosen = precision or ("bf16" if stored == PRECISIONS["bf16"] else "float32")
    model = load_pretrained(kind, folder, deferred=True, dtype=precision_dtype(chosen), **options)
    if not options and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return LanguageModel(model, {}, chosen, stored)
    try:
        with quiet_library():
            tokenizer = transformers_library().AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:
        refused = unreadable(error, "the tokenizer", target)
        refused.hint = _WITHOUT_TEXT
        raise refused from None
    return LanguageModel(model, tokenizer_files(tokenizer, model), chosen, stored)


def _gguf_dtype(path: Path) -> str:
    """Return the type of most numbers in a GGUF file: a dtype, or a type of quantized numbers such as "Q4_K"."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    try:
        from gguf import GGUFReader

        tensors: Any = GGUFReader(path).tensors
        kinds = [(tensor.tensor_type.name, int(tensor.n_elements)) for tensor in tensors]
    except Exception as error:  # a damaged file raises whatever numpy or the reader raises
        raise unreadable(error, "the model", path) from None
    return most_common_dtype((names.get(kind, kind), count) for kind, count in kinds)


def tokenizer_files(tokenizer: Any, model: Any) -> dict[str, str]:
    """Return the files of a bundle for a tokenizer of transformers: its text, chat template and special tokens.

    Tokens that end a text are those of the model's generation config, or else the tokenizer's EOS.
    Raises ImportModelError for a tokenizer written in Python.
    """
    library = getattr(tokenizer, "backend_tokenizer", None)
    if library is None:
        raise ImportModelError(
            f"expected a tokenizer of the tokenizers library, found {type(tokenizer).__name__}", hint=_WITHOUT_TEXT
        )
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stop = tokenizer.eos_token_id if stop is None else stop
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    ends = () if stop is None else (stop,) if isinstance(stop, int) else stop
    return text_files(library.to_str(), special, ends, template, generation_defaults(model))


def generation_defaults(model: Any) -> dict[str, float]:
    """Return a model's own settings of generation, of `DEFAULTS`: those of its ``generation_config.json``.

    Warns of settings that change results and are not implemented.
    """
    config = getattr(model, "generation_config", None)
    given = {name: value for name, value in (config.to_diff_dict() if config else {}).items() if value is not None}
    found: dict[str, float] = {}
    if given.get("do_sample"):
        found = {
            "temperature": 1.0,
            **{name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given},
        }
    always = ("max_new_tokens", "repetition_penalty", "no_repeat_ngram_size")
    found |= {name: given[name] for name in always if name in given}
    if missing := [f"{name} = {given[name]}" for name in _MISSING if given.get(name) not in (None, 1, 0, False, [])]:
        warnings.warn(
            f"of the model's generation_config.json, {', '.join(missing)} is not implemented: its texts may differ",
            UserWarning, stacklevel=2,
        )  # fmt: skip
    return found


_MISSING = (
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "min_length",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "num_beams", "penalty_alpha", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale",
)  # fmt: skip
