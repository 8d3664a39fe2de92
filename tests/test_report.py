"""Bundles explained and compared, and the warning of gathers nobody asked for."""

from __future__ import annotations

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
    assert said[-3] == "nothing is sent to make it or to bring it where it is used"


def test_what_is_sent_and_what_another_layout_would_send() -> None:
    """The sum of 4 x 6 floats: ring all-reduce on two devices, each sends 96 bytes."""
    plan = compiled("up.weight")
    assert "; sends 96 bytes: all_reduce along tp" in plan.text("sharded")
    name = next(op.results[0].name for op in plan.modules["sharded"].main.ops if op.name == "redistribute")
    said = explain(plan.bundle(("torch",)), name)
    assert "I[sum] to R: sends 96 bytes: all_reduce along tp" in said
    # All of 4 x 6 floats after the sum; split by rows, each device would hold half of them.
    assert "as it lies, each device sends 96 bytes for it and holds 96 bytes" in said
    assert "in the other layout that sends least, S[0: 2|2], it sends 96 bytes for it and holds 48 bytes" in said


def test_memory_of_uneven_shards_is_that_of_the_largest() -> None:
    """9 rows of 6 floats on two devices: 5 and 4."""
    said = explain(compiled("up.weight").bundle(("torch",)), "%up.weight")
    assert "holds up to 120 bytes" in said
    assert "R, it sends 0 bytes for it and holds 216 bytes" in said


def test_the_bytes_sent_are_those_that_a_rank_counts() -> None:
    from distir_relax.sharding import redistributions

    plan = compiled("up.weight")
    session = Session(plan.bundle(("torch",)), "torch")
    session({"x": torch.randn(4, 6)})
    expected = sum(moved.bytes for moved in redistributions(plan.modules["sharded"]))
    assert [sum(comm.traffic.bytes.values()) for comm in session.communicators] == [expected, expected]


def test_an_unknown_value() -> None:
    with pytest.raises(DistIRError, match=r"no value %up\.wait"):
        explain(compiled("up.weight").bundle(("torch",)), "up.wait")


def test_a_diff_lists_what_changed() -> None:
    first, second = compiled("up.weight"), compiled("up.weight", "R")
    said = diff(first.bundle(("torch",)), second.bundle(("torch",))).splitlines()
    assert "%up.weight: S[0: 5|4] -> R" in said
    assert "all_reduce along tp: 1 -> 0" in said
    assert "bytes sent per device and step: 96 -> 0" in said
    assert "weight bytes per rank: 240|192 -> 432" in said
    assert diff(first.bundle(("torch",)), first.bundle(("torch",))).startswith("no difference")


def test_only_a_large_gather_is_a_warning() -> None:
    with pytest.warns(dr.SurpriseGather, match="gathered, 96 bytes"):
        gathered(96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = gathered(97)
    assert "unasked" in plan.text("sharded")


def gathered(threshold: int) -> dr.Plan:
    """A softmax over a split dim."""
    model = torch.nn.Softmax(-1)
    return dr.compile(model, (torch.randn(4, 6),), shardings={"input": "S[1]"}, mesh=MESH, gather_threshold=threshold)


def test_the_commands(tmp_path: Path) -> None:
    compiled("up.weight").save(tmp_path / "a.dist", ("torch",))
    compiled("up.weight", "S[0: 7|2]").save(tmp_path / "b.dist", ("torch",))
    runner = CliRunner()
    said = runner.invoke(app, ["explain", str(tmp_path / "a.dist"), "%up.weight"])
    assert said.exit_code == 0
    assert 'is split from the annotation at shardings["up.weight"]' in said.stdout
    said = runner.invoke(app, ["diff", str(tmp_path / "a.dist"), str(tmp_path / "b.dist")])
    assert said.exit_code == 0
    assert "%down.weight: S[1: 5|4] -> S[1: 7|2]" in said.stdout
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
        "nothing is sent to make it or to bring it where it is used",
    ]
    assert "all_reduce along tp, 3 times  # model.py:8" in explain(bundle, "%matmul_1")


def test_bundles_with_functions_are_compared() -> None:
    split, whole = (blocks_bundle(3, placement=placement)[0] for placement in ("S[1]", "R"))
    lines = diff(split, whole).splitlines()
    assert "@feed_forward.gelu: S[1: 43|42|42] -> R" in lines
    assert "all_reduce along tp: 3 -> 0" in lines
    assert "%blocks.1.up: S[1: 43|42|42] -> R" in lines
