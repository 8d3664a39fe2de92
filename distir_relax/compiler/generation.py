"""Compilation of causal language models to programs that continue a sequence, and generation of text with them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from distir_relax.analysis.causality import check_causality
from distir_relax.compiler.compile import Plan, compile_source, default_name
from distir_relax.compiler.options import CompileOptions, complete, documents
from distir_relax.compiler.source import Source
from distir_relax.errors import ImportModelError
from distir_relax.frontends.dynamic_shapes import Dim
from distir_relax.frontends.import_model import import_model
from distir_relax.frontends.imported_model import Imported, eliminate_dead_ops, snapshot
from distir_relax.frontends.pretrained_language_model import read_language_model, tokenizer_files
from distir_relax.incremental import Incremental, LastPositions
from distir_relax.ir import Value, fresh_name, value_names
from distir_relax.runtime.generation import SessionGenerator
from distir_relax.serving import THREADS, Engine, EngineOptions, start_engine
from distir_relax.strategies.strategy import as_strategy

if TYPE_CHECKING:
    import torch

_EXAMPLE = (2, 9)
_LENGTH = 2048


class Generation(SessionGenerator):
    """A compiled language model; see `compile_generation`. `plan` is that of its incremental program.

    `max_length` is the largest number of tokens of a prompt together with those that follow.
    """

    def __init__(self, plan: Plan, max_length: int) -> None:
        super().__init__(plan.session, plan.texts, None, plan.name)
        self.plan = plan
        self.max_length = max_length

    def __repr__(self) -> str:
        return f"<generation of up to {self.max_length} tokens by {self.plan.name} on {self.plan.mesh}>"

    def engine(self, options: EngineOptions | None = None, device: str = "cpu") -> Engine:
        """Return an engine that generates for many requests at once, with ranks as threads of this process.

        It holds a copy of the weights besides that of `generate`. Raises `RunError` for limits that do not suffice for
        any request.
        """
        return start_engine(self.plan.bundle(("torch",)), options, THREADS, device)


@documents(CompileOptions)
def compile_generation(
    model: torch.nn.Module | str | Path,
    *,
    max_length: int | None = None,
    max_batch: int | None = None,
    tokenizer: Any = None,
    **options: Unpack[CompileOptions],
) -> Generation:
    """Compile a causal language model, such as ``LlamaForCausalLM``, to generate text.

    `model` is the path of a folder that ``save_pretrained`` of transformers wrote, or of a GGUF file: the model, in
    float32, and its tokenizer. Or it is a module; prompts of text then take a `tokenizer` of transformers.

    A module's first argument is token ids, (batch, sequence), and its output, or the one called ``logits``, has the
    scores of the next token at each position. It is exported over a whole sequence, without a cache, and the pass
    `Incremental` derives the program that continues one (``docs/incremental.md``): keys and values, and whatever else
    it keeps, stay on the ranks, sharded as the program is. Logits are computed for the last token of a call alone.

    `max_length` is the largest number of tokens, by default the ``max_position_embeddings`` of the model's config;
    `max_batch` that of sequences at once, by default any. The plan holds a copy of the weights as they are now.

    Raises as `compile` does, `ImportModelError` for a model without such an input and output and for a larger
    `max_length` than its config allows, and `UnsupportedOpError` for one that is not causal.
    """
    source = read_generation(model, max_length=max_length, max_batch=max_batch, tokenizer=tokenizer)
    return source.compile(complete(options, source.name))


@dataclass(frozen=True)
class GenerationSource:
    """A language model that has been read: its program that continues sequences, before it is distributed.

    `texts` are those of its tokenizer, and `weight_files` the files that it was read from, if any.
    """

    imported: Imported
    name: str
    max_length: int
    texts: Mapping[str, str]
    weight_files: Sequence[Path]

    def compile(self, options: CompileOptions) -> Generation:
        """Compile it, as `compile_generation` does."""
        strategy = options["strategy"]
        stages = 1 if strategy is None else as_strategy(strategy).pipeline
        imported = _untied(self.imported) if stages > 1 else self.imported
        plan = compile_source(Source(imported, options))
        return Generation(replace(plan, texts=self.texts, weight_files=self.weight_files), self.max_length)


def read_generation(
    model: torch.nn.Module | str | Path,
    *,
    max_length: int | None = None,
    max_batch: int | None = None,
    tokenizer: Any = None,
) -> GenerationSource:
    """Read a language model, for one or more compilations. Arguments and errors are those of `compile_generation`."""
    texts: Mapping[str, str] = {}
    files: Sequence[Path] = ()
    name, is_path = default_name(model), isinstance(model, (str, Path))
    if isinstance(model, (str, Path)):
        found = read_language_model(model)
        model, texts, files = found.model, found.texts, found.weight_files
    if tokenizer is not None:
        texts = tokenizer_files(tokenizer, model)
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = max_length or most or _LENGTH
    if most is not None and length > most:
        raise ImportModelError(f"the model takes at most {most} positions, found max_length {length}")
    imported = _read(model, length, max_batch)
    # Nobody else can change the weights of a model that was read here.
    imported = imported if is_path else snapshot(imported)
    if not any(tensor.is_meta for tensor in imported.tensors.values()):
        check_causality(imported.module, imported.tensors, "sequence")
    imported = replace(imported, module=LastPositions().run(Incremental().run(imported.module)))
    return GenerationSource(imported, name, length, texts, files)


def _untied(imported: Imported) -> Imported:
    """Give the second of two uses of a weight an input of its own: a classifier that shares the table of embeddings.

    In a pipeline they are in different stages, and a stage would send the weight to the other at every step.
    """
    main = imported.module.main
    weights = {item.value.name: item for item in main.inputs if item.role != "input"}
    users: dict[str, list[int]] = {name: [] for name in weights}
    for number, op in enumerate(main.ops):
        for value in op.operands:
            if value.name in weights:
                users[value.name].append(number)
    ops, inputs, tensors = list(main.ops), list(main.inputs), dict(imported.tensors)
    names = value_names(main)
    for name, numbers in users.items():
        if len(numbers) == 2 and name in tensors:
            own = Value(fresh_name(name, names), weights[name].value.type)
            inputs.append(replace(weights[name], value=own))
            tensors[own.name] = tensors[name]
            op = ops[numbers[1]]
            ops[numbers[1]] = replace(op, operands=tuple(own if v.name == name else v for v in op.operands))
    changed = replace(main, inputs=tuple(inputs), ops=tuple(ops))
    return replace(imported, module=replace(imported.module, functions=(changed,)), tensors=tensors)


def _read(model: Any, length: int, batch: int | None) -> Imported:
    """Import a model over a whole sequence, with its logits as the only output."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ImportModelError(f"expected a torch module, or the path of a model, found {type(model).__name__}")
    parameters = inspect.signature(model.forward).parameters
    tokens = next(iter(parameters), "")
    kwargs = {"use_cache": False} if "use_cache" in parameters else {}
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 2)
    example = torch.arange(_EXAMPLE[0] * _EXAMPLE[1]).reshape(_EXAMPLE) % vocabulary
    dims = {tokens: {0: Dim("batch", max=batch, typical=1), 1: Dim("sequence", max=length)}}
    imported = import_model(model, (example,), kwargs, None, None, True, dims)
    main = imported.module.main
    by_name = {output.name: output for output in main.outputs}
    found = by_name.get("logits") or (main.outputs[0] if len(main.outputs) == 1 else None)
    if found is None or len(found.value.tensor.shape) != 3:
        names = ", ".join(f"{o.name} {o.value.tensor}" for o in main.outputs)
        raise ImportModelError(
            f"expected an output of logits, (batch, sequence, vocabulary), found {names}",
            hint="wrap the model in a module that returns its logits alone",
        )
    only = eliminate_dead_ops(replace(main, outputs=(found,)))
    return replace(imported, module=replace(imported.module, functions=(only,)))
