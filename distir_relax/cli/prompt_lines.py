"""Generation for a file of prompts: lines of JSON in, lines of JSON out, in the same order."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distir_relax.errors import RunError
from distir_relax.support.units import count

if TYPE_CHECKING:
    from distir_relax.runtime.launched import RankOptions

_COUNTS = ("max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class LineOptions:
    """Options of a generation; those of the command are the defaults of each line."""

    max_new_tokens: int | None
    sampling: Mapping[str, Any]
    stop: Collection[int] | None
    stop_text: tuple[str, ...]

    def of(self, row: Mapping[str, Any]) -> LineOptions:
        """Return the options of a line, spelled as in Python or as OpenAI's.

        Raises `RunError` for values of another kind, and for an option that is not supported.
        """
        from distir_relax.runtime.generation import Sampling
        from distir_relax.serving.http.openai_api import check_line

        names = [field.name for field in fields(Sampling)]
        check_line(row, (*names, *_COUNTS, "prompt", "messages", "stop", "stop_text"))
        own = {name: row[name] for name in names if row.get(name) is not None}
        if own.get("top_k") == -1:  # vLLM's 0
            own["top_k"] = 0
        Sampling(**own)  # it checks them
        counts = {name: row[name] for name in _COUNTS if row.get(name) is not None}
        if len(counts) > 1 or not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts.values()
        ):
            raise RunError(f"expected a number of new tokens, by one of {', '.join(_COUNTS)}, found {counts}")
        stop, texts = _listed(row, "stop"), _listed(row, "stop_text")
        if stop is not None and all(isinstance(each, str) for each in stop):
            texts, stop = [*stop, *(texts or [])], None
        return LineOptions(
            next(iter(counts.values()), self.max_new_tokens),
            {**self.sampling, **own},
            self.stop if stop is None else frozenset(stop),
            self.stop_text if texts is None else tuple(texts),
        )


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Let a `RunError` of the context have this place."""
    try:
        yield
    except RunError as error:
        raise RunError(error.message, where, error.hint) from None


def _listed(row: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return what ends a sequence, one or a list. Raises `RunError` for others than texts, or for `stop` token ids."""
    value = row.get(name)
    if value is None:
        return None
    found = value if isinstance(value, list) else [value]
    is_text = all(isinstance(each, str) and each for each in found)
    is_ids = all(isinstance(each, int) and not isinstance(each, bool) for each in found)
    if not is_text and not (is_ids and name == "stop"):
        raise RunError(f"expected texts{' or token ids' * (name == 'stop')} for {name!r}, found {value!r}")
    return found


def continue_prompts(
    file: Path, bundle: Path, options: LineOptions, as_prompt: Callable[[str], Any], reading: dict[str, Any],
    ranks: RankOptions,
) -> str:  # fmt: skip
    """Print a line of JSON for each prompt of a file, with its ``text`` and why it ``ended``; return a summary.

    A line is a table with a ``prompt``, text or token ids, or ``messages``, and perhaps options (`LineOptions.of`); it
    may be a JSON text alone. `as_prompt` makes the prompt of a text. Other fields are kept. Raises RunError for another
    line, with its number, before anything runs.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.serving import EngineOptions, start_engine
    from distir_relax.text import StopStrings

    rows = []
    for number, row in _rows(file):
        with _located(f"{file}:{number}"):
            rows.append((number, row, options.of(row)))
    read = read_bundle(bundle, **reading)
    with start_engine(read, EngineOptions(), None, ranks.device, ranks.timeout) as engine:
        requests = []
        for number, row, own in rows:
            prompt = row["messages"] if "messages" in row else row["prompt"]
            with _located(f"{file}:{number}"):
                prompt = as_prompt(prompt) if isinstance(prompt, str) else prompt
                request = engine.submit(prompt, own.max_new_tokens, own.sampling, own.stop)
                if request.tokenizer is None and own.stop_text:
                    raise RunError("stop texts are for prompts of text, found tokens", hint="give tokens to stop at")
            requests.append((row, own, request))
        for row, own, request in requests:
            result: dict[str, Any] = {"tokens": request.result()}
            ended = request.ended
            if request.tokenizer is not None:
                stops = StopStrings(own.stop_text)
                text = stops.feed("".join(request.pieces()))
                result = {"text": text if stops.is_reached else text + stops.finish()}
                ended = "stop" if stops.is_reached else ended
            typer.echo(json.dumps({**row, **result, "ended": ended}, ensure_ascii=False))
        tokens = sum(len(request.tokens) for *_, request in requests)
    return f"{count(len(rows), 'prompt')}, {count(tokens, 'token')}"


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over the tables of a file, with the numbers of their lines."""
    try:
        lines = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"the prompts cannot be read: {error}", str(file)) from None
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunError(f"expected a line of JSON, found {line[:40]!r}: {error}", f"{file}:{number}") from None
        row = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
            raise RunError(
                f"expected a table with either a prompt or messages, found {line[:40]!r}", f"{file}:{number}",
                'for example: {"prompt": "The capital of France is"}',
            )  # fmt: skip
        yield number, row
