"""The report page in a real browser: it draws, it answers the mouse, and the console has nothing to say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distir_relax as dr
from distir_relax.compiler.simulate import simulate
from distir_relax.report.page import write_page
from distir_relax.report.pipeline_tasks import chart, predicted_rows
from distir_relax.simulation.simulator import simulate_module
from distir_relax.support.units import size
from tests.report.browser import Browser, browser
from tests.report.simulations import training, with_locations

PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    pipeline = training("1/1/3/5")
    simulations = {
        "pipeline": simulate_module(with_locations(pipeline.module, "model.py:<b>12</b>"), pipeline.profile),
        "data parallel": training("3/1/1/2"),
        "one device": training("1/1/1/1"),
        "4096 devices": simulate(
            "benchmarks/paper/models.py:mlp_17b", profile="dgx-h100:512", strategy="64/8/8/16", global_batch=16384
        ),
    }
    found = {name: folder / f"{name.replace(' ', '-')}.html" for name in simulations}
    for name, simulation in simulations.items():
        write_page(simulation, found[name], f"{name} <i>&</i>")
    return found


def box(chromium: Browser, selector: str) -> dict[str, float]:
    """Where an element is in the window, after scrolling to it."""
    found: dict[str, float] = chromium.run(
        f"const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
        "const b = e.getBoundingClientRect(); return {x: b.x, y: b.y, width: b.width, height: b.height};"
    )
    chromium.settle()
    return found


def tip(chromium: Browser) -> str:
    """What the tip says, empty where none is shown."""
    found: str = chromium.run("const t = document.getElementById('tip'); return t.hidden ? '' : t.textContent;")
    return found


def lane(chromium: Browser, below: int = 0) -> list[tuple[int, ...]]:
    """The colours of the time line's first lane, or some pixels `below`, from a copy that is made to be read."""
    rows: list[list[int]] = chromium.run(
        "const c = document.getElementById('timeline'), copy = new OffscreenCanvas(c.width, c.height);"
        "const pen = copy.getContext('2d', {willReadFrequently: true}); pen.drawImage(c, 0, 0);"
        f"const d = pen.getImageData(0, (c.clientWidth < 640 ? 50 : 34) + {below}, c.width, 1).data;"
        "return Array.from({length: c.width}, (_, i) => Array.from(d.slice(4 * i, 4 * i + 3)));"
    )
    return [tuple(row) for row in rows]


