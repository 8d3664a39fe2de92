"""Import of language models over whole sequences: decoder-only models and encoder-decoders."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.dynamic_shapes import Dim
from distir_relax.frontends.import_model import import_model
from distir_relax.frontends.imported_model import Imported, eliminate_dead_ops
from distir_relax.frontends.torch.export_check import call_model
from distir_relax.interpret.causality import are_close
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import producers
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.layout import size_of, symbols_of

if TYPE_CHECKING:
    import torch

_EXAMPLE = (2, 9)
_LEAST = 3
"""The least bound of a size in an export: its example is below, and above 1, which is a case of its own."""
_SOURCE_EXAMPLE = (2, 7)
_LENGTH = 2048
_DECODER = "decoder_input_ids"


@dataclass(frozen=True)
class LengthLimits:
    """The largest number of tokens of a sequence, of sequences at once, and of tokens of an encoder's input.

    None is any number of sequences, and the model's number of tokens.
    """

    sequence: int
    batch: int | None = None
    source: int | None = None


@dataclass(frozen=True)
class EncoderInput:
    """The encoder's input of an encoder-decoder: its name, and the token that the decoder begins with."""

    name: str
    start: int


_LENGTH_FIELDS = (
    "max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx",
    "seq_length",
)  # fmt: skip
"""The fields of configs that bound a sequence, by family; the first that a config has counts."""


def max_positions(model: Any, length: int | None) -> int:
    """Return the largest number of tokens of a sequence: `length`, or that of the model's config.

    Raises ImportModelError for a `length` above that.
    """
    config = getattr(model, "config", None)
    most = next((found for name in _LENGTH_FIELDS if (found := getattr(config, name, None))), None)
    if most is not None and length is not None and length > most:
        raise ImportModelError(
            f"the model takes at most {most} positions, found max_length {length}",
            hint=f"give at most {most}, or leave it out",
        )
    return length or most or _LENGTH


def encoder_input(model: Any) -> EncoderInput | None:
    """Return the encoder's input of an encoder-decoder, which takes ``decoder_input_ids`` besides; None for others.

    Raises ImportModelError for one whose config does not say with which token the decoder begins.
    """
    config = getattr(model, "config", None)
    parameters = _parameters(model)
    if not getattr(config, "is_encoder_decoder", False) or _DECODER not in parameters:
        return None
    name = str(getattr(model, "main_input_name", next(iter(parameters))))
    sources = (getattr(model, "generation_config", None), config)
    tokens = (getattr(s, field, None) for field in ("decoder_start_token_id", "bos_token_id") for s in sources)
    start = next((token for token in tokens if token is not None), None)
    if start is None:
        raise ImportModelError("expected a token that the decoder begins with, found none", hint=_START)
    return EncoderInput(name, int(start))


_START = "set model.generation_config.decoder_start_token_id"


def import_language_model(
    model: Any, limits: LengthLimits, encoder: EncoderInput | None = None, encoder_example: Any = None
) -> Imported:
    """Import a language model over a whole sequence, with its logits as the only output.

    `encoder` is the encoder's input of an encoder-decoder, and `encoder_example` a batch of two of it, needed unless it
    takes tokens, or features of a size that the config gives.

    Raises ImportModelError for a model that is not of torch, without such an output, and for a missing example. Where
    torch.export suggests a bound of a size, the hint is the option with it.
    """
    try:
        return _import_language_model(model, limits, encoder, encoder_example)
    except ImportModelError as error:
        if not (bound := re.search(r"(sequence|batch|source) = Dim\('\w+', max=(\d+)\)", error.hint)):
            raise
        # A size that is special to torch, as the whole of a table is, is none to the model (`_with_last_length`).
        is_special = f"guard {bound[1]} != {int(bound[2]) + 1}." in error.message
        hint = f"the model is limited to this size: give {_OPTIONS[bound[1]]}={int(bound[2]) + is_special}"
        raise ImportModelError(error.message, error.where, hint) from None


_OPTIONS = {"sequence": "max_length", "batch": "max_batch", "source": "max_source"}


def _import_language_model(
    model: Any, limits: LengthLimits, encoder: EncoderInput | None, encoder_example: Any
) -> Imported:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ImportModelError(f"expected a torch module, or the path of a model, found {type(model).__name__}")
    parameters = _parameters(model)
    kwargs: dict[str, Any] = {"use_cache": False} if _takes_use_cache(model) else {}
    bounds = LengthLimits(
        max(limits.sequence, _LEAST),
        None if limits.batch is None else max(limits.batch, _LEAST),
        None if limits.source is None else max(limits.source, _LEAST),
    )
    longest = bounds.sequence
    batch = Dim("batch", max=bounds.batch, typical=1)
    ids = _ids(model, (_EXAMPLE[0], min(_EXAMPLE[1], longest - 1)))
    tokens = {0: batch, 1: Dim("sequence", max=longest)}
    if encoder is None:
        first, example = _first_argument(parameters), (ids,)
        try:
            imported = import_model(model, example, kwargs, None, None, True, {first: tokens})
        except ImportModelError as error:
            if f"guard sequence != {longest}." not in error.message:
                raise
            tokens[1] = Dim("sequence", max=longest - 1)
            shorter = import_model(model, example, kwargs, None, None, True, {first: tokens})
            imported = _with_last_length(shorter, model, kwargs, longest, error)
    else:
        source, dims = _encoder_example(model, encoder, bounds, batch, encoder_example)
        kwargs |= {encoder.name: source, _DECODER: ids}
        imported = import_model(model, (), kwargs, None, None, True, {encoder.name: dims, _DECODER: tokens})
    return _with_logits_only(with_limits(imported, limits))


