"""What plans, and the objects around them, print as: a few lines, and HTML in notebooks."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import distir_relax as dr
from distir_relax.report import explain


class Page(HTMLParser):
    """The cells of tables, row by row, and whether tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))


@pytest.fixture(scope="module")
def divided() -> dr.Plan:
    """Two ranks, three microbatches."""
    return dr.compile(model(), (torch.ones(12, 5),), strategy="2/1/1/3")


def test_a_plan_prints_the_tensors_of_the_user(divided: dr.Plan) -> None:
    lines = repr(divided).splitlines()
    assert lines[2:4] == [
        "  inputs   input: f32[12,5] S[0: 2|2], R in 3 microbatches",
        "  outputs  output: f32[12,3] S[0: 2|2], R in 3 microbatches",
    ]
    assert len(lines) == 5


def test_html_of_a_plan(divided: dr.Plan) -> None:
    rows = Page(divided._repr_html_()).rows
    assert ["input", "input", "f32[12,5]", "S[0: 2|2], R", "3"] in rows
    # 5 x 7 + 7 + 7 x 3 + 3 floats on both ranks, which send nothing.
    assert ["0 to 1", "main_0", "264 B", "0 B"] in rows
    plan = dr.compile(model(), (torch.ones(12, 5),), shardings={"0.*": "S[0]"}, mesh=3, name="a<b>&c")
    page = plan._repr_html_()
    # 7 columns on 3 ranks, 3 | 2 | 2: (5 + 1 + 3) x 3 + 3 floats. All-reduce of 12 x 3 floats: 4/3 of 144 bytes.
    assert ["0", "main_0", "120 B", "192 B"] in Page(page).rows
    assert ["1 to 2", "main_1", "84 B", "192 B"] in Page(page).rows
    assert "a&lt;b&gt;&amp;c" in page
    assert "<b>" not in page
    assert "distir explain a&lt;b&gt;&amp;c.dist %linear_1" in page
    assert explain(plan.bundle(("torch",)), "%linear_1").startswith("%linear_1: ")


def test_html_of_many_tensors_and_ranks_stays_small() -> None:
    many = dr.compile(Many(), tuple(torch.ones(40, n) for n in range(1, 25)), shardings={"x*": "S[0]"}, mesh=37)
    rows = Page(many._repr_html_()).rows
    assert ["and 9 more"] in rows
    assert len(rows) < 40
    assert "and 20 more" in repr(many)


class Many(torch.nn.Module):
    """24 inputs, one output."""

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return sum((one.sum(1) for one in x), torch.zeros(40))


def test_objects_around_a_plan_print_as_a_line(divided: dr.Plan) -> None:
    bundle = divided.bundle(("torch",))
    ranked = divided.modules["ranked"]
    training = dr.Training(model(), torch.nn.functional.mse_loss, example_batch=(torch.ones(12, 5), torch.ones(12, 3)))
    for thing in (
        *divided.modules.values(), ranked.main, ranked.main.ops[0], bundle, bundle.manifest, divided.imported,
        divided.source, training, divided.session(),
    ):  # fmt: skip
        assert len(repr(thing)) < 300
        assert "\n" not in repr(thing)
    assert repr(ranked.main) == "<function @main_0: 7 inputs, 9 ops, 3 outputs>"
    assert "2 ranks, 1 function, 9 ops" in repr(ranked)
    assert repr(ranked.main.ops[0]).startswith("<op %linear_1.0: f32[2,7] = linear_bias(%input.0, %0.weight, %0.bias)")
    long = replace(ranked.main.ops[0], operands=ranked.main.ops[0].operands * 99)
    assert len(repr(long)) < 300
