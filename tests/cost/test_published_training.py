"""The GPU profiles against published training throughputs, and the sources of their figures."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

import pytest

from benchmarks.published_training.__main__ import Prediction, predict
from benchmarks.published_training.rows import SOURCES, Row, read_rows

PROFILES = resources.files("distir_relax.cost") / "profiles"
# Data parallelism, and tensor parallelism with it.
QUICK = (("GPT 1.7B", "narayanan-1", "full"), ("GPT 3.6B", "narayanan-1", "full"))


def by_name(name: str, source: str, recomputation: str) -> Row:
    (row,) = (r for r in read_rows() if (r.name, r.source, r.recomputation) == (name, source, recomputation))
    return row


@cache
def predictions() -> list[Prediction]:
    return list(predict(by_name(*key) for key in QUICK))


def test_steps_of_megatron_lm_are_predicted() -> None:
    errors = [one.error for one in predictions()]
    assert max(map(abs, errors)) < 0.09


def test_rows_are_consistent() -> None:
    """Each has a source and all its GPUs, and its microbatches make up the batch."""
    rows = list(read_rows())
    assert len(rows) >= 25
    assert {row.source for row in rows} == set(SOURCES)
    for row in rows:
        assert row.data * row.tensor * row.pipeline == row.gpus
        assert 0 <= row.microbatches * row.data * row.microbatch - row.global_batch < row.data * row.microbatch
        assert row.evidence in ("seen", "known")
        assert row.width % row.heads == 0


def test_seconds_of_a_row_are_those_of_its_source() -> None:
    """Table 1 has 502 petaFLOP/s for the largest model; tokens per second are those of all GPUs."""
    largest = by_name("GPT 1008B", "narayanan-1", "full")
    # Equation 3 with the sizes of the paper, by hand.
    flops = 96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
    assert flops / largest.seconds == pytest.approx(502e15, rel=0.003)
    row = next(r for r in read_rows() if (r.name, r.gpu, r.gpus, r.global_batch) == ("MPT 7B", "H100", 8, 48))
    assert 48 * 2048 / row.seconds == pytest.approx(85144, rel=1e-4)


@pytest.mark.parametrize("name", ["dgx2-v100", "dgx-a100", "dgx-h100", "dgx-h200"])
def test_each_figure_of_a_profile_has_a_source(name: str) -> None:
    """The comment names every level of links, and every table of rates; a calibrated device is from its command."""
    text = (PROFILES / f"{name}.toml").read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("#") for line in text.splitlines() if line.startswith("#"))
    profile = tomllib.loads(text)
    calibrated = "The device was measured: `distir calibrate" in comment
    figures = [] if calibrated else ["memory", "bandwidth", "overhead", "vector"]
    figures += [] if calibrated else [f"matrix.{dtype}" for dtype in profile["device"]["matrix"]]
    figures += [] if calibrated else [level["name"] for level in profile["level"]]
    figures += (
        ["all-reduce lines"] if any(line["name"] == "all_reduce" for line in profile.get("collective", ())) else []
    )
    assert [figure for figure in figures if figure not in comment] == []
    assert "Sources" in comment or calibrated
