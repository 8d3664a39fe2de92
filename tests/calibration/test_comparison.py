"""Which of two configurations is faster, how far off peaks are, and how reports say it: against what is seen by eye."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from distir_relax.calibration.comparison import Outcome, Validation
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
