"""The page of a search in a real browser: what fits and what does not, each point with its figures or its time line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import distir_relax as dr
from distir_relax.cost.profile import load_profile
from distir_relax.report.search_page import search_page, write_search_page
from distir_relax.simulation.class_names import shown_classes
from distir_relax.simulation.op_timer import COMPUTE
from distir_relax.simulation.simulation import Simulation
from distir_relax.strategy_search import Search
from distir_relax.strategy_search.compact_timeline import LANES, compact_timeline
from tests import search_models
from tests.report.browser import Browser, browser

MODEL = f"{search_models.__file__}:train"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def search() -> Search:
    """Of which a third does not fit."""
    search = found(836_700.0)
    assert 0.3 < len(search.too_large) / len(search.outcomes) < 0.36
    return search


def found(memory: float, batches: tuple[int, ...] = (12, 24), devices: int = 6) -> Search:
    # An allocator would reserve whole megabytes, of which there is less than one.
    profile = replace(load_profile("dgx2-v100"), memory=memory, in_place=True, caching_allocator=False)
    return dr.search(
        MODEL, devices=devices, profile=profile, global_batch=batches, microbatches=(1, 2, 4), workers=1,
        time_lines=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(search: Search, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "search.html"
    write_search_page(search, path, "model.py:<b>&", "far.toml")
    return path


@pytest.mark.drawn(2)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_draws_every_configuration(
    chromium: Browser, page: Path, search: Search, width: int, dark: bool
) -> None:
    chromium.open(page, width, dark=dark)
    count = "return document.querySelectorAll('#{} circle').length"
    assert chromium.run(count.format("memory-throughput")) == len(search.ranked) + len(search.too_large)
    assert chromium.run(count.format("throughput-by")) == len(search.ranked)
    assert chromium.run("return document.querySelectorAll('tbody tr').length") == min(20, len(search.ranked))
    assert not chromium.run("return document.documentElement.scrollWidth > window.innerWidth")
    assert chromium.messages() == []


@pytest.mark.parametrize("width", [500, 1280])
def test_each_column_of_the_table_has_its_title(chromium: Browser, page: Path, width: int) -> None:
    chromium.open(page, width)
    shown = "return [...document.querySelectorAll('table {}')].filter((e) => e.getClientRects().length).length"
    titles = chromium.run(shown.format("th"))
    assert titles == chromium.run(shown.format("tbody tr:first-child td")) == 7
    assert chromium.run("const s = document.querySelector('.scrolls'); return s.scrollWidth <= s.clientWidth")


def test_a_search_of_one_batch_has_a_chart_by_microbatches(chromium: Browser, search: Search, tmp_path: Path) -> None:
    search = replace(search, outcomes=tuple(o for o in search.outcomes if o.samples == 24))
    write_search_page(search, tmp_path / "one.html", "model.py:build", "far.toml")
    chromium.open(tmp_path / "one.html", 500, dark=True)
    assert chromium.messages() == []
    assert chromium.run("return document.querySelectorAll('section h2')[3].textContent") == "Throughput by microbatches"
    places = set(
        chromium.run("return [...document.querySelectorAll('#throughput-by circle')].map((c) => c.cx.baseVal.value)")
    )
    counts = sorted({outcome.candidate.strategy.microbatches for outcome in search.ranked})
    assert len(places) == len(counts) > 2
    labels = chromium.run("return [...document.querySelectorAll('#throughput-by text')].map((t) => t.textContent)")
    assert set(map(str, counts)) <= set(labels)
    line = chromium.run("return document.querySelector('#throughput-by polyline').points.numberOfItems")
    assert line == len(counts)
    alone = replace(search, outcomes=[o for o in search.outcomes if o.candidate.strategy.microbatches == 1])
    write_search_page(alone, tmp_path / "alone.html", "model.py:build", "far.toml")
    chromium.open(tmp_path / "alone.html", 500)
    assert chromium.run("return document.getElementById('throughput-by').closest('section').hidden")


def test_a_point_opens_its_time_line(chromium: Browser, page: Path, search: Search) -> None:
    chromium.open(page, 1280)
    assert search.ranked[0].strategy in chromium.run("return document.getElementById('chosen-name').textContent")
    chromium.run("document.querySelectorAll('button.pick')[1].click()")
    chromium.settle()
    second = search.ranked[1]
    assert chromium.run("return document.getElementById('chosen-name').textContent").startswith(second.strategy)
    drawn = chromium.run("return document.querySelectorAll('#lanes rect').length")
    assert drawn == sum(len(re.findall("[cmi]", text)) for _, text in second.lanes) > 6
    command = chromium.run("return document.getElementById('chosen-command').textContent")
    assert f"--strategy {second.strategy} " in command
    assert "--profile far.toml " in command
    assert chromium.messages() == []


def test_the_data_are_the_outcomes(search: Search) -> None:
    text = search_page(search, "model", "far.toml")
    match = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    points = json.loads(match[1])["points"]
    assert [(p["strategy"], p["samples"], p["fits"]) for p in points] == [
        (o.strategy, o.samples, o.fits) for o in search.outcomes if o.seconds
    ]
    assert [tuple(map(tuple, p["lanes"])) for p in points] == [o.lanes for o in search.outcomes if o.seconds]
    assert all(o.lanes == compact_timeline(search.simulate(o.candidate)) for o in search.ranked[::17])


@pytest.mark.sweep
def test_a_search_without_time_lines_has_those_of_the_best(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distir_relax.report.search_page.TIME_LINES", 15)
    plain = replace(search, outcomes=tuple(replace(o, lanes=()) for o in search.outcomes))
    match = re.search(r'id="data">(.*?)</script>', search_page(plain, "model", "far.toml"), re.DOTALL)
    assert match
    drawn = [p for p in json.loads(match[1])["points"] if "lanes" in p]
    assert len(drawn) == 15 < len(search.ranked)
    best = search.ranked[0]
    assert [p for p in drawn if (p["strategy"], p["samples"]) == (best.strategy, best.samples)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("columns", [7, 127])
def test_a_strip_says_what_most_of_each_column_goes_by_with(search: Search, columns: int) -> None:
    pipelines = [o for o in search.ranked if o.candidate.strategy.pipeline > 1]
    for outcome in (search.ranked[0], *pipelines[:5]):
        simulation = search.simulate(outcome.candidate)
        classes = shown_classes(simulation, LANES)
        for (_, text), row in zip(
            compact_timeline(simulation, columns), busy(simulation, classes, columns), strict=True
        ):
            kinds = "".join(kind * int(count) for kind, count in re.findall(r"([cmi])(\d+)", text))
            assert len(kinds) == columns
            for kind, compute, communicate in zip(kinds, *row, strict=True):
                if abs(compute + communicate - 0.5) > 1e-6 and abs(compute - communicate) > 1e-6:
                    most = "c" if compute > communicate else "m"
                    assert kind == ("i" if compute + communicate < 0.5 else most)


def busy(simulation: Simulation, classes: list[int], columns: int) -> list[tuple[list[float], list[float]]]:
    """For each class how much of each column it computes, and communicates, op by op."""
    width = max(simulation.clocks) / columns
    found = [([0.0] * columns, [0.0] * columns) for _ in classes]
    for event, start in simulation.events():
        for row in (found[classes.index(c)] for c in event.classes if c in classes and not event.stream):
            for column in range(columns):
                low, high = max(start, column * width), min(start + event.duration, (column + 1) * width)
                row[event.kind != COMPUTE][column] += max(0.0, high - low) / width
    return found


@pytest.mark.sweep
def test_a_search_of_which_nothing_fits_has_a_page() -> None:
    nothing = found(1e3, (12,), devices=2)
    assert "nothing fits" in search_page(nothing, "model", "far.toml")
