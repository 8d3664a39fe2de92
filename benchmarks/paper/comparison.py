"""What the searches found beside what the paper prints, as tables: one row for each of the paper's, and our own."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman
from distir_relax.strategy_search import Outcome

from .published import TABLE_1, TABLE_2, TABLE_3, TABLE_4, THEIR_ERRORS, Best
from .searches import PURE, ROOT, Found

MEASURED = ROOT / "tests" / "cost" / "mlp_1b_dgx2.csv"

Cell = str | int | float | None
Row = dict[str, Cell]


@dataclass(frozen=True)
class Table:
    """Rows with equal columns, for people (with a `title` and a `note`) and for programs (`csv`)."""

    name: str
    title: str
    note: str
    rows: Sequence[Row]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, units in brackets."""
        return tuple(self.rows[0]) if self.rows else ()

    def csv(self) -> str:
        """One line for the columns, and one for each row; what there is none of is left empty."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


@dataclass(frozen=True)
class Speedup:
    """A row of table 2 or 3: our `best`, what we predict of the paper's (None where it does not fit), and how many
    times as fast that is as pure data, tensor and pipeline parallelism, by our predictions.

    With a `free` batch, as in table 3, ours is the best of all batches up to the paper's, and so are the baselines: the
    authors ran those that fit in memory, which ended earlier there than they do here."""

    published: Best
    free: bool
    best: Outcome
    theirs: Outcome | None
    times: tuple[float | None, float | None, float | None]

    @property
    def is_same(self) -> bool:
        """Whether our search and the paper's found the same configuration."""
        return (self.best.strategy, self.best.samples) == (self.published.strategy, self.published.batch)

    @property
    def lost(self) -> float | None:
        """How much slower than our best the paper's is, by our predictions: 0.1 is a tenth."""
        return None if self.theirs is None else 1 - self.theirs.throughput / self.best.throughput

    def ratios(self) -> Iterator[tuple[float, float]]:
        """Our ratios and the paper's, without those of a strategy to itself."""
        for pure, ours, paper in zip(PURE.values(), self.times, self.published.times, strict=True):
            if pure != self.published.strategy and ours is not None and paper is not None:
                yield ours, paper


@dataclass(frozen=True)
class Measured:
    """One of the authors' measurements of MLP 1B, in samples a second, and our prediction of it."""

    strategy: str
    batch: int
    measured: float
    predicted: float


def speedups(found: Sequence[Found], published: Sequence[Best], free: bool) -> list[Speedup]:
    """The rows of table 2, or with the batch `free` table 3, of the models and batches that were searched."""
    by_model = {one.model: one for one in found}
    rows = []
    for row in published:
        one = by_model.get(row.model)
        if one is None or not (free or row.batch in one.search.best_by_batch()):
            continue
        best = one.best_of("", row.batch) if free else one.search.best_by_batch()[row.batch]
        assert best is not None, "some strategy fits"
        theirs = one.outcome(row.strategy, row.batch)
        pure = [one.best_of(s, row.batch) if free else one.outcome(s, row.batch) for s in PURE.values()]
        data, tensor, pipeline = (
            None if theirs is None or base is None else theirs.throughput / base.throughput for base in pure
        )
        rows.append(Speedup(row, free, best, theirs, (data, tensor, pipeline)))
    return rows


def all_speedups(found: Sequence[Found]) -> list[Speedup]:
    """The rows of both tables."""
    return [*speedups(found, TABLE_2, free=False), *speedups(found, TABLE_3, free=True)]


def measurements(found: Found) -> list[Measured]:
    """The authors' measurements that a search of MLP 1B has predictions of: 33, of the whole grid."""
    rows = []
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            strategy = "/".join(row[key] for key in ("data", "tensor", "pipeline", "microbatches"))
            outcome = found.outcome(strategy, int(row["global_batch"]))
            if outcome is not None:
                rows.append(Measured(strategy, outcome.samples, float(row["samples_per_second"]), outcome.throughput))
    return rows


def models_table(found: Sequence[Found]) -> Table:
    """Table 1: the models, and how long their searches take."""
    rows = [_model(one) for one in found]
    note = (
        "The time is of the whole search, reading the model in included. The paper searches the MLPs at one batch, 75 "
        "configurations; here they are searched at all batches of its tables."
    )
    return Table("table-1", "The models, and the time of their searches (table 1)", note, rows)


