"""Sharded programs against models: what the compiler makes is right, mistakes are found and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import MicrobatchProgram, Module, parse, print_module, verify
from distir_relax.ops import check
from distir_relax.proof import Refuted, check_model, prove
from distir_relax.proof.plan import SCHEDULE
from tests.proof.language_model import step
from tests.proof.rank_mutants import mutants
from tests.proof.test_projection import PLANS
from tests.proof.test_projection import plan as plan_for_ranks


class Noisy(nn.Module):
    """Dropout, and a norm over all samples with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(self.norm(self.up(x)), 0.3, self.training)
        return self.down(torch.tanh(y)).square().mean()


def noisy(strategy: str) -> dr.Plan:
    torch.manual_seed(0)
    return dr.compile_training(Noisy(), None, example_batch=torch.randn(9, 5), strategy=strategy).plan


STEPS: dict[str, Callable[[], dr.Plan]] = {
    "data": lambda: step("3/1/1/1", clip_norm=1.0),
    "tensor": lambda: step("1/3/1/1", optimizer=dr.optim.SGD(0.1)),
    "context": lambda: step("1/1/1/1,context=3"),
    "ring": lambda: step("1/1/1/1,context=3,ring=on"),
    "microbatches": lambda: step("2/1/1/3", clip_norm=1.0),
    "microbatches of other sizes": lambda: step("1/1/1/4"),
    "pipeline": lambda: step("1/1/2/3"),
    "recomputation": lambda: step("1/1/1/2,checkpoint=block"),
    "float32 copies": lambda: step("2/1/1/2", precision="bf16"),
    "scaled loss": lambda: step("1/1/1/2", loss_scale=dr.optim.LossScale(), gradient_norm=True),
    "averages": lambda: step("3/1/1/2,zero=3", averaging=dr.optim.EMA(0.9)),
    "samples that meet": lambda: noisy("1/1/1/2"),
    "dropout": lambda: noisy("3/1/1/1"),
}


@cache
def plan(name: str) -> dr.Plan:
    return STEPS[name]() if name in STEPS else plan_for_ranks(name)


def problem(made: dr.Plan, sharded: Module) -> str:
    """The error of a check of another sharded program; empty if none is found."""
    try:
        verify(sharded, check)
        check_model(made.imported.module, sharded)
    except DistIRError as error:
        return str(error)
    return ""


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [*STEPS, *PLANS])
def test_what_the_compiler_makes_is_right(name: str) -> None:
    made = plan(name)
    assert check_model(made.imported.module, made.modules["sharded"]) == []


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", [*STEPS, "all", "generation"])
def test_mistakes_are_found(name: str) -> None:
    """A change that is not found is in the formulas of optimizers, or exchanges outputs that are equal."""
    made = plan(name)
    missed = []
    for kind, module in mutants(made.modules["sharded"], 30, seed=3):
        if problem(made, module) == "":
            missed.append((kind, print_module(module)))
    assert missed == []


def test_the_first_wrong_op_is_named() -> None:
    made = plan("microbatches")
    text = print_module(made.modules["sharded"])
    records = made.modules["sharded"].records

    def changed(pattern: str, new: str) -> Module:
        found = re.sub(pattern, new, text, count=1)
        assert found != text
        return replace(parse(found), records=records)

    wrong = changed(r"gelu_grad\(%(\S+), %(\S+)\)", r"relu_grad(%\1, %\2)")
    with pytest.raises(VerificationError, match=r"the model does not do %\S+: .* = relu_grad\(.*language_model\.py"):
        check_model(made.imported.module, wrong)
    forward = changed(r"nn\.gelu\(%(\S+)\)", r"nn.relu(%\1)")
    assert "the output 'output' is not the model's: the model does not do" in problem(made, forward)
    made = plan("tensor")
    lost = check_model(made.imported.module, replace(made.modules["sharded"], records=()))
    assert "the model has no output 'words.weight.new'" in [item.reason for item in lost]


