"""Orders as text, and as pictures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from distir_relax.schedules import Order, Shape, Times, grid, order_of, timeline
from distir_relax.schedules.classic import one_forward_one_backward
from distir_relax.schedules.zero_bubble import zb_h1, zb_h2
from scripts import schedules as pictures


@pytest.mark.parametrize(("make", "m"), [(one_forward_one_backward, 4), (zb_h1, 4), (zb_h2, 6)])
def test_drawings_in_docstrings_are_true(make: Callable[[Shape], Order], m: int) -> None:
    drawn = [line.strip() for line in (make.__doc__ or "").partition("::\n\n")[2].splitlines() if line.strip()]
    assert drawn == [line[7:].strip() for line in grid(make(Shape(3, m))).splitlines()[1:]]


def test_tasks_are_as_wide_as_they_are_long() -> None:
    order = order_of("zb-h1", 2, 2)
    found = timeline(order, Times(forward=(2, 3), inputs=2, weights=(1, Fraction(5, 2)), send=1))
    # Four letters are a unit of time: what the shortest task's name needs.
    assert grid(order, found).splitlines() == [
        "time   0           3           6           9           12          15          18",
        "rank 0 0F0---- 0F1----                     0I0---- 0W0         0I1---- 0W1",
        "rank 1             1F0-------- 1I0---- 1F1-------- 1I1---- 1W0------ 1W1------",
    ]


def test_a_narrow_grid_cuts_names() -> None:
    order = order_of("1f1b", 11, 40)
    lines = grid(order, width=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == 12
    assert lines[11].startswith("rank 10 ")
    assert set(lines[11][8:]) <= set("FB -0123456789")


def test_tasks_without_time_have_no_place() -> None:
    order = order_of("gpipe", 2, 3)
    assert grid(order, timeline(order, Times(0, 0, 0))).splitlines() == ["time   0", "rank 0", "rank 1"]


def test_the_code_on_the_page_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(from distir_relax.schedules .*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "pipelines.md", "exec"), {})
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"```text\n(time .*?)```", page, re.DOTALL)
    assert shown in printed
    assert re.findall(r"print\(found\)  # (.*)", page)[0] in printed


def test_the_pictures_are_current() -> None:
    assert pictures.main(["--check"]) == 0


def test_a_picture_has_every_task_where_it_is() -> None:
    order = order_of("zb-v", 3, 5, 2)
    found = timeline(order)
    root = ET.fromstring(pictures.draw("zb-v", found))
    shape = "{http://www.w3.org/2000/svg}"
    boxes = {t.text: r for r in root.iter(f"{shape}rect") for t in r.iter(f"{shape}title")}
    scale = (pictures.WIDTH - pictures.MARGIN - 8) / float(found.makespan)
    assert len(boxes) == 3 * 5 * 6
    for task, start, end in found.tasks():
        box = boxes[str(task)]
        assert float(box.attrib["x"]) == pytest.approx(pictures.MARGIN + float(start) * scale, abs=0.1)
        assert float(box.attrib["width"]) == pytest.approx(float(end - start) * scale - 1, abs=0.1)
        assert int(box.attrib["y"]) == order.rank_of[task.stage] * (pictures.HEIGHT + pictures.GAP)
    assert "keeps 3 stage activations" in pictures.summary(timeline(order_of("zb-v", 3, 5, 2)))
