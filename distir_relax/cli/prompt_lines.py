"""Generation for a file of prompts: lines of JSON in, lines of JSON out, in the same order."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from distir_relax.errors import RunError
from distir_relax.support.units import count


def continue_prompts(
    file: Path, bundle: Path, max_new_tokens: int | None, sampling: Mapping[str, Any], stop: Collection[int] | None,
    stop_text: Collection[str], weights: Path | None, device: str, key: Path | None,
) -> str:  # fmt: skip
    """Print a line of JSON for each prompt of a file, with its ``text`` and why it ``ended``; return a summary.

    A line is a table with a ``prompt``, text or token ids, or ``messages``, and perhaps ``max_new_tokens``; it may be a
    JSON text alone. Other fields are kept. Raises RunError for another line, with its number, before anything runs.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.serving import EngineOptions, start_engine
    from distir_relax.text import StopStrings

    rows = list(_rows(file))
    read = read_bundle(bundle, weights=weights, require_signature=key)
    with start_engine(read, EngineOptions(), None, device) as engine:
        requests = []
        for number, row in rows:
            prompt = row["messages"] if "messages" in row else row["prompt"]
            new = row.get("max_new_tokens", max_new_tokens)
            try:
                requests.append(engine.submit(prompt, new, sampling, stop))
            except RunError as error:
                raise RunError(error.message, f"{file}:{number}", error.hint) from None
        for (_, row), request in zip(rows, requests, strict=True):
            result: dict[str, Any] = {"tokens": request.result()}
            ended = request.ended
            if request.tokenizer is not None:
                stops = StopStrings(tuple(stop_text))
                text = stops.feed("".join(request.pieces()))
                result = {"text": text if stops.is_reached else text + stops.finish()}
                ended = "stop" if stops.is_reached else ended
            typer.echo(json.dumps({**row, **result, "ended": ended}, ensure_ascii=False))
        tokens = sum(len(request.tokens) for request in requests)
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
