"""Schedules against their sharded programs: what the compiler makes is right, mistakes are found and named."""

from __future__ import annotations

import re

import pytest
import torch

from distir_relax.analysis.distributed_executor import execute
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import Module, parse, print_module, verify
from distir_relax.ir.symbols import at_sizes
from distir_relax.layout import assuming
from distir_relax.ops import check
from distir_relax.proof import check_schedule
from tests.proof.rank_mutants import mutants
from tests.proof.test_projection import PLANS, plan


def problem(sharded: Module, schedule: Module) -> str:
    """The error of a check of another schedule; empty if none is found."""
    try:
        with assuming(schedule.guards):
            verify(schedule, check)
            check_schedule(sharded, schedule)
    except DistIRError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", PLANS)
def test_what_the_compiler_makes_is_right(name: str) -> None:
    modules = plan(name).modules
    assert check_schedule(modules["sharded"], modules["distributed"]) == []


@pytest.mark.parametrize("name", PLANS)
def test_mistakes_are_found(name: str) -> None:
    """A change that is not found changes no output: it takes an equal value, or other padding that nothing reads."""
    modules = plan(name).modules
    sharded, schedule = modules["sharded"], modules["distributed"]
    found = 0
    for kind, module in mutants(schedule, 30, seed=11):
        # Another order of communications that do not depend on each other is no mistake of a schedule.
        if kind != "reorder" and problem(sharded, module) == "":
            for output, expected in results(sharded, schedule).items():
                torch.testing.assert_close(results(sharded, module)[output], expected, msg=f"{kind}, {output}")
        else:
            found += 1
    assert found >= 25


def results(sharded: Module, schedule: Module) -> dict[str, torch.Tensor]:
    """What the devices of a schedule compute from random inputs."""
    sharded, schedule = at_sizes(sharded, {}), at_sizes(schedule, {})
    draw = torch.Generator().manual_seed(5)
    inputs = {}
    for item in sharded.main.inputs:
        kind = item.value.dtensor
        dtype = getattr(torch, kind.dtype)
        numbers = torch.rand(kind.shape, generator=draw)
        inputs[item.value.name] = numbers.to(dtype) if dtype.is_floating_point else (3 * numbers).to(dtype)
    return execute(sharded, schedule, inputs)


MISTAKES = {
    "no sum": ("tensor", r"= all_reduce\(%([\w.]+)\)[^\n]*", r"= abs(%\1)", "which is not the model's op on its parts"),
    "a maximum for a sum": ("tensor", r'op="sum"', 'op="max"', "reduces by max .* a term of a pending sum"),
    "another shard": (
        "training, ZeRO", r"all_gather(.*)sizes=\((\d+), (\d+), (\d+)\)", r"all_gather\1sizes=(\3, \2, \4)",
        "the devices have",
    ),
    "a halo one row later": ("halos", r"begin=\(0,\), end=\(1,\)", "begin=(1,), end=(2,)", "has other elements"),
    "padding that is not neutral": ("tensor, padded", r"value=0\.0", "value=1.0", "padding is reduced"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_wrong_op_is_named(name: str) -> None:
    made, pattern, replacement, message = MISTAKES[name]
    modules = plan(made).modules
    text = print_module(modules["distributed"])
    changed = re.sub(pattern, replacement, text)
    assert changed != text
    assert re.search(message, problem(modules["sharded"], parse(changed)))


def test_a_schedule_of_another_plan() -> None:
    with pytest.raises(VerificationError, match=r"compile the model again: distir\.txt does not compute"):
        check_schedule(plan("tensor").modules["sharded"], plan("halos").modules["distributed"])
