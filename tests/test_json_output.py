"""`--json` of the commands, and `--version`: one JSON value on stdout, with the numbers of the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.runtime import doctor

MODEL = """
import torch


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 9, bias=False), torch.nn.Linear(9, 6, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).masked_fill(x < 0, float("-inf"))


def build():
    torch.manual_seed(0)
    return MLP(), (torch.ones(4, 6),)
"""


def said(*arguments: object, code: int = 0) -> Any:
    """The JSON value that a command prints on stdout."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return json.loads(done.stdout, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, its bundle `m.dist`, what compiling it printed, and an input."""
    path = tmp_path_factory.mktemp("json")
    (path / "model.py").write_text(MODEL)
    compiled = said("compile", f"{path / 'model.py'}:build", "-o", path / "m.dist", "--mesh", 2, "--shard", "up.*=S[0]")
    (path / "compiled.json").write_text(json.dumps(compiled))
    np.savez(path / "x.npz", x=np.ones((4, 6), np.float32))
    return path


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"distir {dr.__version__}\n")


def test_compile(folder: Path) -> None:
    found = json.loads((folder / "compiled.json").read_text())
    # 9 columns of 6 floats, 5 | 4, of both weights; the ring all-reduce of 4 x 6 floats on two ranks sends them once.
    assert found["weight_bytes"] == [2 * 5 * 6 * 4, 2 * 4 * 6 * 4]
    assert found["sent_bytes"] == [4 * 6 * 4] * 2
    assert (found["ranks"], found["programs"], found["search"]) == (2, 2, [])
    assert found["output"] == str(folder / "m.dist")
    assert 0 < sum(found["passes"].values()) <= found["seconds"]


def test_show(folder: Path) -> None:
    found = said("show", folder / "m.dist")
    assert (found["name"], found["stage"], found["meshes"]) == ("mlp", "distributed", [{"tp": 2}])
    (main,) = found["functions"]
    assert {item["name"]: item["role"] for item in main["inputs"]} == {
        "x": "input", "up.weight": "parameter", "down.weight": "parameter"
    }  # fmt: skip
    reduce = next(op for op in main["ops"] if op["op"] == "all_reduce")
    assert reduce["attributes"] == {"axis": "tp", "op": "sum"}
    assert reduce["results"][0]["type"] == "f32[4,6] @ {0,1}"
    assert any("model.py:" in op["location"] for op in main["ops"])
    assert any("-inf" in map(str, op["attributes"].values()) for op in main["ops"])
    ranked = said("show", folder / "m.dist", "--stage", "ranked")
    assert ranked["ranks"] == [function["name"] for function in ranked["functions"]]


def test_explain(folder: Path) -> None:
    found = said("explain", folder / "m.dist", "%down.weight")
    assert (found["value"], found["function"], found["placements"]) == ("down.weight", "main", "S[1: 5|4]")
    assert found["held_bytes"] == 5 * 6 * 4
    assert found["reasons"][0]["source"] == "relu"
    assert found["redistributions"] == []
    plain = CliRunner().invoke(app, ["explain", str(folder / "m.dist"), "%down.weight"]).stdout
    assert found["text"] == plain.splitlines()
    result = next(f for f in said("show", folder / "m.dist", "--stage", "sharded")["functions"] if f["name"] == "main")
    moved = next(op["results"][0]["name"] for op in result["ops"] if op["op"] == "redistribute")
    (way,) = said("explain", folder / "m.dist", moved)["redistributions"]
    assert (way["from"], way["to"], way["bytes"], way["times"]) == ("I[sum]", "R", 96, 1)
    assert way["collectives"] == [{"name": "all_reduce", "axis": "tp"}]


def test_rules() -> None:
    rows = {row["op"]: row for row in said("rules")}
    assert rows["matmul"]["rule"] == "... m k, ... k n -> ... m n"
    found = said("rules", "matmul", "f32[4,5]", "f32[5,6]")
    assert (found["operands"], found["results"]) == (["f32[4,5]", "f32[5,6]"], ["f32[4,6]"])
    factors = {factor["name"]: factor for factor in found["factors"]}
    assert factors["k"] == {"name": "k", "size": 5, "kind": "sum", "operands": [[1], [0]], "results": [[]]}
    assert found["linear"] == [[0], [1]]
    assert said("rules", "flip", "f32[4,6]", "--attr", "axis=1")["factors"][1]["kind"] == "blocked"
    assert set(said("rules", "all_reduce")["attributes"]) >= {"axis", "op"}


def test_run(folder: Path) -> None:
    found = said("run", folder / "m.dist", "-i", folder / "x.npz", "-o", folder / "y.npz")
    assert (found["name"], found["world_size"], found["transport"]) == ("mlp", 2, "threads")
    assert found["output"] == str(folder / "y.npz")
    assert [rank["weight_bytes"] for rank in found["ranks"]] == [240, 192]
    assert found["ranks"][0]["by_kind"]["all_reduce"] == {"calls": 1, "sent_bytes": 96}


def test_run_with_a_drawing_keeps_stdout_for_json(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    plan = dr.compile(model, (torch.ones(4, 3),), strategy="1/1/2/2", stages=["1"])
    plan.save(tmp_path / "m.dist", ("torch",))
    np.savez(tmp_path / "x.npz", **{plan.bundle().manifest.divided_inputs[0].name: np.ones((4, 3), np.float32)})
    assert said("run", tmp_path / "m.dist", "-i", tmp_path / "x.npz", "--trace", tmp_path / "t.svg")["output"] is None
    assert (tmp_path / "t.svg").exists()


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._python, doctor._launcher))
    found = said("doctor")
    assert found["ok"]
    assert [(check["name"], check["ok"], check["fix"]) for check in found["checks"]] == [
        ("Python", True, ""), ("launcher", True, "")
    ]  # fmt: skip
    monkeypatch.setenv("SLURM_PROCID", "1")
    found = said("doctor", code=1)
    assert not found["ok"]
    assert found["checks"][1]["fix"].startswith("srun --mpi=pmix -n 2")
