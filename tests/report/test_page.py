"""What the report page says, against the simulation that it reports."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distir_relax.cli import app
from distir_relax.compiler.simulate import simulate
from distir_relax.errors import DistIRError
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.program_builder import ProgramBuilder
from distir_relax.report.communication_matrix import CELLS, block_size, matrix
from distir_relax.report.memory import downsample, memory_charts, peak_time
from distir_relax.report.page import page, top_ops, write_page
from distir_relax.report.timeline import BARS, LANES, as_data, timeline
from distir_relax.simulation.class_names import shown_classes
from distir_relax.simulation.critical_path import HOST, critical_path
from distir_relax.simulation.memory_categories import CATEGORIES, WORKSPACE
from distir_relax.simulation.sensitivity import sensitivity
from distir_relax.simulation.simulator import simulate_module
from tests.report.simulations import PROFILE, streams, training, with_locations
from tests.training import perceptron

HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>&amp;'


def embedded(text: str) -> dict[str, Any]:
    """The data that the page's script reads."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    found: dict[str, Any] = json.loads(match[1])
    return found


class Tags(HTMLParser):
    """The tags of a page and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "onerror")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_headline_is_the_simulation() -> None:
    simulation = training()
    simulation.samples = 35
    words = Tags(page(simulation, "an MLP")).words
    for wanted in (
        f"{simulation.makespan * 1e3:.4g} ms",
        f"{simulation.bubble:.1%}",
        f"{simulation.communication:.1%}",
        f"{simulation.peak_memory.max() / 1e3:.3g} kB",
        "samples, of 35 in all",
    ):
        assert wanted in words, wanted


def test_the_proof_of_a_bundle_is_shown(tmp_path: Path) -> None:
    path = perceptron.step("1/2/1/1").save(tmp_path / "m.dist", backends=("torch",))
    done = CliRunner().invoke(app, ["simulate", str(path), "--profile", "dgx-a100", "--html", str(tmp_path / "m.html")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "m.html").read_text(encoding="utf-8")
    assert "<h2>Proof</h2>" in text
    assert "the sharded program computes the model model.txt, its gradients and its microbatches</li>" in text
    assert "<h2>Proof</h2>" not in page(training(), "")


def test_a_program_that_does_not_fit_says_so() -> None:
    simulation = training()
    assert "does not fit" not in page(simulation, "")
    simulation.profile = replace(simulation.profile, memory=1e5)
    assert "does not fit: of 100 kB" in page(simulation, "")


def test_nothing_is_fetched_and_nothing_of_the_users_is_markup() -> None:
    simulation = training("1/1/2/2", 3)
    harmless, hostile = (
        simulate_module(with_locations(simulation.module, text), simulation.profile) for text in ("m.py:1", HOSTILE)
    )
    plain, text = Tags(page(harmless, "title")), Tags(page(hostile, HOSTILE))
    assert text.found == plain.found
    assert text.links[0] == "data:,"
    assert all(link.startswith("data:") for link in text.links)
    assert HOSTILE in text.words
    assert "https:" not in page(hostile, "")
    assert any(HOSTILE in words for words in embedded(page(hostile, ""))["timeline"]["texts"])


def test_the_bars_of_a_lane_are_the_events_of_its_class() -> None:
    simulation = training()
    data = as_data(timeline(simulation), max(simulation.clocks))
    shown = [(e, start) for e, start in simulation.events() if e.duration]
    keys = {(c, e.stream) for e, _ in shown for c in e.classes}
    order = {c: number for number, c in enumerate(shown_classes(simulation, LANES))}
    # Three devices in their own order, one of them with a neighbour on both sides.
    assert len(data["lanes"]) == len(keys) == 3 + 2 * 3
    for (c, stream), lane in zip(sorted(keys, key=lambda k: (order[k[0]], k[1])), data["lanes"], strict=True):
        events = [(e, start) for e, start in shown if c in e.classes and e.stream == stream]
        at = 0
        for (event, start), gap, length, kind, op in zip(
            events, lane["gap"], lane["length"], lane["kind"], lane["op"], strict=True
        ):
            at += gap
            assert at * data["unit"] == pytest.approx(start / 1e15, abs=2 * data["unit"])
            at += length
            assert at * data["unit"] == pytest.approx((start + event.duration) / 1e15, abs=2 * data["unit"])
            assert kind == event.kind
            assert data["texts"][op].startswith(f"{event.op.results[0]} = {event.op.name}(")


@pytest.mark.parametrize("limit", [11, 40, 100])
def test_bars_that_are_joined_lose_no_time(limit: int) -> None:
    simulation = training("1/1/3/7")
    whole, joined = timeline(simulation), timeline(simulation, limit)
    assert sum(len(bars) for _, bars in joined.lanes) <= limit < sum(len(bars) for _, bars in whole.lanes)
    for (name, before), (same, after) in zip(whole.lanes, joined.lanes, strict=True):
        assert name == same
        assert sum(b.compute for b in after) == sum(b.compute for b in before)
        assert sum(b.communicate for b in after) == sum(b.communicate for b in before)
        assert sum(b.ops for b in after) == len(before)
        assert (after[0].start, after[-1].end) == (before[0].start, before[-1].end)
        for one, next_one in itertools.pairwise(after):
            assert one.end <= next_one.start
        for bar in after:
            inside = [b for b in before if bar.start <= b.start and b.end <= bar.end]
            assert bar.longest == max(b.end - b.start for b in inside)
            assert bar.ops == 1 or bar.longest < joined.threshold
    assert joined.joined == sum(b.ops for _, bars in joined.lanes for b in bars if b.ops > 1)


def test_a_large_program_is_a_small_page_that_says_what_it_leaves_out() -> None:
    simulation = simulate(
        "benchmarks/paper/models.py:mlp_103b", profile="dgx2-v100", strategy="1/1/16/48", global_batch=768
    )
    events = sum(len(event.classes) for event, _ in simulation.events())
    assert events > 30_000
    line = timeline(simulation, 5_000)
    assert sum(len(bars) for _, bars in line.lanes) <= 5_000
    assert line.joined > 25_000
    text = page(simulation, "large")
    assert len(text) < 4e6


@pytest.mark.parametrize("limit", [11, BARS])
def test_the_bars_of_the_critical_path_are_marked(limit: int) -> None:
    """As they are in each lane of a step's devices; merged bars that contain one too."""
    simulation = training("1/1/3/7", 4)
    path = critical_path(simulation)
    line = timeline(simulation, limit, path)
    lanes = as_data(line, max(simulation.clocks))["lanes"]
    marked = [[bar for bar in bars if bar.critical] for _, bars in line.lanes]
    assert [len(bars) for bars in marked] == [len(lane["critical"]) for lane in lanes]
    steps = [step for step in path.steps if step.kind != HOST]
    for step in steps:
        assert any(bar.start <= step.start and step.end <= bar.end for bars in marked for bar in bars)
    if limit == BARS:
        assert sum(map(len, marked)) == sum(len(step.classes) for step in steps)
    assert not any(bar.critical for _, bars in timeline(simulation).lanes for bar in bars)


