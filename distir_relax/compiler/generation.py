"""Compilation of language models to programs that continue a sequence, and generation of text with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from distir_relax.bundle import drawn_weights
from distir_relax.compiler.compile import Plan, compile_source, default_name
from distir_relax.compiler.given_shardings import complete_for
from distir_relax.compiler.import_precision import keep_parameters
from distir_relax.compiler.language_model import (
    EncoderInput,
    LengthLimits,
    encoder_input,
    import_language_model,
    max_positions,
    with_limits,
)
from distir_relax.compiler.options import CompileOptions, documents
from distir_relax.compiler.origin import from_files, origin_of
from distir_relax.compiler.position_limit import position_limit
from distir_relax.compiler.source import Source
from distir_relax.errors import CheckpointError, DistIRError, ImportModelError
from distir_relax.frontends.imported_model import Imported, snapshot
from distir_relax.frontends.precision import with_precision
from distir_relax.frontends.pretrained_language_model import (
    language_model_files,
    read_language_model,
    tokenizer_files,
)
from distir_relax.incremental import ComputeOnce, EachCall, FirstCall, Incremental, LastPositions
from distir_relax.interpret.causality import check_causality
from distir_relax.interpret.length_dependence import check_length_independence
from distir_relax.ir import Value, fresh_name, value_names
from distir_relax.lowering import BoundAttention
from distir_relax.precision import WEIGHT_FORMATS, quantize_weights
from distir_relax.serving.session_generator import SessionGenerator
from distir_relax.strategies.strategy import as_strategy
from distir_relax.support.precisions import PRECISIONS, check_precision

if TYPE_CHECKING:
    import torch

_MOST_USES = 3


class Generation(SessionGenerator):
    """A compiled language model; see `compile_generation`. `plan` is that of its incremental program.

    `max_length` is the largest number of tokens of a prompt together with those that follow. `precision` is that of a
    model from files, of `PRECISION_NAMES`, and `stored` the type of most numbers in these; for a module both are None,
    unless a precision was given.
    """

    def __init__(
        self, plan: Plan, max_length: int, precision: str | None = None, stored: str | None = None
    ) -> None:  # fmt: skip
        super().__init__(lambda backend: self.plan.session(backend), plan.texts, None, plan.name)
        self.plan = plan
        self.max_length = max_length
        self.precision, self.stored = precision, stored

    def __repr__(self) -> str:
        kind = "" if self.precision is None else f" in {self.precision}"
        return f"<generation of up to {self.max_length} tokens by {self.plan.name}{kind} on {self.plan.mesh}>"

    def load_parameters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights, by the names of the model's parameters; others stay. `plan` is a new one.

        Floats are converted to the dtype that the weights have. Raises `CheckpointError`, and changes nothing, for a
        name that the model lacks, as it does those of weights of 8 and 4 bits, for another shape, and for an
        encoder-decoder.
        """
        if self.plan.encoder is not None:
            raise CheckpointError("expected a decoder-only model for other weights, found an encoder", self.plan.name)
        imported = self.plan.imported
        names = {name: value for name, value in imported.names.items() if value in imported.tensors}
        new: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            expected = imported.tensors[names[name]] if name in names else None
            if expected is None or expected.shape != tensor.shape:
                shown = (
                    f"{tuple(tensor.shape)}, where it has {tuple(expected.shape)}" if expected is not None else "one"
                )
                raise CheckpointError(
                    f"expected tensors of the language model, found {shown} for {name!r}", self.plan.name,
                    "" if expected is not None else f"it has names such as {next(iter(names), 'none')}",
                )  # fmt: skip
            new[names[name]] = tensor.detach().to("cpu", expected.dtype, copy=True).contiguous()
        origin = replace(imported.origin, files=())
        changed = replace(imported, tensors={**imported.tensors, **new}, origin=origin)
        with self._turn():
            self.plan = replace(self.plan, imported=changed)


