"""Ranks' programs against their schedule: what the compiler makes is right, mistakes are found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle, write_bundle
from distir_relax.cli import app
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import parse, print_module, verify
from distir_relax.layout import assuming
from distir_relax.ops import TABLE, check, lookup
from distir_relax.proof import check_projection
from tests.proof.rank_mutants import mutants
from tests.strategies import test_expert_parallel as experts
from tests.test_generation import compiled
from tests.training import perceptron
from tests.training import test_deterministic as deterministic


class Block(nn.Module):
    """A norm, a gated product, a residual sum: ops that ranks fuse and join."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(12)
        self.gate, self.up, self.down = nn.Linear(12, 21), nn.Linear(12, 21), nn.Linear(21, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    """Three of them, with a convolution before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


def blocks(strategy: str, **options: Any) -> dr.Plan:
    torch.manual_seed(0)
    return dr.compile(Blocks().eval(), (torch.randn(6, 11, 12),), strategy=strategy, name="blocks", **options)


def halos() -> dr.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 3, 5, padding=2)).eval()
    spec = {"input": "S[2: 9|3|5]"}
    return dr.compile(model, (torch.randn(2, 3, 17),), mesh=3, shardings=spec, name="halos")


class Memory(nn.Module):
    """Attention to a memory, whose positions are sharded."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, memory, memory).square()


def split_keys() -> dr.Plan:
    x, memory = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    return dr.compile(Memory(), (x, memory), mesh=3, shardings={"memory": "S[2]"})


PLANS: dict[str, Callable[[], dr.Plan]] = {
    "tensor": lambda: blocks("1/3/1/1"),
    "tensor, padded": lambda: blocks("1/2/1/1", tail="pad"),
    "data": lambda: blocks("3/1/1/1"),
    "pipeline": lambda: blocks("1/1/3/3"),
    "all": lambda: blocks("2/2/2/3"),
    "halos": halos,
    "split keys": split_keys,
    "training, ZeRO": lambda: perceptron.step("3/1/1/2,zero=3").plan,
    "training, tensor": lambda: perceptron.step("1/2/1/1").plan,
    "training, pipeline": lambda: perceptron.step("1/1/2/3").plan,
    "training, deterministic": lambda: deterministic.compiled(3).plan,
    "training, experts": lambda: experts.compiled(experts.mixtral(layers=1), strategy="3/1/1/1,experts=data").plan,
    "generation": lambda: compiled("gpt2", "1/2/1/1").plan,
    "generation, pipeline": lambda: compiled("gpt2", "1/2/2/1").plan,
}


@cache
def plan(name: str) -> dr.Plan:
    return PLANS[name]()


def problem(made: dr.Plan, ranked: Any) -> str:
    """The error of a check of a plan with other programs; empty if none is found."""
    try:
        with assuming(ranked.guards):
            verify(ranked, check)
            check_projection(made.modules["distributed"], ranked)
    except DistIRError as error:
        return str(error)
    return ""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", PLANS)
def test_what_the_compiler_makes_is_right(name: str) -> None:
    made = plan(name)
    assert problem(made, made.modules["ranked"]) == ""


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", PLANS)
def test_mistakes_are_found(name: str) -> None:
    made = plan(name)
    missed = [
        (kind, print_module(module))
        for kind, module in mutants(made.modules["ranked"], 40, seed=7)
        if problem(made, module) == ""
    ]
    assert missed == []


def test_patterns_are_those_of_the_table_now() -> None:
    """A fused op is none of the schedule's once its entry has lost its patterns, also after an earlier check."""
    made = plan("tensor")
    ranked = made.modules["ranked"]
    assert problem(made, ranked) == ""
    names, scheduled = (
        {op.name for function in made.modules[stage].functions for op in function.ops if not op.callee}
        for stage in ("ranked", "distributed")
    )
    entry = next(lookup(name) for name in sorted(names - scheduled) if lookup(name).code.patterns)
    with TABLE.extended():
        TABLE.replace(replace(entry, code=replace(entry.code, patterns=())))
        assert "which it does not in the schedule" in problem(made, ranked)
    assert problem(made, ranked) == ""


def test_the_first_wrong_op_is_named() -> None:
    made = plan("tensor")
    ranked = made.modules["ranked"]
    text = print_module(ranked)
    assert 'op="sum"' in text
    wrong = parse(text.replace('op="sum"', 'op="max"'))
    with pytest.raises(VerificationError, match=r"rank 0 does %.*op=\"max\".* where the schedule has %.*op=\"sum\""):
        check_projection(made.modules["distributed"], wrong)
    other = plan("data").modules["distributed"]
    with pytest.raises(VerificationError, match=r"compile the model again: ranked\.txt is not the projection"):
        check_projection(other, ranked)


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    path = perceptron.step("1/2/1/1", evaluates=True).save(tmp_path / "m.dist", backends=("torch",))
    done = run.invoke(app, ["check", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.count("each program is its rank's part of the schedule") == 2  # the evaluation's, too
    bundle = plan("tensor").bundle(("torch",))
    stale = write_bundle(
        bundle.with_texts({"distir.txt": plan("data").bundle(()).texts["distir.txt"]}), tmp_path / "stale.dist"
    )
    refused = run.invoke(app, ["check", str(stale)])
    assert isinstance(refused.exception, VerificationError)
    assert read_bundle(stale).manifest.name == "blocks"
