"""Bundles explained and compared, and the warning of gathers nobody asked for."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import DistIRError
from distir_relax.report import diff, explain
from distir_relax.runtime.session import Session
from tests.blocks import blocks_bundle

MESH = dr.DeviceMesh((2,), ("tp",))


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 9, bias=False), torch.nn.Linear(9, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.down(torch.relu(self.up(x))), -1)


def compiled(pattern: str, placement: str = "S[0]", **options: object) -> dr.Plan:
    torch.manual_seed(0)
    return dr.compile(MLP(), (torch.randn(4, 6),), shardings={pattern: placement}, mesh=MESH, **options)  # type: ignore[arg-type]


def test_the_chain_of_reasons_leads_back_to_the_annotation() -> None:
    said = explain(compiled("up.weight").bundle(("torch",)), "%down.weight").splitlines()
    assert said[0] == '%down.weight: R.DTensor((6, 9), "float32", "mesh[0]", "S[1: 5|4]")'
    assert said[1:-3] == [
        "  %down.weight is split as %relu is, through linear k",
        "  %relu is split as %linear is, through nn.relu dim -1",
        "  %linear is split as %up.weight is, through linear n",
        '  %up.weight is split from the annotation at shardings["up.weight"]',
    ]
    assert said[-3] == "no communication produces it or reshards it for its uses"


def test_what_is_sent_and_what_another_layout_would_send() -> None:
    """The sum of 4 x 6 floats: ring all-reduce on two devices, each sends 96 bytes."""
    plan = compiled("up.weight")
    assert "; sends 96 bytes: all_reduce along tp" in plan.text("sharded")
    name = next(op.results[0].name for op in plan.modules["sharded"].main.ops if op.name == "redistribute")
    said = explain(plan.bundle(("torch",)), name)
    assert "I[sum] to R: sends 96 bytes: all_reduce along tp" in said
    # All of 4 x 6 floats after the sum; split by rows, each device would hold half of them.
    assert "with this layout, each device sends 96 bytes for it and holds 96 bytes" in said
    assert "with the other layout that sends least, S[0: 2|2], it sends 96 bytes for it and holds 48 bytes" in said


def test_memory_of_uneven_shards_is_that_of_the_largest() -> None:
    """9 rows of 6 floats on two devices: 5 and 4."""
    said = explain(compiled("up.weight").bundle(("torch",)), "%up.weight")
    assert "holds up to 120 bytes" in said
    assert "R, it sends 0 bytes for it and holds 216 bytes" in said


def test_the_bytes_sent_are_those_that_a_rank_counts() -> None:
    from distir_relax.sharding import list_reshards

    plan = compiled("up.weight")
    session = Session(plan.bundle(("torch",)), "torch")
    session({"x": torch.randn(4, 6)})
    expected = sum(moved.bytes for moved in list_reshards(plan.modules["sharded"]))
    assert [sum(comm.traffic.bytes.values()) for comm in session.communicators] == [expected, expected]


def test_an_unknown_value() -> None:
    with pytest.raises(DistIRError, match=r"no value %up\.wait"):
        explain(compiled("up.weight").bundle(("torch",)), "up.wait")


def test_a_diff_lists_what_changed() -> None:
    first, second = compiled("up.weight"), compiled("up.weight", "R")
    found = diff(first.bundle(("torch",)), second.bundle(("torch",)))
    said = str(found).splitlines()
    assert cells(said, "all_reduce along tp") == ["1", "0", "-1 (-100.0%)"]
    assert cells(said, "sent by a device in a step") == ["96 B", "0 B", "-96 B (-100.0%)"]
    assert cells(said, "weights of a rank, at most") == ["240 B", "432 B", "+192 B (+80.0%)"]
    assert [figures.weights for figures in found.figures] == [(240, 192), (432, 432)]
    assert [(m.first, m.second, m.values, m.bytes) for m in found.moved if m.given] == [
        ("S[0]", "R", ("%up.weight",), 216),
        ("S[1]", "R", ("%down.weight",), 216),
    ]
    assert not any("a step on" in line for line in said), "no machine is known"
    assert "all common values have equal layouts" in str(diff(first.bundle(("torch",)), first.bundle(("torch",))))


def cells(lines: list[str], title: str) -> list[str]:
    """The cells of the row of that title."""
    (row,) = (line for line in lines if line.startswith(title))
    return re.split(r"  +", row)[1:]


def test_times_of_a_diff_are_those_of_the_simulator() -> None:
    plans = compiled("up.weight"), compiled("up.weight", "R")
    machine = dr.load_profile("dgx-h100")
    found = diff(*(plan.bundle(("torch",)) for plan in plans), profile=machine)
    for plan, figures in zip(plans, found.figures, strict=True):
        simulated = dr.simulate(plan, profile=machine)
        assert figures.predicted is not None
        parts = (figures.predicted.computing, figures.predicted.communicating, figures.predicted.waiting)
        assert figures.predicted.seconds == simulated.makespan
        assert sum(parts) == pytest.approx(simulated.makespan)
        assert figures.predicted.memory == simulated.peak_memory.max()
    assert any(line.startswith("a step on dgx-h100 ") for line in str(found).splitlines())


def test_searched_placements_with_and_without_a_limit_of_memory_are_compared() -> None:
    """What layers have alike is told once, with the machine that placements were looked for on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(MLP() for _ in range(3)))
    free, tight = (
        dr.compile(model, (torch.randn(4, 6),), shardings="auto", mesh=(3,), profile="dgx-h100", memory=memory)
        for memory in (1e9, 1300.0)
    )
    found = diff(free.bundle(("torch",)), tight.bundle(("torch",)))
    assert found.machine == "dgx-h100"
    before, after = (figures.predicted for figures in found.figures)
    assert before is not None
    assert after is not None
    assert after.memory < before.memory
    # The limit is one of live tensors; the workspace of a collective comes on top.
    live = [
        max(sum(split) for curve in dr.simulate(plan, profile="dgx-h100").memory_curves() for _, split in curve)
        for plan in (free, tight)
    ]
    assert live[1] <= 1300 < live[0]
    assert before.seconds < after.seconds
    assert re.search(r"%\*\.(up|down)\.weight x[23]", str(found))
    again = json.loads(found.as_json())
    assert again["figures"][1]["sent"] == found.figures[1].sent
    assert [len(group["values"]) for group in again["moved"]] == [len(group.values) for group in found.moved]


