"""Programs with microbatches take and give whole tensors, and speak of them in errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import RunError
from distir_relax.runtime.microbatch_io import in_parts, user_inputs, user_outputs
from distir_relax.runtime.session import Session


class Scaled(torch.nn.Module):
    """Two inputs, one of which is not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * scale


@pytest.fixture(scope="module")
def plan() -> dr.Plan:
    """Three microbatches of 4 samples, on 2 ranks."""
    torch.manual_seed(0)
    return dr.compile(Scaled(), (torch.ones(12, 5), torch.ones(3)), strategy="2/1/1/3")


X, SCALE = np.ones((12, 5), np.float32), np.ones(3, np.float32)
SIGNATURE = r"the program takes x: float32 \(12, 5\), scale: float32 \(3,\)"


def test_the_tensors_of_a_user_are_whole(plan: dr.Plan) -> None:
    manifest = plan.bundle().manifest
    assert len(manifest.inputs) > 2
    assert [(t.name, t.shape) for t in user_inputs(manifest)] == [("x", (12, 5)), ("scale", (3,))]
    assert [t.shape for t in user_outputs(manifest)] == [(12, 3)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": X[:7], "scale": SCALE}, r"input 'x': expected float32 \(12, 5\), found float32 \(7, 5\)"),
        ({"x": X.astype("float64"), "scale": SCALE}, r"input 'x': expected float32 \(12, 5\), found float64 \(12, 5\)"),
        ({"scale": SCALE}, rf"input 'x': the input is missing; found 'scale'\n  hint: {SIGNATURE}"),
        ({"x": X}, "input 'scale': the input is missing; found 'x'"),
        ({"x": X, "scale": SCALE, "y": X}, rf"input 'y': the program has no such input\n  hint: {SIGNATURE}"),
        ({"scales": X, "x": X, "scale": SCALE}, r"input 'scales': .* no such input\n  hint: did you mean 'scale'\?"),
        ({"x": [[1.0]], "scale": SCALE}, r"input 'x': expected an array, float32 \(12, 5\), found \[\[1.0\]\]"),
    ],
)
def test_errors_name_the_tensors_of_the_user(plan: dr.Plan, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message) as wrong:
        Session(plan.bundle())(inputs)
    assert "x.0" not in str(wrong.value)


def test_a_plan_names_them_too(plan: dr.Plan) -> None:
    with pytest.raises(RunError, match=r"input 'x': expected float32 \(12, 5\), found float32 \(11, 5\)"):
        plan(torch.ones(11, 5), torch.ones(3))


def test_an_output_that_is_unknown(plan: dr.Plan) -> None:
    name = user_outputs(plan.bundle().manifest)[0].name
    with pytest.raises(RunError, match=rf"output 'no': the program has no such output\n  hint: it gives {name}$"):
        Session(plan.bundle())({"x": X, "scale": SCALE}, outputs=("no",))


def test_parts_that_are_given_stay_parts(plan: dr.Plan) -> None:
    manifest = plan.bundle().manifest
    parts = in_parts(manifest, {"x": X, "scale": SCALE})
    assert set(parts) == {tensor.name for tensor in manifest.inputs}
    assert in_parts(manifest, parts) == parts


def test_a_bundle_takes_and_gives_whole_tensors(plan: dr.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "m.dist", ("torch",))
    loaded = dr.load(tmp_path / "m.dist")
    x, scale = torch.randn(12, 5), torch.randn(3)
    torch.testing.assert_close(loaded(x, scale), plan(x, scale))
    assert "inputs   x: float32 (12, 5), scale: float32 (3,)" in repr(loaded)
    with pytest.raises(RunError, match=r"expected each of the inputs x: float32 \(12, 5\), scale: float32 \(3,\) once"):
        loaded(x, scale, x)
    np.savez(tmp_path / "x.npz", x=X[:7], scale=SCALE)
    done = CliRunner().invoke(app, ["run", str(tmp_path / "m.dist"), "-i", str(tmp_path / "x.npz")])
    assert isinstance(done.exception, RunError)
    assert "input 'x': expected float32 (12, 5), found float32 (7, 5)" in str(done.exception)