def test_limits_of_the_step_are_left_out_of_slow_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = training("1/1/2/2", 3)
    text = page(simulation, "")
    assert "<dt>bound by</dt><dd>op overhead</dd>" in text
    assert "distir simulate --sensitivity" not in text
    monkeypatch.setattr("distir_relax.report.page.SIMULATION_SECONDS", -1.0)
    text = page(simulation, "")
    assert "<dt>bound by</dt>" not in text
    assert "distir simulate --sensitivity" in text
    assert "<dt>bound by</dt>" in page(simulation, "", limits=sensitivity(simulation))


def test_the_page_tells_of_joined_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = training()
    short = timeline(simulation, 40)
    assert "are merged with" not in page(simulation, "")
    monkeypatch.setattr("distir_relax.report.page.timeline", lambda _, path: short)
    assert f"{short.joined:,} ops shorter than" in page(simulation, "")


def test_memory_charts_have_the_curve_and_its_peak() -> None:
    simulation = training("1/1/3/5")
    for c, chart in zip(shown_classes(simulation, LANES), memory_charts(simulation), strict=True):
        curve = simulation.memory_curve(int(simulation.members[c][0]))
        assert [tuple(p[1:]) for p in chart["points"]] == [split[:WORKSPACE] for _, split in curve]
        time, size = chart["peak"]
        assert size == simulation.peaks[c].bytes
        live = max(sum(split) for at, split in curve if at == time)
        assert live == size - simulation.peaks[c].split[WORKSPACE]
        assert str(simulation.peaks[c]) in chart["text"]