def test_only_a_large_gather_is_a_warning() -> None:
    with pytest.warns(dr.ImplicitGatherWarning, match="gathered, 96 bytes"):
        gathered(96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = gathered(97)
    assert "unasked" in plan.text("sharded")


def gathered(threshold: int) -> dr.Plan:
    """A split dim is reversed."""

    class Reversed(torch.nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input.flip(1)

    model = Reversed()
    return dr.compile(model, (torch.randn(4, 6),), shardings={"input": "S[1]"}, mesh=MESH, gather_threshold=threshold)


def test_the_commands(tmp_path: Path) -> None:
    compiled("up.weight").save(tmp_path / "a.dist", ("torch",))
    compiled("up.weight", "S[0: 7|2]").save(tmp_path / "b.dist", ("torch",))
    runner = CliRunner()
    said = runner.invoke(app, ["explain", str(tmp_path / "a.dist"), "%up.weight"])
    assert said.exit_code == 0
    assert 'is split from the annotation at shardings["up.weight"]' in said.stdout
    both = ["diff", str(tmp_path / "a.dist"), str(tmp_path / "b.dist")]
    said = runner.invoke(app, both)
    assert said.exit_code == 0
    assert "  S[1] -> S[1: 7|2]  (1 value, 216 B)\n    %down.weight\n" in said.stdout
    said = runner.invoke(app, [*both, "--json", "--profile", "dgx-h100"])
    assert json.loads(said.stdout)["machine"] == "dgx-h100"
    said = runner.invoke(app, ["rules", "matmul"])
    assert "may be split; the result is I[sum]" in said.stdout
    said = runner.invoke(app, ["rules"])
    assert "... m k, ... k n -> ... m n" in said.stdout


def test_a_value_of_a_function_is_explained_as_in_its_first_call() -> None:
    bundle, _ = blocks_bundle(3)
    said = explain(bundle, "%gelu").splitlines()
    assert said == explain(bundle, "@feed_forward.gelu").splitlines()
    assert said[0] == '%gelu of @feed_forward: R.DTensor((5, 127), "float32", "mesh[0]", "S[1: 43|42|42]")'
    assert said[1:5] == [
        "  %gelu is split as %matmul is, through nn.gelu dim -1",
        "  %matmul is split as %up is, through matmul n",
        "  %up is split from the annotation at blocks.0, model.py:7",
        "no communication produces it or reshards it for its uses",
    ]
    assert "all_reduce along tp, 3 times  # model.py:8" in explain(bundle, "%matmul_1")


def test_bundles_with_functions_are_compared() -> None:
    split, whole = (blocks_bundle(3, placement=placement)[0] for placement in ("S[1]", "R"))
    found = diff(split, whole)
    moved = {name: (m.first, m.second) for m in found.moved for name in m.values}
    assert moved["@feed_forward.gelu"] == moved["%blocks.1.up"] == ("S[1]", "R")
    assert found.figures[0].collectives == {"all_reduce along tp": 3}
    assert not found.figures[1].collectives
    assert re.search(r"%blocks\.\*\.up x3", str(found))
