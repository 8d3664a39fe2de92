"""Predictions of published training throughputs, by the profiles `dgx-a100` and `dgx-h100`.

    python -m benchmarks.published_training --json found.json
    python -m benchmarks.published_training --source mosaicml --limit 5

No figure of a profile is fitted to these rows. The model is on the meta device; equal layers are one function.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman
from distir_relax.compiler.options import CompileOptions
from distir_relax.cost.profile import load_profile
from distir_relax.strategies.strategy import Strategy

from .models import gpt
from .rows import SOURCES, Row, read_rows


@dataclass(frozen=True)
class Prediction:
    """A row, and the predicted seconds of its step and bytes of its fullest device."""

    row: Row
    seconds: float
    peak: float

    @property
    def error(self) -> float:
        """The relative error of the step's seconds."""
        return self.seconds / self.row.seconds - 1


def predict(rows: Iterable[Row]) -> Iterator[Prediction]:
    """Yield the prediction of each row."""
    for row in rows:
        profile = load_profile(row.profile)
        training = gpt(
            row.layers, row.width, row.heads, row.words, row.sequence, row.global_batch, row.attention == "fused"
        )
        source = training.read(CompileOptions(profile=profile, verify=False)).with_strategy(
            Strategy.parse(row.strategy)
        )
        found = source.simulate(profile)
        yield Prediction(row, found.makespan, float(found.peak_memory.max()))


@dataclass(frozen=True)
class Summary:
    """Errors of some predictions: means of the relative ones of seconds, and the rank correlation of throughputs."""

    name: str
    rows: int
    mean_absolute: float
    mean: float
    largest: float
    spearman: float | None


def summarize(name: str, found: Sequence[Prediction]) -> Summary:
    """Return the errors of predictions; throughputs are tokens per second and GPU."""
    predicted, measured = [one.seconds for one in found], [one.row.seconds for one in found]
    errors = [one.error for one in found]
    work = [one.row.global_batch * one.row.sequence / one.row.gpus for one in found]
    speeds = ([w / s for w, s in zip(work, of, strict=True)] for of in (predicted, measured))
    return Summary(
        name,
        len(found),
        mean_absolute_percentage_error(predicted, measured),
        sum(errors) / len(errors),
        max(errors, key=abs),
        spearman(*speeds) if len(found) > 1 else None,
    )


def summaries(found: Sequence[Prediction]) -> list[Summary]:
    """Return the errors by source and GPU, by GPU, and of all."""
    groups: dict[str, list[Prediction]] = {}
    for one in found:
        groups.setdefault(f"{one.row.gpu}, {one.row.source}", []).append(one)
    for one in found:
        groups.setdefault(one.row.gpu, []).append(one)
    return [summarize(name, group) for name, group in {**groups, "all": list(found)}.items()]


def main() -> int:
    """Print each prediction, then the errors; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=list(SOURCES), nargs="*", default=list(SOURCES))
    parser.add_argument("--limit", type=int, help="number of rows, drawn at even distances")
    parser.add_argument("--json", type=Path, help="file for the predictions")
    options = parser.parse_args()
    rows = [row for row in read_rows() if row.source in options.source]
    if options.limit is not None:
        rows = rows[:: max(1, len(rows) // options.limit)][: options.limit]
    print(f"{'':30} {'GPUs':>9} {'strategy':55} {'measured':>9} {'predicted':>9} {'error':>7}")
    found = []
    for one in predict(rows):
        found.append(one)
        row = one.row
        name = f"{row.name}, {row.source}"
        times = f"{row.seconds:8.2f}s {one.seconds:8.2f}s {one.error:+7.1%}"
        print(f"{name:30} {row.gpus:4} {row.gpu} {row.strategy:55} {times}", flush=True)
    print(f"\n{'':30} {'rows':>4} {'mean absolute':>13} {'mean':>7} {'largest':>8} {'Spearman':>8}")
    errors = summaries(found)
    for one in errors:
        rank = "" if one.spearman is None else f"{one.spearman:8.3f}"
        shown = f"{one.mean_absolute:13.1%} {one.mean:+7.1%} {one.largest:+8.1%} {rank}"
        print(f"{one.name:30} {one.rows:4} {shown}")
    if options.json:
        predictions = [
            {**asdict(one.row), "strategy": one.row.strategy, "measured_s": one.row.seconds, "predicted_s": one.seconds,
             "error": one.error, "peak_memory_bytes": one.peak}
            for one in found
        ]  # fmt: skip
        document = {"sources": SOURCES, "rows": predictions, "errors": [asdict(one) for one in errors]}
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
