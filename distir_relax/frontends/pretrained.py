"""Import of pretrained models from folders written by `save_pretrained` of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.deferred_weights import deferred_weights, replace_buffers
from distir_relax.frontends.gguf_weights import deferred_gguf_weights
from distir_relax.support import Fields, parse_json, read_bytes
from distir_relax.support.units import listed

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
    "feature-extraction": "AutoModel",
}
"""The transformers class for each task."""

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_SEQUENCE = 128
_LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class Pretrained:
    """A model with the keyword arguments of its example call."""

    model: Any
    inputs: Mapping[str, Any]


def is_pretrained(target: str | Path) -> bool:
    """Return whether a path is a folder with a model's configuration."""
    return (Path(target) / _CONFIG).is_file()


def read_pretrained(
    folder: str | Path, task: str | None = None, batch: int | None = None, sequence: int | None = None
) -> Pretrained:
    """Load the model of a folder for a task, in evaluation mode, with inputs of `batch` samples of `sequence` tokens.

    Without a task the class is the first of ``architectures`` in the configuration. By default `batch` is 1, and
    `sequence` 128, or the model's maximum if smaller. Weights are read only from safetensors files, and no code of the
    folder runs.

    Raises ImportModelError if transformers is not installed, the folder is damaged, the task is unknown, or the folder
    lacks weights of the model.
    """
    path = Path(folder)
    library = transformers_library()
    model = load_pretrained(_class_of(library, _read_config(path), path, task), path)
    return Pretrained(model, _inputs(model, path, batch, sequence))


def load_pretrained(kind: Any, path: Path, deferred: bool = False, **options: Any) -> Any:
    """Load a model of the class `kind` from a folder, in evaluation mode. `options` are those of `from_pretrained`.

    With `deferred` the parameters are read when an op needs them, unless those of a folder are quantized.
    Raises ImportModelError as `read_pretrained` does.
    """
    if "gguf_file" not in options and not [*path.glob("*.safetensors")]:
        raise ImportModelError(
            "expected weights in safetensors files, found none", str(path), "write it with model.save_pretrained(DIR)"
        )
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quiet_library():
            loaded = _load_deferred(kind, path, options) if deferred else None
            model, info = loaded or kind.from_pretrained(path, **_LOCAL, **options)
    except ImportModelError:
        raise
    except Exception as error:
        raise unreadable(error, "the model", path / options.get("gguf_file", "")) from None
    if missing := sorted(info["missing_keys"]):
        saved = _read_config(path).texts("architectures", []) if is_pretrained(path) else ()
        raise ImportModelError(
            f"the folder has no weights for {listed(missing, 3)} of {type(model).__name__}", str(path),
            f"it was saved as {', '.join(saved) or 'another class'}; --task chooses the class, unless with --generate",
        )  # fmt: skip
    for key, shape, expected in sorted(info["mismatched_keys"]):
        raise ImportModelError(
            f"expected {tuple(expected)} for {key}, found {tuple(shape)}", str(path),
            "config.json and the weights are of different models",
        )  # fmt: skip
    replace_buffers(model)
    return model.eval()


def generating_class(path: Path) -> Any:
    """Return the class of transformers that generates with the model of a folder.

    That of an encoder-decoder is the first of ``architectures`` in its configuration. Raises ImportModelError as
    `read_pretrained` does.
    """
    library, config = transformers_library(), _read_config(path)
    if config.table.get("is_encoder_decoder") is True:
        return _class_of(library, config, path, None)
    return library.AutoModelForCausalLM


def _load_deferred(kind: Any, path: Path, options: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Load a model with deferred tensors as its weights, and return it with the loading info; None if it cannot be."""
    import torch

    library = transformers_library()
    file = options.get("gguf_file")
    if file is None and "quantization_config" in _read_config(path).table:
        return None
    config = library.AutoConfig.from_pretrained(path, **_LOCAL, **({} if file is None else {"gguf_file": file}))
    with torch.device("meta"):
        empty = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    weights = deferred_weights(path) if file is None else deferred_gguf_weights(path / file, empty)
    if weights is None:
        return None
    others = {name: value for name, value in options.items() if name != "gguf_file"}
    # Only the class of a model takes tensors.
    model, info = type(empty).from_pretrained(None, config=config, state_dict=weights, **_LOCAL, **others)
    if file is None and model.can_generate() and (path / _GENERATION).is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(path, **_LOCAL)
    return model, info


def unreadable(error: Exception, what: str, path: Path) -> ImportModelError:
    """Return the error for a folder or file that transformers does not read."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return ImportModelError(f"transformers cannot read {what}: {reason}", str(path))


def transformers_library() -> Any:
    """Return the module transformers. Raises ImportModelError if it is not installed."""
    try:
        import transformers
    except ImportError as missing:
        raise ImportModelError(
            f"transformers, which reads the files of models, cannot be imported: {missing}",
            hint="pip install transformers",
        ) from None
    return transformers


@contextmanager
def quiet_library() -> Iterator[None]:
    """Disable progress bars and warnings of transformers: missing weights are an error."""
    logging = transformers_library().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _read_config(path: Path) -> Fields:
    file = path / _CONFIG
    return Fields.of(
        parse_json(read_bytes(file, ImportModelError), ImportModelError, str(file)), ImportModelError, str(file)
    )


def _class_of(library: Any, config: Fields, path: Path, task: str | None) -> Any:
    if task is not None:
        if task not in TASKS:
            raise ImportModelError(f"expected one of {', '.join(TASKS)}, found {task!r}", "--task")
        return getattr(library, TASKS[task])
    names = config.texts("architectures", [])
    if not names:
        raise ImportModelError(
            "the configuration names no architecture", str(path / _CONFIG), f"give --task: {', '.join(TASKS)}"
        )
    model_class = getattr(library, names[0], None) if names[0].isidentifier() else None
    if model_class is None or not hasattr(model_class, "from_pretrained"):
        raise ImportModelError(
            f"this transformers ({library.__version__}) has no model {names[0]!r}", str(path / _CONFIG),
            "code in a model's folder does not run: write a function that returns (model, (), inputs)",
        )  # fmt: skip
    return model_class


def _inputs(model: Any, path: Path, batch: int | None, sequence: int | None) -> dict[str, Any]:
    """Return an example call of a model that takes tokens, or images."""
    import torch

    config, rows = model.config, batch or 1
    main = str(model.main_input_name)
    if main == "pixel_values":
        if sequence is not None:
            raise ImportModelError("the model takes images, which have no --sequence", str(path))
        high, wide = _pair(config.image_size)
        return {"pixel_values": torch.zeros(rows, config.num_channels, high, wide, dtype=model.dtype)}
    if main != "input_ids":
        raise ImportModelError(
            f"expected a model of tokens or images, found one that takes {main}", str(path),
            "write a function that returns (model, (), inputs)",
        )  # fmt: skip
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or _SEQUENCE
    length = sequence or min(_SEQUENCE, limit)
    if length > limit and sequence is not None:
        raise ImportModelError(f"the model takes at most {limit} positions, found --sequence {sequence}", str(path))
    ids = torch.zeros(rows, length, dtype=torch.int64)
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids.clone(), "use_cache": False}
    if model.can_generate():
        return {"input_ids": ids, "use_cache": False}
    # Disable the cache of models that have one.
    cache = {"use_cache": False} if hasattr(config, "use_cache") else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **cache}


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
