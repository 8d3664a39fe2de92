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
from distir_relax.planner import Search
from distir_relax.report.search_page import TIME_LINES, search_page, write_search_page
from distir_relax.report.strip import LANES, strips
from distir_relax.report.timeline import shown_classes
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
    profile = load_profile("dgx2-v100")
    memory = sorted(o.memory for o in found(profile.memory).outcomes)
    return found(float(memory[2 * len(memory) // 3]))


def found(memory: float) -> Search:
    profile = replace(load_profile("dgx2-v100"), memory=memory)
    return dr.search(MODEL, devices=6, profile=profile, global_batch=(12, 24, 48), workers=1)


@pytest.fixture(scope="module")
def page(search: Search, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "search.html"
    write_search_page(search, path, "model.py:<b>&", "far.toml", search.simulate)
    return path


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_draws_every_configuration(
    chromium: Browser, page: Path, search: Search, width: int, dark: bool
) -> None:
    chromium.open(page, width, dark=dark)
    count = "return document.querySelectorAll('#{} circle').length"
    assert chromium.run(count.format("memory-throughput")) == len(search.ranked) + len(search.too_large)
    assert chromium.run(count.format("throughput-batch")) == len(search.ranked)
    assert chromium.run("return document.querySelectorAll('tbody tr').length") == min(20, len(search.ranked))
    assert not chromium.run("return document.documentElement.scrollWidth > window.innerWidth")
    assert chromium.messages() == []


def test_a_point_opens_its_time_line(chromium: Browser, page: Path, search: Search) -> None:
    chromium.open(page, 1280)
    assert search.ranked[0].strategy in chromium.run("return document.getElementById('chosen-name').textContent")
    chromium.run("document.querySelectorAll('button.pick')[1].click()")
    chromium.settle()
    second = search.ranked[1]
    assert chromium.run("return document.getElementById('chosen-name').textContent").startswith(second.strategy)
    rows = strips(search.simulate(second.candidate))
    drawn = chromium.run("return document.querySelectorAll('#lanes rect').length")
    assert drawn == sum(len(row["runs"]) for row in rows)
    command = chromium.run("return document.getElementById('chosen-command').textContent")
    assert f"--strategy {second.strategy} " in command
    assert "--profile far.toml " in command
    assert chromium.messages() == []


def test_the_data_are_the_outcomes(search: Search) -> None:
    text = search_page(search, "model", "far.toml", search.simulate)
    match = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    points = json.loads(match[1])["points"]
    assert [(p["strategy"], p["samples"], p["fits"]) for p in points] == [
        (o.strategy, o.samples, o.fits) for o in search.outcomes if o.seconds
    ]
    assert 0 < sum("lanes" in p for p in points) <= TIME_LINES
    assert all(
        "lanes" in p
        for p in points
        if p["strategy"] == search.ranked[0].strategy and p["samples"] == search.ranked[0].samples
    )


def test_strips_say_for_how_long_devices_compute(search: Search) -> None:
    simulation = search.simulate(search.ranked[0].candidate)
    for c, row in zip(shown_classes(simulation, LANES), strips(simulation, columns=4000), strict=True):
        assert sum(count for _, count in row["runs"]) == 4000
        computing = sum(count for kind, count in row["runs"] if kind == 0) / 4000
        assert computing == pytest.approx(simulation.busy[0][c] / max(simulation.clocks), abs=0.02)


def test_a_search_of_which_nothing_fits_has_a_page() -> None:
    nothing = found(1e3)
    assert "nothing fits" in search_page(nothing, "model", "far.toml", nothing.simulate)
