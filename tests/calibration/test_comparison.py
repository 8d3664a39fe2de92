"""Which of two configurations is faster, how far off peaks are, and how reports say it: against what is seen by eye."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from distir_relax.calibration.comparison import Outcome, Validation
from distir_relax.calibration.statistics import undisturbed
from distir_relax.report.scatter_plot import plot
from distir_relax.report.validation import json_text, table

# Measured 100, 104, 120 and 90 ms; the fourth is of another group.
FOUR = (
    Outcome("a", 2, 0.110, 0.100, (95, 210), (100, 200), "one"),
    Outcome("b", 2, 0.100, 0.104, (100, 100), (100, 100), "one"),
    Outcome("c", 2, 0.105, 0.120, (100, 101), (100, 100), "one"),
    Outcome("d", 1, 0.300, 0.090, (10,), (10,), "two"),
)
FOUND = Validation(FOUR, None, ("schedule", "chunks"))


def test_pairs_are_of_one_group_and_apart() -> None:
    # a and b differ by 4 %; a and c by 20 %, predicted the other way round; b and c by 15 %.
    pairs = [(p.faster.name, p.slower.name, p.is_predicted) for p in FOUND.pairs]
    assert pairs == [("a", "c", False), ("b", "c", True)]
    assert not Validation(tuple(replace(o, group="") for o in FOUR)).pairs


def test_noise_is_separated_from_error() -> None:
    """Times of six passes are those of a machine with 8 % of noise, predictions are 5 % off."""
    draw = random.Random(5)
    outcomes = []
    for n in range(400):
        true = math.exp(draw.uniform(-5, 0))
        passes = tuple(true * math.exp(draw.gauss(0, 0.08)) for _ in range(6))
        # With ten times a decile is the least, which is another quantity than the mean of the noise.
        predicted = true * math.exp(draw.gauss(0, 0.05))
        outcomes.append(Outcome(str(n), 1, predicted, undisturbed(passes), (), (), passes=passes))
    least = [math.log(undisturbed([math.exp(draw.gauss(0, 0.08)) for _ in range(6)])) for _ in range(4000)]
    found = Validation(tuple(outcomes)).repeatability
    assert found is not None
    assert found.noise == pytest.approx(statistics.pstdev(least), rel=0.3)
    assert found.own_error**2 == pytest.approx(found.error**2 - found.noise**2)
    assert found.spearman > 0.98
    assert 0.02 < found.difference < 0.1
    assert Validation(tuple(replace(o, passes=o.passes[:1]) for o in outcomes)).repeatability is None


def test_errors_by_property() -> None:
    outcomes = tuple(replace(o, dtype=d, kind="decode") for o, d in zip(FOUR, ("a", "a", "b", "b"), strict=True))
    parts = {(p.name, p.value): p for p in Validation(outcomes).parts}
    assert set(parts) == {("dtype", "a"), ("dtype", "b"), ("ranks", "1"), ("ranks", "2")}, "those that differ"
    part = parts["dtype", "a"]
    assert part.count == 2
    assert part.mape == pytest.approx((0.1 + 4 / 104) / 2)
    assert part.bias == pytest.approx((0.1 - 4 / 104) / 2)
    assert re.search(r"^dtype +a +2 +6\.9% +\+3\.1%$", table(Validation(outcomes)), re.MULTILINE)


def test_intervals_that_cover_are_counted() -> None:
    assert FOUND.covered is None
    assert "interval" not in table(FOUND)
    ends = ((0.09, 0.12), (0.101, 0.104), (0.1, 0.119), (0.2, 0.4))
    found = Validation(tuple(replace(o, interval=e) for o, e in zip(FOUR, ends, strict=True)))
    assert found.covered == 2
    assert "2 of 4 within their 90 % interval" in table(found)


def test_text_generation_has_no_peaks() -> None:
    outcome = replace(FOUR[0], predicted_peaks=(), measured_peaks=())
    assert outcome.peak_error == 0.0
    assert table(Validation((outcome,))).splitlines()[1].endswith("+10.0%")
    assert "memory peak" in plot(Validation((outcome, FOUR[1])))
    assert "memory peak" not in plot(Validation((outcome,)))


def test_equal_predictions_foresee_nothing() -> None:
    same = tuple(replace(o, predicted=0.1) for o in FOUR)
    assert [p.is_predicted for p in Validation(same).pairs] == [False, False]


def test_the_peak_that_counts_is_the_one_furthest_off() -> None:
    assert FOUR[0].peak_error == pytest.approx(-0.05)
    assert replace(FOUR[0], measured_peaks=(100, 150)).peak_error == pytest.approx(0.4)
    assert FOUND.peak_error == pytest.approx(-0.05)


def test_the_table_says_how_many_pairs_were_right() -> None:
    text = table(FOUND)
    assert "4 configurations: Spearman" in text
    assert "largest error of a memory peak 5.0%" in text
    assert "differ only in schedule, chunks, by more than 5%: 1 of 2 predicted right" in text
    assert "wrong: a takes 100.00 ms, predicted 110.00 ms; c 120.00 ms, 105.00 ms" in text
    assert re.search(r"^a +2 +100\.00 ms +110\.00 ms +\+10\.0% +100 B +95 B +-5\.0%$", text, re.MULTILINE)
    assert "differ only" not in table(Validation(FOUR[:1]))


def test_json_is_in_seconds_and_bytes() -> None:
    found = json.loads(json_text(FOUND))
    assert found["compared"] == ["schedule", "chunks"]
    assert found["pairs"] == [
        {"slower": "c", "faster": "a", "foreseen": False},
        {"slower": "c", "faster": "b", "foreseen": True},
    ]
    assert found["outcomes"][0]["measured"] == 0.1
    assert found["outcomes"][0]["measured_peaks"] == [100, 200]
    assert found["mape"] == pytest.approx((0.1 + 4 / 104 + 15 / 120 + 7 / 3) / 4)


def test_the_plot_has_a_dot_for_each_time_and_each_peak() -> None:
    svg = ElementTree.fromstring(plot(FOUND))
    times, peaks = svg.findall("{*}g")
    titles = [[dot.findtext("{*}title") for dot in panel.findall("{*}circle[{*}title]")] for panel in (times, peaks)]
    assert titles[0][0] == "a: measured 100 ms, predicted 110 ms"
    assert titles[1][:2] == ["a, rank 0: measured 100 B, predicted 95 B", "a, rank 1: measured 200 B, predicted 210 B"]
    assert [len(found) for found in titles] == [4, 7]