def with_limits(imported: Imported, limits: LengthLimits) -> Imported:
    """Return a model with these bounds of its sizes."""
    symbols, sizes = module_symbols(imported.module), {}
    for name, limit in (("sequence", limits.sequence), ("batch", limits.batch), ("source", limits.source)):
        if limit is not None and name in symbols and symbols[name].high != limit:
            sizes[name] = size_of(replace(symbols[name], high=limit, typical=min(symbols[name].typical, limit)))
    return replace(imported, module=specialize(imported.module, sizes))


def _with_last_length(
    imported: Imported, model: Any, kwargs: Mapping[str, Any], length: int, error: ImportModelError
) -> Imported:
    """Return a model that was exported for up to ``length - 1`` tokens for `length`, too.

    A slice of a table or a mask for `length` positions (``mask[:n, :n]``) is the whole there, which torch.export takes
    for a case of its own. Raises `error` if the program computes other results there than the model.
    """
    longer = with_limits(imported, LengthLimits(length))
    if any(tensor.is_meta for tensor in imported.tensors.values()):
        return longer
    module = longer.module
    ids = _ids(model, (1, length))
    (name,) = (item.value.name for item in module.main.inputs if item.role == "input")
    found = interpret(specialize(module, {"batch": 1, "sequence": length}), {**imported.tensors, name: ids})
    results = call_model(model, model, (ids,), kwargs)
    if not all(a.shape == b.shape and are_close(a, b) for a, b in zip(found.values(), results, strict=False)):
        raise error
    return longer


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters if hasattr(model, "forward") else {}


def _first_argument(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the name of a model's first input; a wrapper such as peft's has ``*args``."""
    for name, parameter in parameters.items():
        return f"{name}_0" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else name
    return ""


def _takes_use_cache(model: Any) -> bool:
    """Return whether a model, or the one of transformers that it passes its ``**kwargs`` to, returns a cache."""
    parameters = _parameters(model)
    passes = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or (passes and hasattr(getattr(model, "config", None), "use_cache"))


def _ids(model: Any, shape: tuple[int, int]) -> torch.Tensor:
    import torch

    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 2)
    return torch.arange(shape[0] * shape[1]).reshape(shape) % vocabulary


def _encoder_example(
    model: Any, encoder: EncoderInput, limits: LengthLimits, batch: Any, example: Any
) -> tuple[torch.Tensor, dict[int, Any]]:
    """Return an example of an encoder's input, and its dims of any size. Raises ImportModelError if it needs one."""
    import torch

    config = model.config
    if example is None and encoder.name == "input_ids":
        most = limits.source or getattr(config, "max_position_embeddings", None) or _LENGTH
        ids = _ids(model, (_SOURCE_EXAMPLE[0], min(_SOURCE_EXAMPLE[1], most - 1)))
        return ids, {0: batch, 1: Dim("source", max=most)}
    if example is None:
        channels, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
        if encoder.name != "input_features" or channels is None or positions is None:
            raise ImportModelError(
                f"expected an example of the encoder's input {encoder.name}, found none",
                hint="pass encoder_example=, a batch of two of them",
            )
        # The second convolution of the encoder has stride 2.
        example = torch.zeros(2, channels, 2 * positions, dtype=torch.float32)
    return torch.as_tensor(example), {0: batch}


def _with_logits_only(imported: Imported) -> Imported:
    """Return the model with its logits as the only output, which calls return if there were others."""
    main = imported.module.main
    by_name = {output.name: output for output in main.outputs}
    found = by_name.get("logits") or (main.outputs[0] if len(main.outputs) == 1 else None)
    if found is None or len(found.value.tensor.shape) != 3:
        names = ", ".join(f"{o.name} {o.value.tensor}" for o in main.outputs)
        raise ImportModelError(
            f"expected an output of logits, (batch, sequence, vocabulary), found {names}",
            hint="wrap the model in a module that returns its logits alone",
        )
    symbols = {symbol.name for symbol in symbols_of(found.value.tensor.shape[1])}
    if "sequence" in module_symbols(imported.module) and "sequence" not in symbols:
        raise ImportModelError(
            f"expected scores at every position, (batch, sequence, vocabulary), found {found.name} "
            f"{found.value.tensor}",
            producer.location if (producer := producers(main).get(found.value.name)) else "",
            "apply the last layer to all positions, lm_head(x) instead of lm_head(x[:, [-1], :]): the program that "
            "continues a text computes the scores that it needs",
        )
    only = eliminate_dead_ops(replace(main, outputs=(found,)))
    imported = replace(imported, module=replace(imported.module, functions=(only,)))
    if len(main.outputs) == 1:
        return imported
    return replace(imported, results=(found.name,), rebuild=itemgetter(found.name))
