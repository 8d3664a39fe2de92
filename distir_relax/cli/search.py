"""The `distir search` command: search for the fastest strategy."""

from __future__ import annotations

import json as json_
import re
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import (
    ChunkTokensOption,
    JsonOption,
    MaxRequestsOption,
    SizesOption,
    StateMemoryOption,
    StepTokensOption,
    flag_of,
    read_sizes,
    read_workload,
    with_options,
)
from distir_relax.cli.signals import Interrupted
from distir_relax.compiler.options import ImportOptions, LayoutOptions, Option
from distir_relax.errors import DistIRError
from distir_relax.strategies.strategy import OPTIONS, StrategyOption
from distir_relax.support.units import rate

if TYPE_CHECKING:
    from distir_relax.strategy_search import Outcome, Search


_PRECISION = ("precision", "keep")


class Objective(StrEnum):
    """What a search for generation ranks by."""

    throughput = "throughput"
    first_token = "first-token"
    per_token = "per-token"


def _search_options() -> dict[str, Option]:
    """Return the declarations of the values to try of each strategy option."""

    def declare(option: StrategyOption[Any]) -> Option:
        flag = f"--{option.search_name.replace('_', '-')}"
        text = f"{option.help.rstrip('.')}; by default {option.print(option.default)}."
        return Option(None, text, str, flag, option.metavar, read=lambda value: option.parse_list(value, flag))

    return {option.search_name: declare(option) for option in OPTIONS.values()}


