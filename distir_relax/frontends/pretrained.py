"""Import of pretrained models from folders written by `save_pretrained` of transformers."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.deferred_weights import deferred_weights, replace_buffers
from distir_relax.frontends.dynamic_shapes import Dim, bounds_of
from distir_relax.frontends.gguf_weights import deferred_gguf_weights
from distir_relax.layout import Symbol
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

_CONFIG, _GENERATION, _ADAPTERS = "config.json", "generation_config.json", "adapter_config.json"
_SEQUENCE = 128
LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options of `from_pretrained`: no downloads, and no code of the folder."""


@dataclass(frozen=True)
class Pretrained:
    """A model with the keyword arguments of its example call, and the symbolic dims of these."""

    model: Any
    inputs: Mapping[str, Any]
    dynamic_shapes: Mapping[str, Sequence[Symbol | None]]


def is_pretrained(target: str | Path) -> bool:
    """Return whether a path is a folder with a model's configuration.

    Raises ImportModelError for a folder that has adapters of peft alone, and for one whose list of them is damaged.
    """
    path = Path(target)
    if (path / _CONFIG).is_file():
        return True
    if (path / _ADAPTERS).is_file():
        base = _read_config(path, _ADAPTERS).table.get("base_model_name_or_path") or "BASE"
        raise ImportModelError(
            f"expected a model, found adapters of peft for {base}", str(path),
            f"merge them: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(base)!r}), "
            f"{str(path)!r}).merge_and_unload().save_pretrained(DIR), and the tokenizer's save_pretrained(DIR)",
        )  # fmt: skip
    return False


def read_pretrained(
    folder: str | Path, task: str | None = None, batch: int | None = None, sequence: int | None = None,
    dims: Mapping[str, Any] | None = None,
) -> Pretrained:  # fmt: skip
    """Load the model of a folder for a task, in evaluation mode, with inputs of `batch` samples of `sequence` tokens.

    Without a task the class is the first of ``architectures`` in the configuration. `dims` are bounds of ``batch`` and
    ``sequence``, which are then symbolic; so are those of encoders without a number. By default the others are 1 sample
    of 128 tokens, or of the model's maximum if smaller. Weights are read only from safetensors files, and no code of
    the folder runs.

    Raises ImportModelError if transformers is not installed, the folder is damaged, the task is unknown, the folder
    lacks weights of the model, or the model does not have these dims.
    """
    path = Path(folder)
    library = transformers_library()
    model = load_pretrained(_class_of(library, _read_config(path), path, task), path)
    main, bounds = str(model.main_input_name), dict(dims or {})
    if main == "pixel_values":
        return _image_model(model, path, batch, sequence, bounds)
    if main != "input_ids":
        raise ImportModelError(
            f"expected a model of tokens or images, found one that takes {main}", str(path),
            "write a function that returns (model, (), inputs)",
        )  # fmt: skip
    return _token_model(model, path, batch, sequence, bounds)


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
            model, info = loaded or kind.from_pretrained(path, **LOCAL, **options)
    except ImportModelError:
        raise
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise _unsupported_class(kind, path) from None
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
    _warn_of_inputs(model)
    replace_buffers(model)
    return model.eval()


def _unsupported_class(kind: Any, path: Path) -> ImportModelError:
    """Return the error for a folder whose model the class `kind`, an ``AutoModelFor...``, does not have."""
    library = transformers_library()
    config = library.AutoConfig.from_pretrained(path, **LOCAL)
    classes = library.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in classes:
        saved = ", ".join(config.architectures or ()) or "another class"
        return ImportModelError(
            f"transformers has no {kind.__name__} of the type {config.model_type!r}", str(path),
            f"it was saved as {saved}; --task chooses the class, unless with --generate",
        )  # fmt: skip
    return ImportModelError(
        f"expected a model for {kind.__name__}, found a vision-language model, which transformers loads as"
        f" {classes[type(config)].__name__}", str(path),
        "images are not supported: without --task and --generate the scores of tokens are compiled; to generate, "
        "save the language model alone",
    )  # fmt: skip


def _warn_of_inputs(model: Any) -> None:
    """Warn of images and sounds that a model of tokens can take, too: they are not imported."""
    others = [name for name in _OTHER_INPUTS if name in inspect.signature(model.forward).parameters]
    if others and model.main_input_name == "input_ids":
        warnings.warn(
            f"{type(model).__name__} is compiled for tokens alone, without {listed(others, 3)}",
            UserWarning, stacklevel=2,
        )  # fmt: skip


_OTHER_INPUTS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


def generating_class(path: Path) -> Any:
    """Return the class of transformers that generates with the model of a folder.

    That of an encoder-decoder is the first of ``architectures`` in its configuration. Raises ImportModelError as
    `read_pretrained` does.
    """
    library, config = transformers_library(), _read_config(path)
    if config.table.get("is_encoder_decoder") is True:
        return _class_of(library, config, path, None)
    return library.AutoModelForCausalLM