def _model(one: Found) -> Row:
    paper = next((row for row in TABLE_1 if row.model == one.model), None)
    count = len(one.search.outcomes)
    return {
        "model": one.model,
        "parameters": one.parameters,
        "weights (GB)": 2 * one.parameters / 1e9,
        "paper: weights (GB)": paper.gigabytes if paper else None,
        "ops of a step on one device": one.ops,
        "configurations": count,
        "search (s)": one.seconds,
        "cores": one.cores,
        "a configuration (ms)": one.seconds / count * 1e3,
        "paper: configurations": paper.configurations if paper else None,
        "paper: search (min, 56 cores)": paper.minutes if paper else None,
    }


def best_table(found: Sequence[Found]) -> Table:
    """The fastest configuration that fits, by batch and model."""
    best = {one.model: one.search.best_by_batch() for one in found}
    batches = sorted({batch for one in found for batch in one.grid.batches})
    rows: list[Row] = [
        {"batch": batch, **{model: _shown(of.get(batch)) for model, of in best.items()}} for batch in batches
    ]
    note = "D/T/P/K and samples a second, as predicted. Where nothing stands, nothing fits, or it was not searched."
    return Table("best-by-batch", "The best configuration by batch", note, rows)


def _shown(outcome: Outcome | None) -> str | None:
    return None if outcome is None else f"{outcome.strategy}: {float(f'{outcome.throughput:.3g}'):,.10g}"


def speedup_table(found: Sequence[Found], number: int) -> Table:
    """Table 2 (training, by batch) or 3 (inference, the batch free)."""
    rows = [_speedup(row) for row in all_speedups(found) if row.free == (number == 3)]
    of = "MLP training" if number == 2 else "GPT-2 inference, the batch free"
    note = (
        "How many times as fast the configuration that the paper found is as pure data, tensor and pipeline (128 "
        "microbatches) parallelism: measured by the paper, predicted here. The last column says how much slower that "
        "configuration is than our best, by our predictions."
    )
    return Table(f"table-{number}", f"The best against pure parallelism: {of} (table {number})", note, rows)


def _speedup(row: Speedup) -> Row:
    ours = f"{row.best.strategy}, batch {row.best.samples}" if row.free else row.best.strategy
    cells: Row = {
        "model": row.published.model,
        "batch": row.published.batch,
        "paper's best": row.published.strategy,
        "our best": ours,
    }
    for name, mine, paper in zip("DTP", row.times, row.published.times, strict=True):
        cells[f"vs {name}, paper"] = paper
        cells[f"vs {name}, ours"] = None if mine is None else round(mine, 2)
    cells["paper's is slower by (%)"] = None if row.lost is None else round(100 * row.lost, 1)
    return cells


def accuracy_table(rows: Sequence[Measured]) -> Table:
    """What stands for table 4: predictions of MLP 1B against measurements, by strategy and of all."""
    kinds: dict[str, list[Measured]] = {}
    for row in rows:
        kinds.setdefault(row.strategy, []).append(row)
    note = (
        "Throughput of the measurements that the authors published as plots. The profile was fitted to these: five "
        "numbers. The errors of the paper's own model are of the same measurements. Its table 4 has correlations of "
        f"other, random configurations, which were not published: {_correlations()}."
    )
    cells = [_accuracy(kind, of) for kind, of in [*kinds.items(), ("all", list(rows))]]
    return Table("table-4", "Simulated against measured, MLP 1B (table 4, figure 10)", note, cells)


def _accuracy(kind: str, rows: Sequence[Measured]) -> Row:
    predicted, measured = [r.predicted for r in rows], [r.measured for r in rows]
    theirs = THEIR_ERRORS.get(kind)
    return {
        "strategy": kind,
        "measurements": len(rows),
        "mean error (%)": round(100 * mean_absolute_percentage_error(predicted, measured), 1),
        "largest error (%)": round(100 * max(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)), 1),
        "Spearman": round(spearman(predicted, measured), 4),
        "mean error of the paper's model (%)": None if theirs is None else round(100 * theirs),
    }


def _correlations() -> str:
    return ", ".join(f"{row.spearman:g} for {row.model}" for row in TABLE_4)


def timing_table(found: Sequence[Found]) -> Table:
    """Some configurations by how many ops their simulation has, and how long it takes with the compiler (figure 7)."""
    rows: list[Row] = [
        {
            "model": one.model,
            "strategy": timed.strategy,
            "batch": timed.samples,
            "device-ops": timed.device_ops,
            "seconds": timed.seconds,
        }
        for one in found
        for timed in one.timed
    ]
    return Table("figure-7", "Time to compile and simulate one configuration", "", rows)


def write_csv(table: Table, folder: Path) -> None:
    """Write a table as ``NAME.csv``."""
    (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