def css_colour(chromium: Browser, name: str) -> tuple[int, ...]:
    text: str = chromium.run(f"return getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()")
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["pipeline", "data parallel", "one device", "4096 devices"])
def test_every_page_draws_itself(chromium: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    chromium.open(pages[name], width, dark=dark)
    assert chromium.messages() == []
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    assert chromium.run("return document.querySelector('h1').textContent") == f"{name} <i>&</i>"
    ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    assert css_colour(chromium, "--compute") in lane(chromium)
    charts = chromium.run("return document.querySelectorAll('#memory svg').length")
    assert charts == chromium.run("return document.querySelectorAll('#memory circle.peak').length") > 0
    assert chromium.run("return document.querySelectorAll('#memory polygon').length") >= 2 * charts
    cells = chromium.run("return document.querySelectorAll('#matrix rect.cell').length")
    assert (cells > 0) == (name != "one device")


def test_the_time_line_tells_what_is_under_the_mouse(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["pipeline"], DESKTOP)
    place = box(chromium, "#timeline")
    # The first op of device 0 begins when its host has issued it: the rate of this step in float16.
    start = lane(chromium).index(css_colour(chromium, "--compute"))
    chromium.point(place["x"] + start + 1, place["y"] + 34)
    said = tip(chromium).split("\n")
    assert said[0] == "device 0"
    assert "= astype(" in said[1]
    assert said[2].startswith("compute, from 14.6 us for ")
    assert "at model.py:<b>12</b>" in said
    # Not far behind it is an op of the first task.
    chromium.point(place["x"] + start + place["width"] / 80, place["y"] + 34)
    said = tip(chromium).split("\n")
    assert "= linear(" in said[1]
    assert any("call @" in row for row in said)
    # Device 2, below two devices of three lanes each, waits for its first microbatch.
    chromium.point(place["x"] + start + place["width"] / 20, place["y"] + 34 + 6 * 28)
    assert tip(chromium).split("\n")[:2] == ["device 2", "idle"]
    chromium.point(place["x"] + 2, place["y"] - 40)
    assert tip(chromium) == ""
    assert chromium.messages() == []


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_critical_path_is_underlined(chromium: Browser, pages: dict[str, Path], dark: bool) -> None:
    """Of one device all, of a pipeline's first stage the beginning and the end."""
    chromium.open(pages["one device"], DESKTOP, dark=dark)
    colour = css_colour(chromium, "--critical")
    busy = [pixel == css_colour(chromium, "--compute") for pixel in lane(chromium)]
    marked = [pixel == colour for pixel in lane(chromium, 13)]
    first, last = busy.index(True), len(busy) - busy[::-1].index(True)
    assert all(marked[first:last])
    assert not any(marked[: first - 2])
    chromium.open(pages["pipeline"], DESKTOP, dark=dark)
    marked = [pixel == colour for pixel in lane(chromium, 13)]
    first = marked.index(True)
    assert 0.1 < sum(marked) / (len(marked) - first) < 0.9
    assert marked[-2]
    chromium.point(box(chromium, "#timeline")["x"] + first + 1, box(chromium, "#timeline")["y"] + 34)
    assert tip(chromium).split("\n")[-1] == "on the critical path"


def test_zooming_in_widens_the_bars_and_whole_brings_them_back(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["pipeline"], DESKTOP)

    def picture() -> str:
        found: str = chromium.run("return document.getElementById('timeline').toDataURL()")
        return found

    def press(button: str) -> None:
        chromium.run(f"document.getElementById('{button}').click()")
        chromium.settle()

    whole = picture()
    press("zoom-in")
    near = picture()
    assert near != whole
    press("zoom-out")
    assert picture() == whole
    press("zoom-in")
    press("zoom-in")
    assert picture() not in (whole, near)
    press("zoom-all")
    assert picture() == whole


def test_charts_and_matrix_tell_what_is_under_the_mouse(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["data parallel"], DESKTOP)
    place = box(chromium, "#memory svg")
    chromium.point(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    assert "live" in tip(chromium)
    assert "weights" in tip(chromium)
    place = box(chromium, "#matrix rect.cell")
    chromium.point(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    # Two thirds of the gradients, twice: 7 layers of 127 x 127 in 16 bits.
    assert tip(chromium) == f"from device 0 to device 1\n{7 * 127 * 127 * 2 * 4 / 3 / 1e3:.0f} kB"
    assert chromium.messages() == []


def test_a_page_follows_the_window_and_the_colour_scheme(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["pipeline"], DESKTOP)
    size = "return [document.getElementById('timeline').width, document.querySelector('#memory svg').clientWidth]"
    before = chromium.run(size)
    metrics = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.devtools("Emulation.setDeviceMetricsOverride", metrics)
    chromium.settle()
    chromium.settle()
    after = chromium.run(size)
    assert after[0] < 700 < before[0]
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    chromium.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
    chromium.settle()
    assert css_colour(chromium, "--compute") in lane(chromium)
    assert chromium.messages() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_what_weights_hide_has_a_chart_of_its_own(chromium: Browser, tmp_path: Path, dark: bool) -> None:
    """Two layers of 400 x 400 floats, and 3 samples."""
    module = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.ReLU(), torch.nn.Linear(400, 400))
    found = simulate(dr.compile(module, (torch.ones(3, 400),), mesh=1), profile="dgx-a100")
    write_page(found, tmp_path / "m.html", "weights")
    chromium.open(tmp_path / "m.html", 500, dark=dark)
    assert chromium.messages() == []
    assert chromium.run("return document.documentElement.scrollWidth") <= 500
    heights = chromium.run(
        "return [...document.querySelectorAll('#memory svg polygon')].map((p) => "
        "[p.getAttribute('fill'), p.closest('svg').classList.contains('rest'), p.getBBox().height])"
    )
    by_chart = {(fill, rest): height for fill, rest, height in heights}
    assert by_chart["var(--c1)", False] < 5 < 50 < by_chart["var(--c1)", True]
    assert ("var(--c0)", True) not in by_chart
    most = max(sum(split[1:-1]) for _, split in found.memory_curves()[0])
    assert chromium.run("return document.querySelector('#memory p.rest').textContent").endswith(f"at most {size(most)}")


def test_a_schedule_is_wide_enough_to_read_on_a_narrow_screen(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["pipeline"], 500)
    assert box(chromium, "img.schedule")["width"] > 800
    assert chromium.run("return document.documentElement.scrollWidth") <= 500
    assert box(chromium, ".scrolls")["width"] <= 500
    assert chromium.run("return document.querySelectorAll('#memory svg.rest').length") == 0


def test_labels_of_a_schedule_are_inside_its_picture(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "tasks.svg").write_text(chart(predicted_rows(training("1/1/3/5"))))
    chromium.open(tmp_path / "tasks.svg", 1000)
    width = chromium.run("return document.documentElement.viewBox.baseVal.width")
    labels = chromium.run(
        "return [...document.querySelectorAll('text')].map((t) => [t.textContent, t.getBBox().x, t.getBBox().width])"
    )
    assert all(x >= 0 and x + wide <= width for _, x, wide in labels)
    assert labels[-1][0].endswith((" s", " ms", " us"))


def test_an_error_in_a_page_would_be_seen(chromium: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(pages["pipeline"].read_text().replace("drawMemory();", "drawNothing();"))
    chromium.open(broken, DESKTOP)
    assert any("drawNothing is not defined" in message for message in chromium.messages())


def test_without_chromium_the_test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(AssertionError, match="apt-get install chromium chromium-driver"), browser(tmp_path):
        pass