def test_a_thinned_curve_keeps_its_peak_its_end_and_its_order() -> None:
    simulation = training("1/1/2/17", 6, 63, 51)
    curve = simulation.memory_curve(0)
    thin = downsample(curve, simulation.makespan, 50)
    assert len(thin) <= 50 < len(curve)
    assert max(sum(s) for _, s in thin) == max(sum(s) for _, s in curve)
    assert thin[-1] == curve[-1]
    assert thin == sorted(thin, key=curve.index)
    assert peak_time(curve, simulation.peak(0)) in {time for time, _ in thin}


def test_top_ops_add_up_to_the_busy_time_of_all_devices() -> None:
    simulation = training("3/1/2/2")
    rows = top_ops(simulation)
    assert sum(r.total for r in rows) == pytest.approx((simulation.compute + simulation.communicate).sum())
    assert sum(r.share for r in rows) == pytest.approx(1 - simulation.bubble)
    assert [r.total for r in rows] == sorted((r.total for r in rows), reverse=True)
    # 7 layers, 2 microbatches, 3 devices a stage.
    assert next(r for r in rows if r.name == "linear").count == 7 * 2 * 3
    assert next(r for r in rows if r.name == "linear_weight_grad").count == 7 * 2 * 3


def test_a_stream_has_a_lane_of_its_own() -> None:
    names = [name for name, _ in timeline(streams()).lanes]
    assert names == ["devices 0-1", "devices 0-1, stream comm"]


def test_many_classes_are_shown_in_part_with_the_highest_peak() -> None:
    built = ProgramBuilder(DeviceMesh((101,), ("x",)))
    main = built.function("main")
    for d in range(101):
        # Device 97 has the most memory; each size is another class.
        v = main.input(f"v{d}", (d + 1 if d != 97 else 999, 5), "float32", (d,))
        main.output(f"y{d}", main.emit("nn.relu", v, hint=f"y{d}"))
    simulation = simulate(built.build(), profile="dgx-h100:13")
    assert len(simulation.members) >= 101
    shown = shown_classes(simulation, LANES)
    assert len(shown) == LANES
    assert simulation.class_of[97] in shown
    firsts = [int(simulation.members[c][0]) for c in shown]
    assert firsts == sorted(firsts)
    assert f"{LANES} of {len(simulation.members)} device classes" in page(simulation, "many")


@pytest.mark.parametrize(
    ("devices", "unit", "block"), [(1, 16, 1), (32, 8, 1), (33, 8, 2), (100, 8, 4), (1000, 8, 32), (4096, 8, 128)]
)
def test_blocks_are_whole_units_or_parts_of_one(devices: int, unit: int, block: int) -> None:
    assert block_size(devices, unit) == block
    assert -(-devices // block) <= CELLS
    assert block % unit == 0 or unit % block == 0


def test_the_matrix_of_many_devices_is_in_blocks() -> None:
    simulation = simulate(
        "benchmarks/paper/models.py:mlp_1b", profile="dgx-h100:16", strategy="7/2/5/3", global_batch=63
    )
    found = matrix(simulation)
    assert found["names"][0] == "0-3"
    assert found["names"][-1] == "68-69"
    assert sum(map(sum, found["bytes"])) == pytest.approx(found["total"])


def test_a_program_without_time_or_traffic_is_a_page_too() -> None:
    built = ProgramBuilder(DeviceMesh((1,), ("x",)))
    main = built.function("main")
    main.output("y", main.input("v", (3, 5), "float32"))
    text = page(simulate(built.build(), profile=PROFILE), "nothing")
    assert "There is no communication between devices." in text
    assert embedded(text)["memory"]["charts"][0]["peak"][1] == 60
    assert tuple(embedded(text)["memory"]["categories"]) == CATEGORIES[:-1]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DistIRError, match="cannot be written"):
        write_page(training(), tmp_path / "none" / "page.html", "title")


def test_a_colour_means_one_thing() -> None:
    """That of communication, and that of compute, are no others of the page's: neither of memory nor of the matrix."""
    style = (resources.files("distir_relax.report") / "templates" / "page.css").read_text()
    for mode in re.findall(r":root \{(.*?)\}", style, re.DOTALL):
        colours = dict(re.findall(r"(--[\w-]+): (#\w+)", mode))
        first = dict(re.findall(r"(--[\w-]+): (#\w+)", style.split("@media")[0]))
        for meaning in ("--communication", "--compute"):
            same = {name for name, colour in {**first, **colours}.items() if colour == colours[meaning]}
            assert same == {meaning}
