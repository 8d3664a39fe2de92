"""`distir explain` of a whole bundle, against the bundle, runs of its ranks, and the simulator."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import Bundle, local_bytes
from distir_relax.cli import app
from distir_relax.compiler.compile import program_bundle
from distir_relax.errors import DistIRError, ProfileError
from distir_relax.ir import parse
from distir_relax.layout import DTYPES
from distir_relax.report.overview import Overview, overview
from distir_relax.runtime.session import Session

SCREEN = 60
"""Lines of two screens."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(12)
        self.up, self.down = torch.nn.Linear(12, 31), torch.nn.Linear(31, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@cache
def bundle(strategy: str = "2/3/1/1", layers: int = 4) -> Bundle:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(layers))).eval()
    plan = dr.compile(model, (torch.randn(7, 12),), strategy=strategy, name="blocks")
    return plan.bundle(("torch",))


@cache
def training() -> Bundle:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(10, 12)
    step = dr.Training(model, F.mse_loss, dr.optim.AdamW(lr=0.01), (x, x))
    return step.compile(strategy="2/1/2/5,zero=1", name="step").bundle(("torch",))


def cells(found: Overview, start: str) -> list[str]:
    """The words of the line that begins so."""
    (line,) = (line for line in str(found).splitlines() if line.startswith(start))
    return line.split()


def test_layers_are_one_class_with_their_layout_and_bytes() -> None:
    found = overview(bundle())
    assert cells(found, "*.up.weight") == [
        *("*.up.weight", "4", "float32[31,12]", "R,", "S[0]", "5.95", "kB", "2.11", "kB", "strategy"),
    ]  # fmt: skip
    (row,) = (row for row in found.weights if row.name == "*.norm.bias")
    assert (row.cause, row.is_replicated, row.bytes, row.rank_bytes) == ("", True, 4 * 12 * 4, 4 * 12 * 4)
    assert str(found).splitlines()[0].startswith("blocks: program of ")
    assert "6 ranks, mesh data 2 x tensor 3, tail ragged" in str(found)
    assert "strategy 2/3/1/1 splits " in str(found)


@pytest.mark.parametrize("make", [bundle, training])
def test_bytes_are_those_of_the_manifest(make: Any) -> None:
    opened = make()
    found, manifest = overview(opened), opened.manifest
    ranks = [sum(local_bytes(t, manifest.mesh, rank) for t in manifest.weights) for rank in range(manifest.mesh.size)]
    assert list(found.rank_bytes) == ranks
    assert sorted(value for row in found.weights for value in row.values) == sorted(t.name for t in manifest.weights)
    tensors = {t.name: t for t in manifest.weights}
    for row in found.weights:
        whole = [math.prod(tensors[value].shape) * DTYPES[tensors[value].dtype][1] for value in row.values]
        assert row.bytes == sum(whole)
    by_rank = {rank: row for row in found.programs for rank in row.ranks}
    assert sorted(by_rank) == list(range(manifest.mesh.size))
    for rank, row in by_rank.items():
        assert row.weight_bytes == ranks[rank]
        assert row.program == manifest.program_of(rank).name


@pytest.mark.parametrize("strategy", ["2/3/1/1", "1/3/1/2", "1/1/3/4", "3/1/1/1"])
def test_communication_is_that_of_real_ranks(strategy: str) -> None:
    opened = bundle(strategy)
    session = Session(opened, "torch", timeout=60)
    session({item.name: torch.randn(7, 12) for item in opened.manifest.inputs[:1]}
            if not opened.manifest.divided_inputs else
            {opened.manifest.divided_inputs[0].name: torch.randn(7, 12)})  # fmt: skip
    sent: Counter[str] = Counter()
    for communicator in session.communicators:
        sent.update({kind.removeprefix("start_"): n for kind, n in communicator.traffic.bytes.items()})
    found = overview(opened)
    expected: Counter[str] = Counter()
    for row in found.traffic:
        assert row.bytes is not None
        expected[row.name] += round(row.bytes)
    assert +sent == +expected
    if strategy == "2/3/1/1":
        assert [(row.name, row.axis, row.times) for row in found.traffic] == [("all_reduce", "tensor", 4)]


