"""Bundles whose programs were changed after they were compiled: nothing runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import Bundle, read_bundle, write_bundle
from distir_relax.cli import app
from distir_relax.errors import BundleError
from distir_relax.ir import Module, parse, print_module
from distir_relax.lowering.emit.torch import to_torch
from distir_relax.runtime.session import Session
from tests.foreign import packed_attrs
from tests.runtime.processes import mpirun


class Twice(torch.nn.Module):
    """Two pending sums of equal shapes, on ranks whose programs differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(7, 5, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        return torch.tanh(a) * torch.relu(b)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.manual_seed(0)
    shardings = {"a.weight": "S[1: 4|1|2]", "b.weight": "S[1: 4|1|2]"}
    plan = dr.compile(
        Twice(), (torch.randn(4, 7),), shardings=shardings, mesh=dr.DeviceMesh((3,), ("tp",)), name="twice"
    )
    assert len(plan.modules["ranked"].functions) == 3
    return plan.bundle(("torch",))


def moved(module: Module) -> Module:
    """On rank 1 alone the second all-reduce ahead of the first: the numbers of rank 1 go where they do not belong."""
    function = module.functions[1]
    first, second = (i for i, op in enumerate(function.ops) if op.name == "all_reduce")
    ops = list(function.ops)
    ops.insert(second, ops.pop(first))
    functions = (module.functions[0], replace(function, ops=tuple(ops)), module.functions[2])
    return replace(module, functions=functions)


def with_moved(bundle: Bundle, text: bool, programs: bool) -> Bundle:
    """The bundle with the change in the text of the ranked stage, in the programs, or in both."""
    module = moved(parse(bundle.texts["ranked.txt"]))
    texts = {**bundle.texts, "ranked.txt": print_module(module)} if text else bundle.texts
    written = {f"programs/{name}.py": code for name, code in to_torch(module, "twice").items()}
    return replace(bundle, texts=texts, programs=written if programs else bundle.programs)


@pytest.mark.parametrize(
    ("text", "programs", "message"),
    [
        (True, True, "do not match: .*different places of the schedule"),
        (True, False, "do not match"),
    ],
)
def test_a_changed_bundle_is_refused(bundle: Bundle, tmp_path: Path, text: bool, programs: bool, message: str) -> None:
    path = write_bundle(with_moved(bundle, text, programs), tmp_path / "changed.dist")
    with pytest.raises(BundleError, match=f"(?s){message}"):
        Session(read_bundle(path))
    np.savez(tmp_path / "x.npz", x=np.ones((4, 7), "float32"))
    result = CliRunner().invoke(app, ["run", str(path), "--input", str(tmp_path / "x.npz")])
    assert isinstance(result.exception, BundleError)


def test_torch_modules_are_for_reading(bundle: Bundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks run modules generated from the text, not those of the files; an edited one is refused, or trusted."""
    x = torch.randn(4, 7)
    expected = Session(bundle)({"x": x})
    path = write_bundle(with_moved(bundle, False, True), tmp_path / "changed.dist")
    torch.testing.assert_close(Session(read_bundle(path))({"x": x}), expected, rtol=0, atol=0)
    assert capfd.readouterr().err == ""
    for module in sorted((path / "programs").iterdir()):
        module.write_text(bundle.programs[f"programs/{module.name}"].replace("torch.tanh(", "torch.sin("))
    with pytest.raises(BundleError, match=r"(?s)main_0\.py.*--trust-code"):
        read_bundle(path)
    (name,) = expected
    found = dr.load(path, trust_code=True)(x)
    assert (found - expected[name]).abs().max() > 1e-3
    assert "edited: programs/main_0.py, programs/main_1.py, programs/main_2.py" in capfd.readouterr().err


@pytest.mark.sweep
@pytest.mark.mpirun
def test_a_launch_runs_edited_programs_if_it_is_told_to(bundle: Bundle, tmp_path: Path) -> None:
    path = write_bundle(bundle, tmp_path / "m.dist")
    module = path / "programs" / "main_2.py"
    module.write_text(module.read_text().replace("\n    return (", "\n    print('edited', flush=True)\n    return ("))
    np.savez(tmp_path / "x.npz", x=np.ones((4, 7), "float32"))
    command = ["-m", "distir_relax", "run", str(path), "--input", str(tmp_path / "x.npz")]
    refused = mpirun(3, *command)
    assert refused.returncode == 2
    assert "to run a program that you have edited, pass --trust-code" in refused.stderr
    done = mpirun(3, *command, "--trust-code")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("edited") == 1
    assert done.stderr.count("running the bundle's own Python programs; edited: programs/main_2.py") == 1


def test_functions_of_others_need_trust(tmp_path: Path) -> None:
    attrs = packed_attrs(4, 6, "float32")
    listed = ", ".join(f"{name}={value!r}" for name, value in attrs.items()).replace("'", '"')
    module = parse(
        "module @global {\n  func @main(\n    input %x: f32[4,6],\n  ) {\n"
        f"    %y: f32[6,4] = call_dps_packed(%x) {{{listed}}}  # model.py:3\n"
        '    return "y": %y\n  }\n}\n'
    )
    x = torch.randn(4, 6)
    path = dr.compile((module, {}), mesh=1).save(tmp_path / "m.dist", backends=("torch",))
    with pytest.raises(BundleError, match=r"call_dps_packed at model\.py:3 runs a function of TVM[\s\S]*--trust-code"):
        Session(read_bundle(path))
    found = Session(read_bundle(path, trust_code=True))({"x": x})["y"]
    torch.testing.assert_close(found, 2 * x.T, rtol=0, atol=0)


def test_the_bundle_as_it_was_runs(bundle: Bundle, tmp_path: Path) -> None:
    path = write_bundle(bundle, tmp_path / "twice.dist")
    x = torch.randn(4, 7)
    torch.testing.assert_close(Session(read_bundle(path))({"x": x}), Session(bundle)({"x": x}))


def test_a_text_that_cannot_be_read(bundle: Bundle, tmp_path: Path) -> None:
    path = write_bundle(replace(bundle, texts={**bundle.texts, "ranked.txt": "module"}), tmp_path / "cut.dist")
    with pytest.raises(BundleError, match=r"do not match: .*ranked\.txt"):
        Session(read_bundle(path))


@pytest.mark.mpirun
def test_a_launch_of_a_changed_bundle_ends_before_it_runs(bundle: Bundle, tmp_path: Path) -> None:
    path = write_bundle(with_moved(bundle, True, True), tmp_path / "changed.dist")
    np.savez(tmp_path / "x.npz", x=np.ones((4, 7), "float32"))
    options = ["-m", "distir_relax", "run", str(path), "--input", str(tmp_path / "x.npz")]
    done = mpirun(3, *options, "--output", tmp_path / "y.npz")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("do not match") == 1
    assert not (tmp_path / "y.npz").exists()


def test_records_are_json(bundle: Bundle) -> None:
    assert {row["record"] for row in json.loads(bundle.records)} == {"collected", "reason"}
