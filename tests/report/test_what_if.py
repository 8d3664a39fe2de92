"""`distir simulate --scale` and `--sensitivity`: both machines are compared, by text, JSON and page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.scaling import scale_profile
from distir_relax.errors import DistIRError
from tests import mlp

PIPELINE = Path(__file__).parents[2] / "examples" / "paper" / "pipeline.distir"
SCALE = "network.bandwidth=0.1x,device.flops=0.01x"


def run(*arguments: str, model: str = str(PIPELINE)) -> Any:
    done = CliRunner().invoke(app, ["simulate", model, "--profile", "dgx2-v100", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.output) if "--json" in arguments else done.output


def test_both_machines_are_printed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text, plain, before = run("--scale", SCALE, "--html", str(page)), run("--scale", SCALE, "--json"), run("--json")
    assert plain["what_if"]["scale"] == SCALE
    assert plain["what_if"]["before"] == before
    ratio = plain["makespan_s"] / before["makespan_s"]
    assert ratio > 1.5
    assert plain["what_if"]["ratios"]["a step"] == pytest.approx(ratio)
    assert plain["profile"] == "dgx2-v100 with network.bandwidth=0.1x, device.flops=0.01x"
    assert f"{before['makespan_s'] * 1e6:.4g} us  {plain['makespan_s'] * 1e6:.4g} us  {ratio:.3f}x" in text
    assert f"before    {before['makespan_s'] * 1e6:.4g} us on the machine as it is, {ratio:.3f}x" in text
    assert f"<td>{ratio:.3f}x</td>" in page.read_text()
    assert "<h2>What if</h2>" in page.read_text()


def test_the_function_compares_the_program_of_the_machine_as_it_is() -> None:
    """Of devices of other speeds the weights are cut in proportion: the same cut is simulated on both machines."""
    unlike = replace(dr.load_profile("dgx2-v100"), groups=(Group(((1, 1),), 0.5, 30e9),))
    training = mlp.training(3, 127, 35)
    found = dr.simulate(training, profile=unlike, strategy="1/2/1/1", scale="device.memory=0.5x,network.latency=3x")
    before = dr.simulate(training, profile=unlike, strategy="1/2/1/1")
    assert found.before is not None
    assert found.before.makespan == before.makespan
    assert found.memory.tolist() == [unlike.memory / 2, 15e9]
    assert found.samples == before.samples
    assert found.strategy == before.strategy
    again = dr.simulate(before.module, profile=scale_profile(unlike, "network.latency=3x"))
    assert found.makespan == again.makespan > before.makespan
    assert found.before.before is None


def test_a_program_that_no_longer_fits_says_so() -> None:
    found = dr.simulate(mlp.training(3, 127, 35), profile="dgx2-v100", strategy="1/1/1/1", scale="device.memory=10kB")
    assert not found.fits
    assert found.before is not None
    assert found.before.fits
    assert found.alternative is not None
    assert "does not fit" in str(found)


def test_the_limits_of_a_step_are_printed(tmp_path: Path) -> None:
    text, plain = run("--sensitivity"), run("--sensitivity", "--json")
    found = plain["sensitivity"]
    assert found["bound_by"] == "op overhead"
    assert found["makespan_s"] == plain["makespan_s"]
    assert text.count("bound by op overhead") == 1
    for row in found["resources"]:
        assert f"{row['twice_s'] * 1e6:.4g} us" in text
        if row["figure"] in ("device.flops", "network.latency"):
            factor = "2x" if row["figure"] == "device.flops" else "0.5x"
            scaled = run("--scale", f"{row['figure']}={factor}", "--json")
            assert scaled["makespan_s"] == pytest.approx(row["twice_s"], rel=1e-12)


def test_a_range_of_sizes_is_of_the_scaled_machine(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(127, 70), torch.nn.ReLU(), torch.nn.Linear(70, 127)).eval()
    rows = {"input": {0: dr.Dim("rows", max=1024)}}
    plan = dr.compile(model, (torch.zeros(16, 127),), dynamic_shapes=rows, strategy="1/2/1/1")
    plan.save(tmp_path / "model.dist")
    arguments = ["--dim", "rows=128:512:2x", "--json"]
    before = run(*arguments, model=str(tmp_path / "model.dist"))
    after = run(*arguments, "--scale", "device.overhead=3x", model=str(tmp_path / "model.dist"))
    assert [row["rows"] for row in after] == [128, 256, 512]
    assert all(a["makespan_s"] > 1.5 * b["makespan_s"] for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale", "network.bandwith=2x"], "did you mean network.bandwidth"),
        (["--scale", "device.flops=quick"], "expected a factor"),
        (["--sensitivity", "--dim", "n=1:8:2x"], "--sensitivity or --critical-path"),
        (["--critical-path", "--prompt", "3", "--generate", "5"], "expected no --critical-path"),
        (["--scale", "nothing=2x", "--prompt", "3", "--generate", "5"], "has no figure 'nothing'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["simulate", str(PIPELINE), "--profile", "dgx2-v100", *arguments])
    assert isinstance(done.exception, DistIRError)
    assert message in str(done.exception)
    assert not done.output