def checkpoint_dtype(path: Path) -> str:
    """Return the dtype that the configuration of a folder gives its weights, or else that of most of their numbers.

    Raises ImportModelError for files that cannot be read.
    """
    config = _read_config(path).table
    nested = config.get("text_config")
    for table in (config, nested if isinstance(nested, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(found := table.get(key), str) and found:
                return found.removeprefix("torch.")
    return most_common_dtype((str(x.dtype), x.numel()) for x in (deferred_weights(path) or {}).values())


def most_common_dtype(weights: Iterable[tuple[str, int]]) -> str:
    """Return the dtype of most numbers of weights, each given by its dtype and its number of elements."""
    counts: Counter[str] = Counter()
    for dtype, count in weights:
        counts[dtype.removeprefix("torch.")] += count
    return counts.most_common(1)[0][0] if counts else "float32"


def _load_deferred(kind: Any, path: Path, options: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Load a model with deferred tensors as its weights, and return it with the loading info; None if it cannot be."""
    import torch

    library = transformers_library()
    file = options.get("gguf_file")
    if file is None and "quantization_config" in _read_config(path).table:
        return None
    config = library.AutoConfig.from_pretrained(path, **LOCAL, **({} if file is None else {"gguf_file": file}))
    with torch.device("meta"):
        empty = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    weights = deferred_weights(path) if file is None else deferred_gguf_weights(path / file, empty)
    if weights is None:
        return None
    others = {name: value for name, value in options.items() if name != "gguf_file"}
    # Only the class of a model takes tensors.
    model, info = type(empty).from_pretrained(None, config=config, state_dict=weights, **LOCAL, **others)
    settings = generation_settings(path) if file is None and model.can_generate() else None
    if settings is not None:
        model.generation_config = settings
    return model, info


def generation_settings(path: Path) -> Any:
    """Return the settings of generation of a model's folder, a ``GenerationConfig``; None without them."""
    if not (path / _GENERATION).is_file():
        return None
    return transformers_library().GenerationConfig.from_pretrained(path, **LOCAL)


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


def _read_config(path: Path, name: str = _CONFIG) -> Fields:
    file = path / name
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


def _image_model(
    model: Any, path: Path, batch: int | None, sequence: int | None, dims: Mapping[str, Any]
) -> Pretrained:
    import torch

    if sequence is not None or "sequence" in dims:
        flag = "--dim sequence" if sequence is None else "--sequence"
        raise ImportModelError(f"the model takes images, which have no {flag}", str(path))
    _check_dims(dims, ("batch",), path)
    high, wide = _pair(model.config.image_size)
    rows = batch or _example_size(dims, "batch", 2 if dims else 1)
    pixels = torch.zeros(rows, model.config.num_channels, high, wide, dtype=model.dtype)
    return Pretrained(model, {"pixel_values": pixels}, {"pixel_values": [Dim("batch")]} if dims else {})


def _token_model(
    model: Any, path: Path, batch: int | None, sequence: int | None, dims: Mapping[str, Any]
) -> Pretrained:
    import torch

    _check_dims(dims, ("batch", "sequence"), path)
    config = model.config
    limit = _position_limit(model)
    _, longest = bounds_of(dims["sequence"], "sequence") if "sequence" in dims else (1, sequence)
    if limit is not None and longest is not None and longest > limit:
        flag = f"--sequence {sequence}" if "sequence" not in dims else f"--dim sequence up to {longest}"
        raise ImportModelError(f"the model takes at most {limit} positions, found {flag}", str(path))
    decoder = getattr(config, "is_encoder_decoder", False)
    encodes = not decoder and not model.can_generate()
    symbols = [
        Dim(name, max=high) if name in dims or (encodes and size is None) else None
        for name, size, high in (("batch", batch, None), ("sequence", sequence, limit))
    ]
    # A batch of one example is no example of any batch.
    rows = batch or _example_size(dims, "batch", 1 if symbols[0] is None else 2)
    length = sequence or _example_size(dims, "sequence", min(_SEQUENCE, limit or _SEQUENCE))
    ids = torch.zeros(rows, length, dtype=torch.int64)
    inputs = {"input_ids": ids}
    if decoder:
        inputs["decoder_input_ids"] = ids.clone()
    elif encodes:
        inputs["attention_mask"] = torch.ones_like(ids)
    symbolic = any(symbol is not None for symbol in symbols)
    return Pretrained(model, {**inputs, **_disable_cache(model)}, dict.fromkeys(inputs, symbols) if symbolic else {})


def _position_limit(model: Any) -> int | None:
    """Return the largest number of tokens that a model has positions for; None if any number is possible."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and its kin number positions from the one after that of padding.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit = module.num_embeddings - module.padding_idx - 1
    return limit


def _check_dims(dims: Mapping[str, Any], names: Sequence[str], path: Path) -> None:
    if unknown := sorted(dims.keys() - set(names)):
        raise ImportModelError(f"the model has no dim {unknown[0]!r}", str(path), f"its dims are {', '.join(names)}")


def _example_size(dims: Mapping[str, Any], name: str, default: int) -> int:
    """Return the size nearest to a default within the bounds of a dim; a single number is set after the import."""
    if isinstance(dims.get(name, 0), int):
        return default
    low, high = bounds_of(dims[name], name)
    return max(low, default if high is None else min(default, high))


def _disable_cache(model: Any) -> dict[str, Any]:
    """Return the argument that disables the cache of a model; without such a parameter set its configuration."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        return {"use_cache": False}
    # torch.export with symbolic dims does not take arguments that a model's **kwargs collect.
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return {}


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
