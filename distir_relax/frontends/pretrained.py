"""Pretrained models: a folder that `save_pretrained` of transformers wrote, as a model with example inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distir_relax.errors import ImportModelError
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
"""The class of transformers that reads a model for a task."""

_CONFIG = "config.json"
_SEQUENCE = 128


@dataclass(frozen=True)
class Pretrained:
    """A model with the keyword arguments of its example call."""

    model: Any
    inputs: Mapping[str, Any]


def is_pretrained(target: str | Path) -> bool:
    """Whether a path is a folder with the configuration of a model."""
    return (Path(target) / _CONFIG).is_file()


def read_pretrained(
    folder: str | Path, task: str | None = None, batch: int | None = None, sequence: int | None = None
) -> Pretrained:
    """The model of a folder for a task, in evaluation mode, and its inputs: `batch` samples of `sequence` tokens.

    Without a task the model is of the class that ``architectures`` of its configuration names. `batch` is 1, `sequence`
    128, or less where the model takes fewer positions. Weights are read from safetensors files alone, and no code of
    the folder is run.

    Raises ImportModelError where transformers is not installed, the folder is damaged, the task is not known, or the
    folder lacks weights of it.
    """
    path = Path(folder)
    config = _read_config(path)
    library = _transformers()
    kind = _class_of(library, config, path, task)
    if not [*path.glob("*.safetensors")]:
        raise ImportModelError(
            "expected weights in safetensors files, found none", str(path), "write it with model.save_pretrained(DIR)"
        )
    try:
        with _quiet(library):
            model, found = kind.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as wrong:
        reason = str(wrong).strip().partition("\n")[0]
        raise ImportModelError(f"transformers cannot read the model: {reason}", str(path)) from None
    if missing := sorted(found["missing_keys"]):
        raise ImportModelError(
            f"the folder has no weights for {listed(missing, 3)} of {type(model).__name__}", str(path),
            f"it was saved as {', '.join(config.texts('architectures', []) or ['another class'])}: choose its --task",
        )  # fmt: skip
    for key, held, wanted in sorted(found["mismatched_keys"]):
        raise ImportModelError(
            f"expected {tuple(wanted)} for {key}, found {tuple(held)}", str(path),
            "config.json and the weights are of different models",
        )  # fmt: skip
    return Pretrained(model.eval(), _inputs(model, path, batch, sequence))


def _read_config(path: Path) -> Fields:
    file = path / _CONFIG
    return Fields.of(
        parse_json(read_bytes(file, ImportModelError), ImportModelError, str(file)), ImportModelError, str(file)
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as missing:
        raise ImportModelError(
            f"a folder with config.json is read by the transformers library, which cannot be imported: {missing}",
            hint="pip install transformers",
        ) from None
    return transformers


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
    found = getattr(library, names[0], None) if names[0].isidentifier() else None
    if found is None or not hasattr(found, "from_pretrained"):
        raise ImportModelError(
            f"this transformers ({library.__version__}) has no model {names[0]!r}", str(path / _CONFIG),
            "code that comes with a model is not run: write a function that returns (model, (), inputs)",
        )  # fmt: skip
    return found


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Switch progress bars and remarks about weights off: missing weights are an error."""
    logging = library.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _inputs(model: Any, path: Path, batch: int | None, sequence: int | None) -> dict[str, Any]:
    """An example call of a model that takes tokens, or images."""
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
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or _SEQUENCE
    length = sequence or min(_SEQUENCE, most)
    if length > most and sequence is not None:
        raise ImportModelError(f"the model takes at most {most} positions, found --sequence {sequence}", str(path))
    ids = torch.zeros(rows, length, dtype=torch.int64)
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids.clone(), "use_cache": False}
    if model.can_generate():
        return {"input_ids": ids, "use_cache": False}
    # A model that could keep a cache keeps none here.
    cache = {"use_cache": False} if hasattr(config, "use_cache") else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **cache}


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
