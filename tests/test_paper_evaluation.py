"""The paper's evaluation in small: searches are kept and gone on with, and what is written says what was found."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.paper import models, searches
from benchmarks.paper.__main__ import evaluate
from benchmarks.paper.comparison import measurements, speedups
from benchmarks.paper.figures import DARK, LIGHT, accuracy, memory, simulation_time, throughput
from benchmarks.paper.published import TABLE_2, TABLE_3, Best
from benchmarks.paper.searches import GRIDS, MACHINE, Found, Grid, run
from distir_relax import load_profile
from distir_relax.strategy_search import Outcome, Search
from tests.report.browser import Browser, browser

GRID = Grid("MLP 1B", lambda batch: models.mlp(3, 127, batch), (7, 15), devices=3)
OTHER = Grid("GPT-2 1.6B", lambda batch: models.gpt2(3, 3, 33, batch), (7,), devices=3)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="module")
def found(output: Path) -> list[Found]:
    return evaluate([GRID, OTHER], output, samples=3)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def made(outcomes: dict[tuple[str, int], float], model: str, too_large: tuple[str, int] | None = None) -> Found:
    """What a search would be that found so many samples a second."""
    every = tuple(
        Outcome(strategy, batch, batch / rate, 1000, (strategy, batch) != too_large)
        for (strategy, batch), rate in outcomes.items()
    )
    batches = tuple(sorted({batch for _, batch in outcomes}))
    grid = Grid(model, models.mlp_1b, batches)
    return Found(grid, Search(grid.space, load_profile(MACHINE), every), 7, 5, 1.0, 2, ())


def test_the_grids_are_the_papers() -> None:
    assert [len(grid.space.candidates()) for grid in GRIDS] == [885, 885, 885, 1035, 1035, 1035]
    for grid in GRIDS:
        at_one_batch = [c for c in grid.space.candidates() if c.samples == 4096]
        assert len(at_one_batch) == 75
        assert all((c.strategy.microbatches == 1) == (c.strategy.pipeline == 1) for c in at_one_batch)
    assert {row.model for row in (*TABLE_2, *TABLE_3)} == {grid.model for grid in GRIDS}


def test_tables_and_outcomes_are_written(found: list[Found], output: Path) -> None:
    first, second = found
    assert first.parameters == 3 * 127 * 127
    assert second.parameters == (50257 + 1024) * 33 + 3 * (12 * 33 * 33 + 13 * 33) + 2 * 33
    table = rows(output / "table-1.csv")
    assert [int(row["configurations"]) for row in table] == [len(one.search.outcomes) for one in found]
    for one, name in zip(found, ("mlp-1b", "gpt-2-1.6b"), strict=True):
        written = rows(output / f"outcomes-{name}.csv")
        assert {(r["strategy"], int(r["samples"]), float(r["seconds"])) for r in written} == {
            (o.strategy, o.samples, o.seconds) for o in one.search.outcomes
        }
    best = {int(row["batch"]): row for row in rows(output / "best-by-batch.csv")}
    for one in found:
        for batch, outcome in one.search.best_by_batch().items():
            strategy, rate = best[batch][one.model].split(": ")
            assert strategy == outcome.strategy
            assert float(rate.replace(",", "")) == pytest.approx(outcome.throughput, rel=0.006)
    timed = rows(output / "figure-7.csv")
    assert len(timed) == sum(len(one.timed) for one in found) >= 6


def test_a_search_is_not_made_twice_and_goes_on(found: list[Found], tmp_path: Path, output: Path) -> None:
    folder = output / "searches" / searches.code_digest()
    whole = run(GRID, folder)
    assert whole.search.outcomes == found[0].search.outcomes
    assert (whole.seconds, whole.timed) == (found[0].seconds, found[0].timed)
    for name in ("mlp-1b.json", "mlp-1b.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    # As if it had been stopped after three configurations and a hundred seconds.
    lines = (tmp_path / "mlp-1b.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "mlp-1b.jsonl").write_text("".join(lines[:4]))
    (tmp_path / "mlp-1b.json").write_text(json.dumps({"seconds": 100.0}))
    again = run(GRID, tmp_path, samples=3)
    assert again.search.resumed == 3
    assert again.search.outcomes == found[0].search.outcomes
    assert 100.0 < again.seconds < 400.0


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_figures_have_the_values_of_the_outcomes(found: list[Found], scheme: object) -> None:
    one = found[0]
    (axes,) = memory(one, None, scheme).axes
    drawn = {(x, y) for part in axes.collections for x, y in part.get_offsets().tolist()}
    assert drawn == {(o.memory / 1e9, o.throughput) for o in one.search.outcomes}
    (axes,) = memory(one, 15, scheme).axes
    assert sum(len(part.get_offsets()) for part in axes.collections) - 1 == sum(
        o.samples == 15 for o in one.search.outcomes
    )
    (axes,) = throughput(one, scheme).axes
    best = one.search.best_by_batch()
    assert dict(zip(*axes.lines[0].get_data(), strict=True)) == {b: o.throughput for b, o in best.items()}
    (axes,) = simulation_time(found, scheme).axes
    drawn = {(x, y) for part in axes.collections for x, y in part.get_offsets().tolist()}
    assert drawn == {(t.device_ops, t.seconds) for one in found for t in one.timed}


def test_ratios_are_of_the_papers_configuration_to_pure_ones() -> None:
    rates = {("16/1/1/1", 128): 50.0, ("1/16/1/1", 128): 300.0, ("1/1/16/128", 128): 10.0, ("2/8/1/1", 128): 400.0}
    (row,) = speedups([made(rates, "MLP 1B")], TABLE_2, free=False)
    assert row.times == pytest.approx((6.0, 1.0, 30.0))
    assert (row.best.strategy, row.is_same, row.lost) == ("2/8/1/1", False, pytest.approx(0.25))
    # The paper's ratios to pure data and pipeline; that to itself does not count.
    assert list(row.ratios()) == [pytest.approx((6.0, 7.5)), pytest.approx((30.0, 21.7))]
    one = made(rates, "MLP 1B", too_large=("16/1/1/1", 128))
    (row,) = speedups([one], TABLE_2, free=False)
    assert row.times == (None, pytest.approx(1.0), pytest.approx(30.0))
    one = made(rates, "MLP 1B", too_large=("1/16/1/1", 128))
    (row,) = speedups([one], TABLE_2, free=False)
    assert (row.theirs, row.lost, list(row.ratios())) == (None, None, [])


def test_with_a_free_batch_baselines_have_their_own() -> None:
    rates = {("1/8/2/2", 1024): 60.0, ("1/16/1/1", 1024): 20.0, ("1/16/1/1", 256): 40.0, ("1/1/16/128", 512): 12.0}
    (row,) = speedups([made(rates, "GPT-2 175B")], TABLE_3, free=True)
    assert row.times == (None, pytest.approx(1.5), pytest.approx(5.0))
    assert row.is_same
    published = Best("GPT-2 175B", 512, "1/8/2/2", None, 1.3, 5.6)
    (row,) = speedups([made(rates, "GPT-2 175B")], [published], free=True)
    assert not row.is_same


def test_measurements_meet_their_predictions() -> None:
    one = made({("16/1/1/1", 128): 2000.0, ("1/16/1/1", 256): 30000.0, ("8/2/1/1", 256): 7.0}, "MLP 1B")
    shown = [(m.strategy, m.batch, m.measured, m.predicted) for m in measurements(one)]
    assert shown == [
        ("16/1/1/1", 128, 2226.3, pytest.approx(2000.0)), ("1/16/1/1", 256, 26564.0, pytest.approx(30000.0)),
    ]  # fmt: skip
    (axes,) = accuracy(measurements(one), LIGHT).axes
    drawn = {tuple(p) for part in axes.collections for p in part.get_offsets().tolist()}
    assert drawn == {(m.measured, m.predicted) for m in measurements(one)}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_shows_tables_and_pictures(
    chromium: Browser, found: list[Found], output: Path, width: int, dark: bool
) -> None:
    chromium.open(output / "index.html", width, dark=dark)
    widths = "return [...document.images].map((image) => image.complete && image.naturalWidth)"
    assert chromium.run(widths) == [828] * 5
    sources = chromium.run("return [...document.images].map((image) => image.currentSrc)")
    text = (output / "index.html").read_text()
    light = re.findall(r'<img src="([^"]+)"', text)
    assert sources == (re.findall(r'<source srcset="([^"]+)"', text) if dark else light)
    cells = chromium.run("return [...document.querySelectorAll('#table-1 td:first-child')].map((c) => c.textContent)")
    assert cells == ["MLP 1B", "GPT-2 1.6B"]
    assert not chromium.run("return document.documentElement.scrollWidth > window.innerWidth")
    assert chromium.messages() == []
