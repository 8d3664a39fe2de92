"""Results of a generation: the text of its tokens, or the tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.runtime.generation.prompt import Prompt
from distir_relax.text import IncrementalDecoder, StopStrings, Tokenizer

if TYPE_CHECKING:
    import torch


def bundle_tokenizer(texts: Mapping[str, str], path: Path | None, name: str) -> Tokenizer:
    """Return the tokenizer among the texts of a bundle. Raises RunError if it has none, and as `Tokenizer.of`."""
    tokenizer = Tokenizer.of(texts, path)
    if tokenizer is None:
        raise RunError(
            "expected a tokenizer in the bundle, found none", str(path or name),
            "compile the folder of a model with tokenizer.json, or give the prompt as token ids",
        )  # fmt: skip
    return tokenizer


def stream_results(steps: Generator[torch.Tensor], prompt: Prompt) -> Iterator[Any]:
    """Yield the results of the steps of a generation, tokens of shape (batch,), as they are made.

    They are pieces of text, of whole characters, for a text or a chat; for tokens a number, or for a batch the tensor.
    A text ends, and `steps` are closed, before the first of the prompt's stop texts.
    """
    if prompt.tokenizer is None:
        return (step if prompt.is_batch else int(step[0]) for step in steps)
    return _text_pieces(steps, prompt.tokenizer.decoder(prompt.ids[0].tolist()), StopStrings(prompt.stop_text))


def whole_result(results: Iterable[Any], prompt: Prompt) -> Any:
    """Return the results of a stream as one: text, or int64 tokens, (steps,), for a batch (batch, steps)."""
    import torch

    if prompt.tokenizer is not None:
        return "".join(results)
    tokens = [*results]
    if prompt.is_batch:
        return torch.stack(tokens, 1) if tokens else prompt.ids[:, :0]
    return torch.tensor(tokens, dtype=torch.int64)


def _text_pieces(steps: Generator[torch.Tensor], decoder: IncrementalDecoder, stops: StopStrings) -> Iterator[str]:
    with closing(steps):
        for step in steps:
            if piece := stops.feed(decoder.feed(int(step[0]))):
                yield piece
            if stops.is_reached:
                return
    rest = stops.feed(decoder.finish())
    if rest := rest + stops.finish():
        yield rest