@app.command()
@with_options(LayoutOptions, ImportOptions, only=("stages", "precision", "keep"), more=_search_options())
def search(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="FILE.py:FUNCTION, FILE.onnx, or a language model.")],
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")],
    profile: Annotated[str, typer.Option(help="The machine: a name (NAME:NODES for several nodes) or a .toml file.")],
    options: dict[str, Any],
    global_batch: Annotated[
        str | None, typer.Option(metavar="N", help="Samples per step: 4096, or 64,96, or 128-4096 by powers of two.")
    ] = None,
    dim: SizesOption = None,
    top: Annotated[int, typer.Option(min=1, help="Number of results to print.")] = 10,
    microbatches: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Numbers of microbatches; by default powers of 2 up to 128.")
    ] = None,
    try_: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="NAME=1,2", help="Values of a strategy option that the model's file registers."),
    ] = None,
    by_steps: Annotated[
        bool, typer.Option("--by-steps", help="Local search: each D x T x P once, other options around the best only.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of worker processes; by default one per core.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Record results in this file, and resume from it.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Search for generation, after prompts of so many tokens.")
    ] = None,
    generate: Annotated[int | None, typer.Option(min=1, help="Number of tokens to generate for each prompt.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of prompts that arrive together.")] = 16,
    objective: Annotated[
        Objective, typer.Option(help="Objective in generation: tokens per second, or the time to a token.")
    ] = Objective.throughput,
    max_requests: MaxRequestsOption = 16,
    memory: StateMemoryOption = 1.0,
    step_tokens: StepTokensOption = 512,
    chunk_tokens: ChunkTokensOption = 128,
    execute: Annotated[int, typer.Option(min=0, metavar="N", help="Run the N best on this machine's ranks.")] = 0,
    csv: Annotated[Path | None, typer.Option(help="Write all configurations to this .csv.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with table, charts and timelines to this .html.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Search for the fastest strategy that fits into memory, by simulating all candidates.

    Under mpirun all ranks except the first simulate, and the first prints the results.

    With --prompt and --generate, MODEL is the folder or GGUF file of a language model, or FILE.py:FUNCTION that returns
    a compiled one for a strategy. Replicas, tensor and pipeline parallelism are combined in all ways, and the strategy
    is searched that serves --requests best.
    """
    if prompt is not None or generate is not None:
        others = {
            "--global-batch": global_batch, "--dim": dim, "--microbatches": microbatches, "--try": try_,
            "--by-steps": by_steps, "--workers": workers, "--resume": resume, "--execute": execute, "--csv": csv,
            "--html": html,
        } | {flag_of(name): value for name, value in options.items() if name not in _PRECISION}  # fmt: skip
        workload = read_workload(prompt, generate, others)
        limits = max_requests, round(memory * 1e9), step_tokens, chunk_tokens
        _search_generation(model, devices, profile, (*workload, requests), objective, limits, top, json, options)
        return
    options |= {
        "devices": devices, "profile": profile, "global_batch": read_batches(global_batch), "dims": read_sizes(dim),
        **dict(map(_read_values, try_ or ())), "by_steps": by_steps, "workers": workers,
        "resume": resume, "time_lines": html is not None,
        **({"microbatches": _numbers(microbatches, "--microbatches")} if microbatches else {}),
    }  # fmt: skip
    result = _search(model, options, top)
    if not is_first_rank():
        return
    _write(model, profile, result, csv, html)
    _print_result(model, result, top, execute, json, {name: options[name] for name in _PRECISION if name in options})


def _search(model: str, options: dict[str, Any], top: int) -> Search:
    """Search with a progress bar; when interrupted, print the best results so far."""
    from distir_relax.report.search import outcomes_table
    from distir_relax.runtime.launcher_detection import check_connected
    from distir_relax.strategy_search.search import search as find

    check_connected()
    with SearchProgress() as progress:
        try:
            return find(model, on_outcome=progress.update, **options)
        except Interrupted:
            progress.stop()
            if progress.seen:
                typer.echo(outcomes_table(progress.seen, top), err=True)
            raise


def _search_generation(
    model: str,
    devices: int,
    profile: str,
    workload: tuple[int, int, int],
    objective: Objective,
    limits: tuple[int, int, int, int],
    top: int,
    as_json: bool,
    precision: Mapping[str, Any],
) -> None:
    """Search for a strategy that generates text, and print the best ones."""
    from distir_relax.report.generation_search import table
    from distir_relax.serving import EngineOptions
    from distir_relax.strategy_search.generation import search_generation

    prompt, generate, requests = workload
    found = search_generation(
        model, devices=devices, profile=profile, prompt=prompt, generate=generate, requests=requests,
        objective=objective.value, options=EngineOptions(*limits), **precision,
    )  # fmt: skip
    if as_json:
        best = [outcome.as_json() for outcome in found.ranked[:top]]
        discarded = len(found.outcomes) - len(found.ranked)
        typer.echo(json_.dumps({"configurations": len(found.outcomes), "discarded": discarded, "best": best}))
        return
    typer.echo(table(found, top))


def _write(model: str, profile: str, result: Search, csv: Path | None, html: Path | None) -> None:
    """Write the requested files."""
    from distir_relax.report.search import csv_text
    from distir_relax.report.search_page import write_search_page
    from distir_relax.support.files import write_text

    if csv is not None:
        write_text(csv, csv_text(result))
    if html is not None:
        write_search_page(result, html, model, profile)


def _print_result(
    model: str, result: Search, top: int, execute: int, as_json: bool, precision: Mapping[str, Any]
) -> None:
    """Print the result, and the measured times of the best strategies if they are run."""
    from distir_relax.report.search import table
    from distir_relax.report.validation import table as measured_table
    from distir_relax.strategy_search.search import execute as run_best

    best = result.ranked[:execute]
    measured = run_best(model, best, result.profile, **precision) if best else None
    if as_json:
        executed = {} if measured is None else {"executed": measured.as_json()}
        typer.echo(json_.dumps(result.as_json(top) | executed))
        return
    typer.echo(table(result, top))
    if measured is not None:
        typer.echo(f"\n{measured_table(measured)}")


class SearchProgress:
    """Number of outcomes, and the fastest so far: a progress bar on a terminal, otherwise lines `line_seconds` apart.

    `seen` has all outcomes.
    """

    def __init__(self, line_seconds: float = 30.0) -> None:
        self.seen: list[Outcome] = []
        self._bar: Any = None
        self._line_seconds, self._printed = line_seconds, time.monotonic()

    def __enter__(self) -> SearchProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            times = TimeElapsedColumn(), TimeRemainingColumn()
            columns = BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}")
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("reading the model, simulating the first strategies", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def update(self, outcome: Outcome, total: int) -> None:
        """Record another outcome, of `total`."""
        self.seen.append(outcome)
        is_due = time.monotonic() - self._printed > self._line_seconds
        if self._bar is None and not is_due:
            return
        best = max((o for o in self.seen if o.fits), key=lambda o: o.throughput, default=None)
        text = f"{best.strategy} {rate(best.throughput)}" if best else "nothing fits yet"
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=len(self.seen), description=text)
        else:
            self._printed = time.monotonic()
            typer.echo(f"{len(self.seen)} of {total} configurations, {text}", err=True)

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of a launch, or not part of a launch."""
    from distir_relax.runtime.launcher_detection import detect
    from distir_relax.runtime.local_ranks import rank_in

    return detect() != "mpi" or not rank_in()


def read_batches(text: str | None) -> tuple[int, ...] | None:
    """Parse batch sizes: ``4096``, ``64,96``, or ``128-4096`` by powers of two. Raise `DistIRError` if malformed."""
    if text is None:
        return None
    if between := re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text.strip()):
        low, high = map(int, between.groups())
        sizes = tuple(low << n for n in range(32) if low and low << n <= high)
        if sizes:
            return sizes
    elif re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text.replace(" ", "")):
        return _numbers(text, "--global-batch")
    raise DistIRError(f"expected 4096, or 64,96, or 128-4096, found {text!r}", "--global-batch")


def _read_values(text: str) -> tuple[str, str]:
    """Parse the values of a registered option, ``NAME=1,2``; they are checked when the model's file has been read."""
    name, _, values = (part.strip() for part in text.partition("="))
    if not name.isidentifier() or not values:
        raise DistIRError(f"expected NAME=VALUES such as zero=0,1, found {text!r}", "--try")
    return name, values


def _numbers(text: str, option: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise DistIRError(f"expected numbers such as 1,2,4, found {text!r}", option)
    return tuple(map(int, words))