def test_each_split_has_a_cause() -> None:
    """What is not annotated names the op and the value that its split comes from."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(3))).eval()
    plan = dr.compile(model, (torch.randn(7, 12),), shardings={"*.up.weight": "S[0]"}, mesh=3)
    found = overview(plan.bundle(("torch",)))
    rows = {row.name: row for row in found.weights}
    assert rows["*.up.weight"].cause == "annotated"
    assert rows["*.down.weight"].cause.startswith("linear k of %")
    assert rows["*.norm.weight"].cause == ""
    assert all(bool(row.cause) != row.is_replicated for row in found.weights)
    (cause,) = found.causes
    assert (cause.annotation, cause.axis) == ('shardings["*.up.weight"]', plan.modules["sharded"].meshes[0].axes[0])
    assert all(f"up.weight{end}" in str(found) for end in ("", '"]'))


def test_gathers_that_nothing_requests_are_listed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9))
    with pytest.warns(dr.ImplicitGatherWarning):
        plan = dr.compile(model, (torch.randn(4, 6),), shardings={"0.weight": "S[0]"}, mesh=3, gather_threshold=1)
    found = overview(plan.bundle(("torch",)))
    (row,) = found.gathers
    assert (row.op, row.bytes) == ("layer_norm", 4 * 9 * 4)
    assert "gathered without a request:" in str(found)


def test_a_training_step_is_two_screens() -> None:
    found = overview(training(), dr.load_profile("dgx-h100"))
    lines = str(found).splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 150
    assert "training step of " in lines[0]
    assert "5 microbatches" in lines[0]
    assert cells(found, "state")[1] == str(sum(len(row.values) for row in found.weights if row.role == "state"))
    assert found.prediction is not None
    assert found.prediction.limits.bound_by == "host"


def test_the_prediction_is_that_of_the_simulator(tmp_path: Path) -> None:
    path = tmp_path / "blocks.dist"
    dr.compile(Block().eval(), (torch.randn(7, 12),), strategy="1/3/1/1", name="block").save(path)
    done = CliRunner().invoke(app, ["explain", str(path), "--profile", "dgx-h100", "--json"])
    plain = json.loads(done.output)
    simulated = CliRunner().invoke(app, ["simulate", str(path), "--profile", "dgx-h100", "--sensitivity", "--json"])
    expected = json.loads(simulated.output)
    assert plain["prediction"] == expected
    text = CliRunner().invoke(app, ["explain", str(path), "--profile", "dgx-h100"]).output
    assert f"bound by {expected['sensitivity']['bound_by']}" in text
    without = json.loads(CliRunner().invoke(app, ["explain", str(path), "--json"]).output)
    assert without == {key: value for key, value in plain.items() if key != "prediction"}


def test_symbolic_sizes_have_the_values_that_are_given(tmp_path: Path) -> None:
    path = tmp_path / "rows.dist"
    rows = {"x": {0: dr.Dim("rows", max=512)}}
    dr.compile(Block().eval(), (torch.randn(7, 12),), strategy="1/3/1/1", dynamic_shapes=rows).save(path)

    def sent(*arguments: str) -> float:
        plain = json.loads(CliRunner().invoke(app, ["explain", str(path), "--json", *arguments]).output)
        return float(plain["traffic"][0]["bytes"])

    assert sent("--dim", "rows=140") == 20 * sent() == 20 * 4 * 7 * 12 * 4
    done = CliRunner().invoke(app, ["explain", str(path), "--dim", "columns=3"])
    assert isinstance(done.exception, DistIRError)
    assert "no size 'columns'" in str(done.exception)


HAND = """
module @distributed {
  mesh[0] = device_mesh((3,), ("d",))
  func @main(
    input %x: f32[5,7] @ {0..2} as R.DTensor((5, 7), "float32", "mesh[0]", "R"),
    parameter %w: f32[7,7] @ {0..2} as R.DTensor((7, 7), "float32", "mesh[0]", "R"),
  ) {
    %a: f32[5,7] @ {0..2} = matmul(%x, %w)
    %b: f32[5,7] @ {0..2} = all_reduce(%a) {axis="d", op="sum"}
    return "b": %b as R.DTensor((5, 7), "float32", "mesh[0]", "R")
  }
}
"""


def test_a_program_written_by_hand_has_no_layouts_of_its_own() -> None:
    found = overview(program_bundle("hand", parse(HAND), {"w": torch.ones(7, 7)}))
    assert found.causes == ()
    assert [(row.name, row.times, row.bytes) for row in found.traffic] == [("all_reduce", 1, 4 * 35 * 4)]
    assert str(found).startswith("hand: program, 3 ranks")


def test_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "block.dist"
    dr.compile(Block().eval(), (torch.randn(7, 12),), strategy="1/3/1/1").save(path)
    done = CliRunner().invoke(app, ["explain", str(path), "%up.weight", "--profile", "dgx-h100"])
    assert isinstance(done.exception, DistIRError)
    assert "expected no --profile with a value" in str(done.exception)
    done = CliRunner().invoke(app, ["explain", str(path), "--profile", "cpu-local"])
    assert isinstance(done.exception, ProfileError)