@documents(CompileOptions)
def compile_generation(
    model: torch.nn.Module | str | Path,
    *,
    max_length: int | None = None,
    max_batch: int | None = None,
    max_source: int | None = None,
    encoder_example: Any = None,
    precision: str | None = None,
    keep: Sequence[str] = (),
    tokenizer: Any = None,
    **options: Unpack[CompileOptions],
) -> Generation:
    """Compile a language model, such as ``LlamaForCausalLM`` or ``T5ForConditionalGeneration``, to generate text.

    `model` is the path of a folder that ``save_pretrained`` of transformers wrote, or of a GGUF file: the model and its
    tokenizer. Or it is a module; prompts of text then take a `tokenizer` of transformers.

    `precision` is that of weights and activations, "float32" or "bf16": by default a module's own, and for a path
    bfloat16 if its weights are, or else float32; `Generation.precision` says which. With "int8", "int8-channel" or
    "int4" a module's own remains, and a path has float32, but the weights of linear layers and experts, and the table
    of embeddings that a layer shares, are stored in 8 or 4 bits (`quantize_weights`); products round their inputs to 8
    bits. Weights whose names match a pattern of `keep` stay as they are.

    A module's first argument is token ids, (batch, sequence), and its output, or the one called ``logits``, has the
    scores of the next token at each position. It is exported over a whole sequence, without a cache, and the pass
    `Incremental` derives the program that continues one (``docs/incremental.md``): keys and values, and whatever else
    it keeps, stay on the ranks, sharded as the program is. Logits are computed for the last token of a call alone.

    An encoder-decoder of transformers takes ``decoder_input_ids`` besides the input of its encoder, tokens or features.
    Its encoder, and the keys and values of cross-attention, are a plan of their own, ``generation.plan.encoder``, which
    runs once for each sequence. `encoder_example` is a batch of two inputs of the encoder, if neither they are tokens
    nor the config gives their size.

    Without a strategy, a mesh and annotations the model is compiled for one device.

    `max_length` is the largest number of tokens, by default the ``max_position_embeddings`` of the model's config, or
    its field of that meaning, and at most as many as its table of positions has;
    `max_batch` that of sequences at once, by default any; `max_source` that of tokens of the encoder's input. The plan
    holds a copy of a module's weights as they are now; those of a path are read from its files when they are needed,
    which must not change meanwhile.

    Raises as `compile` does, `ImportModelError` for a model without such an input and output, for a larger `max_length`
    than its config allows, and without an example of the encoder's input, `UnsupportedOpError` for a model that is not
    causal, and `DistIRError` for a strategy of several microbatches, and as `quantize_weights` does.
    """
    source = read_generation(
        model, max_length=max_length, max_batch=max_batch, max_source=max_source, encoder_example=encoder_example,
        precision=precision, keep=keep, tokenizer=tokenizer,
    )  # fmt: skip
    return source.compile(complete_for(options, source.name, model, source.imported))


@dataclass(frozen=True)
class GenerationSource:
    """A language model that has been read: its program that continues sequences, before it is distributed.

    `texts` are those of its tokenizer, and `encoder` is the input of its encoder, None without one. `precision` and
    `stored` are as in `Generation`.
    """

    imported: Imported
    name: str
    max_length: int
    texts: Mapping[str, str]
    encoder: EncoderInput | None
    precision: str | None = None
    stored: str | None = None

    def compile(self, options: CompileOptions) -> Generation:
        """Compile it, as `compile_generation` does; for one device, if no option and no annotation says otherwise."""
        if options["shardings"] is None and options["mesh"] is None and not self.imported.module.meshes:
            options = {**options, "strategy": options["strategy"] or "1/1/1/1"}
        strategy = None if options["strategy"] is None else as_strategy(options["strategy"])
        if strategy is not None and strategy.microbatches > 1:
            raise DistIRError(
                f"expected a strategy of one microbatch for text generation, found {strategy}",
                self.name, "let the strategy end in /1; a pipeline works on steps of several requests at once",
            )  # fmt: skip
        imported = _untied(self.imported) if strategy is not None and strategy.pipeline > 1 else self.imported
        if strategy is not None and strategy.context > 1:
            # A device's part of a mask is no formula any more.
            imported = replace(imported, module=BoundAttention().run(imported.module))
        plan = compile_source(Source(imported, options))
        if self.encoder is not None:
            plan = _with_encoder(plan, self.encoder)
        return Generation(replace(plan, texts=self.texts), self.max_length, self.precision, self.stored)


