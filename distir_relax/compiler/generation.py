"""Compilation of causal language models to programs that continue a sequence, and generation of tokens with them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from distir_relax.analysis.causality import check_causality
from distir_relax.compiler.compile import Plan, compile_source, default_name, read_model
from distir_relax.compiler.options import CompileOptions, complete, documents
from distir_relax.compiler.source import Source
from distir_relax.errors import ImportModelError
from distir_relax.frontends.dynamic_shapes import Dim
from distir_relax.frontends.imported_model import Imported, eliminate_dead_ops
from distir_relax.incremental import Incremental, LastPosition
from distir_relax.runtime.generation import (
    LanguageProgram,
    Sampling,
    TokenOptions,
    generated_tokens,
    prompt_ids,
    result_tokens,
    step_tokens,
)

if TYPE_CHECKING:
    import torch

_EXAMPLE = (2, 9)
_LENGTH = 2048


class GenerationOptions(TokenOptions, total=False):
    """Options of `Generation.generate` and `stream`."""

    backend: str


@dataclass(repr=False)
class Generation:
    """A compiled language model; see `compile_generation`. `plan` is that of its incremental program.

    `max_length` is the largest number of tokens of a prompt together with those that follow.
    """

    plan: Plan
    max_length: int
    _exclusive: threading.Lock = field(default_factory=threading.Lock)

    def __repr__(self) -> str:
        return f"<generation of up to {self.max_length} tokens by {self.plan.name} on {self.plan.mesh}>"

    def generate(self, prompt: Any, max_new_tokens: int = 64, **options: Unpack[GenerationOptions]) -> torch.Tensor:
        """Return the tokens that follow a prompt, with ranks as threads of this process.

        `prompt` is a sequence of token ids, or a batch of them of one length, as integers, an array or a tensor; the
        result is an int64 tensor of the same number of dims. It ends after `max_new_tokens`, or when every sequence of
        the batch has reached a token of `stop`; one that has it before repeats it. The result is the same on any number
        of ranks.

        Raises `RunError` for a prompt that is empty, too long, or not one of token ids, and for invalid options.
        """
        ids, is_batch = prompt_ids(prompt)
        return result_tokens(self._stream(ids, max_new_tokens, **options), ids, is_batch)

    def stream(self, prompt: Any, max_new_tokens: int = 64, **options: Unpack[GenerationOptions]) -> Iterator[Any]:
        """Yield the tokens of `generate` as they are made: a number, or for a batch a tensor with one of each sequence.

        Other calls wait until the iterator has ended or is closed.
        """
        ids, is_batch = prompt_ids(prompt)
        for step in self._stream(ids, max_new_tokens, **options):
            yield step_tokens(step, is_batch)

    def _stream(
        self,
        ids: torch.Tensor,
        count: int,
        *,
        stop: Collection[int] = (),
        backend: str = "torch",
        timeout: float | None = None,
        **sampling: Any,
    ) -> Iterator[torch.Tensor]:
        drawn = Sampling(**sampling)
        with self._exclusive:
            session = self.plan.session(backend)
            program = LanguageProgram.of(session.bundle.manifest)
            program.check_length(ids, count)
            yield from generated_tokens(program.by_session(session, drawn, timeout), ids, count, stop)


@documents(CompileOptions)
def compile_generation(
    model: torch.nn.Module,
    *,
    max_length: int | None = None,
    max_batch: int | None = None,
    **options: Unpack[CompileOptions],
) -> Generation:
    """Compile a causal language model, such as ``LlamaForCausalLM``, to generate tokens.

    The model's first argument is token ids, (batch, sequence), and its output, or the one called ``logits``, has the
    scores of the next token at each position. It is exported over a whole sequence, without a cache, and the pass
    `Incremental` derives the program that continues one (``docs/incremental.md``): keys and values, and whatever else
    it keeps, stay on the ranks, sharded as the program is. Logits are computed for the last token of a call alone.

    `max_length` is the largest number of tokens, by default the ``max_position_embeddings`` of the model's config;
    `max_batch` that of sequences at once, by default any. The plan holds a copy of the weights as they are now.

    Raises as `compile` does, `ImportModelError` for a model without such an input and output, and `UnsupportedOpError`
    for one that is not causal.
    """
    length = max_length or _config_length(model) or _LENGTH
    imported = _read(model, length, max_batch)
    if not any(tensor.is_meta for tensor in imported.tensors.values()):
        check_causality(imported.module, imported.tensors, "sequence")
    imported = replace(imported, module=LastPosition().run(Incremental().run(imported.module)))
    plan = compile_source(Source(imported, complete(options, default_name(model))))
    return Generation(plan, length)


def _config_length(model: Any) -> int | None:
    config = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", None)


def _read(model: Any, length: int, batch: int | None) -> Imported:
    """Import a model over a whole sequence, with its logits as the only output."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ImportModelError(f"expected a torch module, found {type(model).__name__}")
    parameters = inspect.signature(model.forward).parameters
    tokens = next(iter(parameters), "")
    kwargs = {"use_cache": False} if "use_cache" in parameters else {}
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 2)
    example = torch.arange(_EXAMPLE[0] * _EXAMPLE[1]).reshape(_EXAMPLE) % vocabulary
    dims = {tokens: {0: Dim("batch", max=batch, typical=1), 1: Dim("sequence", max=length)}}
    imported = read_model(model, (example,), kwargs, dynamic_shapes=dims)
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
