"""The report of a training run: its page has the run's measurements, also after an error."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import distir_relax as dr
from distir_relax.errors import ProfileError, RunError
from distir_relax.report.curves import MOST_POINTS, Curve, chart, smoothed
from distir_relax.report.training_run import RunReport
from tests.training import data, observers, perceptron

pytestmark = pytest.mark.timeout(120)
WAIT = 0.05


def waiting() -> Iterator[data.Batch]:
    """Batches that are long in coming."""
    for number in range(9):
        time.sleep(WAIT)
        yield data.drawn(number)


class Balanced(HTMLParser):
    """Checks that elements are closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link", "line", "circle", "polyline", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


def test_a_page_has_the_measurements_of_the_run(tmp_path: Path) -> None:
    step = perceptron.step("2/1/1/1", evaluates=True)
    calls, path = observers.Calls(), tmp_path / "run.html"
    report = dr.RunReport(path, step, "cpu-local")
    ended = dr.train(
        step, waiting(), steps=9, callbacks=[calls, report], evaluation=list(data.epoch()), evaluate_every=3,
        checkpoint=tmp_path / "ck",
    )  # fmt: skip
    page = path.read_text()
    Balanced(page)
    shown = html.unescape(page)
    assert f">{ended.loss:.4g}<" in shown
    assert ended.evaluation_seconds > 0
    assert ended.checkpoint_seconds > 0
    for result in calls.results:
        assert WAIT <= result.data_seconds < result.seconds
    rows = dict(re.findall(r"</i>([a-z ]+)</td><td>[^<]*</td><td>([0-9.]+)%", shown))
    assert math.isclose(math.fsum(map(float, rows.values())), 100, abs_tol=0.5)
    total = math.fsum(r.seconds for r in calls.results) + ended.evaluation_seconds + ended.checkpoint_seconds
    waited = math.fsum(r.data_seconds for r in calls.results[1:])
    assert float(rows["data"]) == pytest.approx(100 * waited / total, abs=0.06)
    # Waiting for data is most of a step: the figure says so.
    assert '<div class="figure bad"><dt>waiting for data' in page
    (predicted,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(predicted)["makespan"] == pytest.approx(dr.simulate(step.plan, profile="cpu-local").makespan)


def test_a_run_that_ends_by_an_error_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    with pytest.raises(RunError, match="the loss of step 5 is nan"):
        dr.train(perceptron.step("2/1/1/1"), data.with_nan, steps=9, callbacks=[RunReport(path)])
    page = path.read_text()
    Balanced(page)
    assert "ended by an error" in page
    assert "Measured and predicted" not in page
    # No step, no page.
    with pytest.raises(RunError):
        dr.train(perceptron.step("2/1/1/1"), data.nothing, steps=9, callbacks=[RunReport(tmp_path / "none.html")])
    assert not (tmp_path / "none.html").exists()


def test_mistakes_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        RunReport(tmp_path / "missing" / "run.html")
    with pytest.raises(ProfileError):
        RunReport(tmp_path / "run.html", None, "no-such-machine")


def test_long_curves_keep_their_extremes() -> None:
    points = [(float(step), math.sin(step / 9)) for step in range(10_007)]
    points[5_003] = (5_003.0, 40.0)
    points[7_001] = (7_001.0, -40.0)
    points[9] = (9.0, math.nan)
    text = chart("loss & more", [Curve("each", "faint", points)], lambda value: f"{value:g}")
    Balanced(text)
    (drawn,) = re.findall(r'points="([^"]*)"', text)
    heights = [float(pair.split(",")[1]) for pair in drawn.split()]
    assert len(heights) <= MOST_POINTS + 2
    assert "nan" not in text
    labels = [float(label) for label in re.findall(r">(-?[0-9]+)</text>", text)]
    assert {-40.0, 40.0} <= set(labels)
    assert heights.count(min(heights)) == heights.count(max(heights)) == 1


def test_a_moving_average_begins_with_the_first_value() -> None:
    assert dict(smoothed([(1, 3.0), (2, 3.0), (3, 3.0)], 0.9)) == pytest.approx({1: 3.0, 2: 3.0, 3: 3.0})
    average = smoothed([(step, float(step % 2)) for step in range(1_000)])
    assert all(abs(value - 0.5) < 0.05 for _, value in average[200:])