def read_generation(
    model: torch.nn.Module | str | Path,
    *,
    max_length: int | None = None,
    max_batch: int | None = None,
    max_source: int | None = None,
    encoder_example: Any = None,
    precision: str | None = None,
    keep: Sequence[str] = (),
    tokenizer: Any = None,
) -> GenerationSource:
    """Read a language model, for one or more compilations. Arguments and errors are those of `compile_generation`."""
    import torch

    texts: Mapping[str, str] = {}
    name, is_path = default_name(model), isinstance(model, (str, Path))
    check_precision(precision, keep, name)
    original, chosen, stored = model, precision, None
    if isinstance(model, (str, Path)):
        found = read_language_model(model, "float32" if precision in WEIGHT_FORMATS else precision)
        model, texts = found.model, found.texts
        chosen, stored = precision or found.precision, found.stored
    elif precision in PRECISIONS and isinstance(model, torch.nn.Module):
        model = with_precision(model, precision)
    if tokenizer is not None:
        texts = tokenizer_files(tokenizer, model)
    for option, value in (("max_length", max_length), ("max_batch", max_batch), ("max_source", max_source)):
        # A prompt and what follows it.
        least = 2 if option == "max_length" else 1
        if value is not None and value < least:
            raise ImportModelError(f"expected {option} of at least {least}, found {value}", name)
    length, encoder = max_positions(model, max_length), encoder_input(model)
    imported = import_language_model(model, LengthLimits(length, max_batch, max_source), encoder, encoder_example)
    most = position_limit(imported.module, length)
    if most < length:
        if max_length is not None:
            raise ImportModelError(
                f"the model has {most} positions, found max_length {length}",
                name,
                f"give at most {most}, or leave it out",
            )
        length, imported = most, with_limits(imported, LengthLimits(most))
    # Nobody else can change the weights of a model that was read here.
    imported = imported if is_path else snapshot(imported)
    if not any(tensor.is_meta for tensor in imported.tensors.values()):
        with drawn_weights():
            check_causality(imported.module, imported.tensors, "sequence")
            check_length_independence(imported.module, imported.tensors, "sequence")
    if precision in PRECISIONS and keep:
        parameters = read_language_model(original, "float32").model if isinstance(original, (str, Path)) else original
        imported = keep_parameters(imported, parameters, keep, name)
    module = LastPositions().run(Incremental().run(imported.module))
    if encoder is not None:
        module = ComputeOnce((encoder.name,)).run(module)
    imported = replace(imported, module=module, origin=origin_of(model))
    if isinstance(original, (str, Path)):
        imported = from_files(imported, language_model_files(Path(original)))
    if precision and precision in WEIGHT_FORMATS:
        imported = quantize_weights(imported, precision, keep, name)
    return GenerationSource(imported, name, length, texts, encoder, chosen, stored)


def _with_encoder(plan: Plan, encoder: EncoderInput) -> Plan:
    """Divide the plan of an encoder-decoder: the part of each call, with that of the first call for a sequence."""
    return replace(plan.part(EachCall()), encoder=plan.part(FirstCall()), start=encoder.start)


def _untied(imported: Imported) -> Imported:
    """Give later uses of a weight inputs of their own: a classifier that shares the table of embeddings.

    In a pipeline they are in different stages, and a stage would send the weight to the other at every step. An
    encoder-decoder has two tables and a classifier of one weight; what has more uses is not of this kind.
    """
    main = imported.module.main
    weights = {item.value.name: item for item in main.inputs if item.role != "input"}
    users: dict[str, list[int]] = {name: [] for name in weights}
    for number, op in enumerate(main.ops):
        for name in {value.name for value in op.operands} & weights.keys():
            users[name].append(number)
    ops, inputs, tensors = list(main.ops), list(main.inputs), dict(imported.tensors)
    names = value_names(main)
    for name, numbers in users.items():
        for number in numbers[1:] if len(numbers) <= _MOST_USES and name in tensors else ():
            own = Value(fresh_name(name, names), weights[name].value.type)
            inputs.append(replace(weights[name], value=own))
            tensors[own.name] = tensors[name]
            op = ops[number]
            ops[number] = replace(op, operands=tuple(own if v.name == name else v for v in op.operands))
    changed = replace(main, inputs=tuple(inputs), ops=tuple(ops))
    return replace(imported, module=replace(imported.module, functions=(changed,)), tensors=tensors)
