"""Pipelines: passes as data, and what looks on while they run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.compiler.pass_manager import Dump, Observer, Stages, Verify, run_passes
from distir_relax.compiler.pass_pipeline import FUSE_PASSES, RANK_PASSES, compile_passes
from distir_relax.compiler.pass_text import print_pass
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import STAGES, Module, Pass, parse, pass_name
from distir_relax.lowering import Project, ToDistIR
from tests.rfc import rfc_module

MESH = dr.DeviceMesh((3,), ("tp",))


@dataclass(frozen=True)
class DropLastOp:
    """A pass with a bug: what it drops is still used."""

    takes: ClassVar[tuple[str, ...]] = STAGES
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        main = module.main
        return replace(module, functions=(replace(main, ops=main.ops[:-1]), *module.functions[1:]))


@dataclass
class Log(Observer):
    """Notes what it sees."""

    seen: list[tuple[str, int, str]]

    def begin(self, number: int, step: Pass) -> None:
        self.seen.append(("begin", number, pass_name(step)))

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append(("end", number, module.stage))


def test_observers_see_every_pass() -> None:
    seen: list[tuple[str, int, str]] = []
    run_passes(rfc_module(), compile_passes(MESH), [Log(seen)])
    assert seen[:3] == [("end", 0, "global"), ("begin", 1, "propagate"), ("end", 1, "sharded")]
    assert seen[-1] == ("end", len(compile_passes(MESH)), "ranked")


@pytest.mark.parametrize("place", range(len(compile_passes(MESH)) + 1))
def test_verification_names_the_pass_that_broke_the_program(place: int) -> None:
    passes = list(compile_passes(MESH))
    passes.insert(place, DropLastOp())
    with pytest.raises(VerificationError, match="after drop-last-op: "):
        run_passes(rfc_module(), passes, [Verify()])


def test_a_pass_takes_its_stages() -> None:
    with pytest.raises(VerificationError, match="project takes a program of the distributed stage, found the global"):
        run_passes(rfc_module(), [Project()])


def test_each_pass_says_truly_what_it_takes_and_gives() -> None:
    stages = Stages()
    module = rfc_module()
    for step in compile_passes(MESH, "pad", {"x": "R"}, {"x": "x"}):
        assert module.stage in step.takes
        module, before = run_passes(module, [step], [stages]), module
        assert module.stage == (step.gives or before.stage)
    distributed = stages.modules["distributed"]
    assert run_passes(distributed, RANK_PASSES).stage == "ranked"
    assert run_passes(distributed, FUSE_PASSES).stage == "distributed"


def test_a_pass_prints_its_options() -> None:
    assert print_pass(ToDistIR("pad")) == "to-distir{tail=pad}"
    assert print_pass(ToDistIR()) == "to-distir"


def test_compile_verifies_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import distir_relax.compiler.source as source

    model, x = torch.nn.Linear(7, 5), torch.randn(3, 7)
    broken = (*compile_passes(MESH), DropLastOp())
    monkeypatch.setattr(source, "compile_passes", lambda *arguments, **_: broken)
    with pytest.raises(VerificationError, match="after drop-last-op"):
        dr.compile(model, (x,), mesh=MESH, verify=True)
    # In tests always: conftest.py sets the variable.
    with pytest.raises(VerificationError, match="after drop-last-op"):
        dr.compile(model, (x,), mesh=MESH)
    dr.compile(model, (x,), mesh=MESH, verify=False)
    monkeypatch.setenv("DISTIR_VERIFY", "0")
    dr.compile(model, (x,), mesh=MESH)


def test_dumps_are_numbered_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "99-old.txt").write_text("of an earlier dump")
    (tmp_path / "mine.txt").write_text("not of a dump")
    model, x = torch.nn.Linear(7, 5), torch.randn(3, 7)
    plan = dr.compile(model, (x,), shardings={"weight": "S[0]"}, mesh=MESH, dump=tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir() if path.name != "mine.txt")
    assert files[0] == "00-imported.txt"
    assert [int(name[:2]) for name in files] == list(range(len(plan.seconds) + 1))
    last = parse((tmp_path / files[-1]).read_text())
    assert last == plan.modules["ranked"]
    assert (tmp_path / "mine.txt").exists()
    with pytest.raises(DistIRError, match="cannot write here"):
        Dump(tmp_path / "mine.txt")


def test_the_command_dumps_and_times(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\ndef parts():\n    return torch.nn.Linear(7, 5), (torch.randn(3, 7),)\n")
    options = ["--shard", "weight=S[0]", "--mesh", "3", "--verify", "--times", "--dump", str(tmp_path / "dump")]
    result = CliRunner().invoke(app, ["compile", f"{file}:parts", "-o", str(tmp_path / "m.dist"), *options])
    assert result.exit_code == 0, result.output
    assert "propagate" in result.output
    assert "02-apply-shardings.txt" in {path.name for path in (tmp_path / "dump").iterdir()}


def test_records_travel_with_the_module_and_are_no_part_of_it() -> None:
    ranked = run_passes(rfc_module(), compile_passes(MESH))
    assert {type(record).__name__ for record in ranked.records} == {"Reason", "OutputAssembly"}
    assert replace(ranked, records=()) == ranked


def test_a_broken_program_is_on_disk_before_the_verification_says_so(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(7, 5), torch.randn(3, 7)
    with pytest.raises(VerificationError, match="after drop-last-op"):
        dr.compile(model, (x,), mesh=MESH, dump=tmp_path, passes=lambda passes: (*passes, DropLastOp()))
    assert sorted(path.name for path in tmp_path.iterdir())[-1].endswith("-drop-last-op.txt")