def test_another_record_of_microbatches_is_refused() -> None:
    made = plan("microbatches")
    sharded = made.modules["sharded"]
    record = next(r for r in sharded.records if isinstance(r, MicrobatchProgram))
    placed = record.placed.replace('op="sum"', 'op="max"', 1)
    assert placed != record.placed
    other = replace(sharded, records=(replace(record, placed=placed),))
    with pytest.raises(DistIRError):
        check_model(made.imported.module, other)


def test_a_gradient_is_that_of_the_loss() -> None:
    """A step with the gradient of one weight for another is refused, although both have the same type."""
    made = plan("tensor")
    text = print_module(made.modules["sharded"])
    first, second = (re.search(rf"%blocks\.{i}\.up\.weight\.new: [^\n]*", text) for i in (0, 1))
    assert first is not None
    assert second is not None
    grads = [re.findall(r"%[\w.]+", line[0])[2] for line in (first, second)]
    swapped = first[0].replace(grads[0], grads[1])
    other = text.replace(first[0], swapped)
    with pytest.raises(VerificationError, match=r"'blocks\.0\.up\.weight.*the model does not do %blocks\.0\.up"):
        check_model(made.imported.module, replace(parse(other), records=made.modules["sharded"].records))


def test_plans_are_proved_when_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).eval(), torch.randn(4, 5)
    monkeypatch.setenv("DISTIR_CHECK", "1")
    made = dr.compile(model, (x,), strategy="1/2/1/1")
    assert made.proof is not None
    assert [len(ops) for ops in made.proof.statements.values()] == [0, 0, 0, 0]
    assert dr.compile(model, (x,), strategy="1/2/1/1", check=False).proof is None
    assert step("1/1/1/1").proof is None
    trained = step("1/1/1/2", check=True).proof
    assert trained is not None
    assert "its gradients and its microbatches" in trained.summary


def test_a_plan_that_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*modules: object) -> None:
        raise Refuted("an op is none of the model's", "m.py:3", "", SCHEDULE)

    monkeypatch.setattr("distir_relax.compiler.compile.prove", refuse)
    monkeypatch.setenv("DISTIR_CHECK", "1")
    model, x = nn.Linear(5, 7).eval(), torch.randn(4, 5)
    for options in ({}, {"check": True}):
        with pytest.raises(VerificationError, match=r"m\.py:3: an op is none of the model's") as found:
            dr.compile(model, (x,), strategy="1/2/1/1", **options)
        assert "check=False" in str(found.value)
        assert "shows a difference" in found.value.message
    assert dr.compile(model, (x,), strategy="1/2/1/1", check=False).proof is None


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTIR_CHECK", "1")
    (tmp_path / "m.py").write_text(
        "import torch\n\ndef model():\n    return torch.nn.Linear(5, 7).eval(), (torch.randn(4, 5),)\n", "utf-8"
    )
    run = CliRunner()
    compiled = run.invoke(
        app, ["compile", f"{tmp_path / 'm.py'}:model", "-o", str(tmp_path / "m.dist"), "--strategy", "1/2/1/1"]
    )
    assert "the ranks' programs compute the model\n" in compiled.output
    done = run.invoke(app, ["check", str(tmp_path / "m.dist")])
    assert done.exit_code == 0, done.output
    assert "computes the model model.txt" in done.output
    skipped = run.invoke(
        app,
        ["compile", f"{tmp_path / 'm.py'}:model", "-o", str(tmp_path / "n.dist"), "--mesh", "2", "--no-check"],
    )
    assert "proved" not in skipped.output


def test_all_statements_hold() -> None:
    made = plan("pipeline")
    modules = made.modules
    proof = prove(modules["ranked"], modules["distributed"], modules["sharded"], made.imported.module)
    assert list(map(len, proof.statements.values())) == [0, 0, 0, 0]
    assert len(proof.lines) == 4
