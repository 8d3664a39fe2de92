"""Text of generated tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from distir_relax.errors import RunError
from distir_relax.runtime.generation.prompt import Prompt
from distir_relax.text import StopStrings, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

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


def text_pieces(steps: Generator[torch.Tensor], prompt: Prompt, stop_text: Collection[str]) -> Iterator[str]:
    """Yield the text of the tokens of `steps`, each of shape (1,), as soon as its characters are complete.

    It ends, and `steps` are closed, before the first of the texts `stop_text`. Raises RunError for an empty one.
    """
    assert prompt.tokenizer is not None, "the prompt is text"
    decoder, stops = prompt.tokenizer.decoder(prompt.ids[0].tolist()), StopStrings(stop_text)
    with closing(steps):
        for step in steps:
            if piece := stops.feed(decoder.feed(int(step[0]))):
                yield piece
            if stops.is_reached:
                return
    rest = stops.feed(decoder.finish())
    if rest := rest + stops.finish():
        yield rest
