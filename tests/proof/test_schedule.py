"""Schedules against their sharded programs: what the compiler makes is right, mistakes are found and named."""

from __future__ import annotations

import re

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.interpret.distributed_executor import execute
from distir_relax.ir import Module, TensorType, parse, print_module, verify
from distir_relax.ir.symbols import at_sizes
from distir_relax.layout import DeviceMesh, assuming
from distir_relax.ops import Builder, check
from distir_relax.proof import check_schedule
from tests.compiled import compiled
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
    check_schedule(modules["sharded"], modules["distributed"])


@pytest.mark.drawn(1)
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
    "a term of a sum twice": (
        "training, deterministic", r"ordered_sum\(%([\w.]+), %[\w.]+", r"ordered_sum(%\1, %\1", "not each there once",
    ),
    "rows for other experts": (
        "training, experts", r"groups=\(\(0, 2\), \(2, 4\)", "groups=((0, 1), (1, 4)", "the rows of other groups",
    ),
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


def test_the_order_of_repeated_elements() -> None:
    """Devices have one copy each of all elements: gathered, these are in another order."""
    g = Builder()
    x = g.input("x", TensorType((3, 1), "float64"))
    cut = g.emit("annotate_sharding", g.emit("broadcast_to", x, shape=(3, 2)), placements="S[1: 1|1]")
    whole = g.emit("annotate_sharding", g.emit("reshape", cut, shape=(6,)), placements="R")
    mesh = DeviceMesh((2,), ("tp",))
    stages = compiled(Module("global", (g.function("main", [("y", whole)]),), (mesh,)))
    assert problem(stages["sharded"], stages["distributed"]) == ""
    text = print_module(stages["distributed"])
    gathered, reordered = re.findall(r"%([\w.]+): f64\[6\][^\n]* = (?:all_gather|slices)", text)
    wrong = parse(text.replace(f'"y": %{reordered}', f'"y": %{gathered}'))
    assert "the schedule gives other parts" in problem(stages["sharded"], wrong)


@pytest.mark.parametrize("number", [0, 1])
def test_terms_that_are_not_zero(number: int) -> None:
    """One device has the tensor, as a term of sums along two axes: zeros are added for the others twice."""
    g = Builder()
    x = g.input("x", TensorType((5,), "float64"))
    terms = g.emit("annotate_sharding", x, placements="I[sum], I[sum]")
    whole = g.emit("annotate_sharding", terms, placements="R, R")
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    stages = compiled(Module("global", (g.function("main", [("y", whole)]),), (mesh,)))
    assert problem(stages["sharded"], stages["distributed"]) == ""
    parts = print_module(stages["distributed"]).split("value=0.0")
    assert len(parts) == 3
    values = ["value=1.0" if place == number else "value=0.0" for place in (0, 1)]
    wrong = parts[0] + values[0] + parts[1] + values[1] + parts[2]
    assert "no term of a sum" in problem(stages["sharded"], parse(wrong))


def test_padding_where_no_element_is() -> None:
    """Devices without elements add zeros along one dim, and the padding of a maximum along another."""
    g = Builder()
    x = g.input("x", TensorType((3, 2, 2), "float64"))
    terms = g.emit("annotate_sharding", x, placements="S[1: 0|0|2], I[sum], I[sum]")
    greatest = g.emit("max", terms, axis=(0, 1, 2), keepdims=True)
    turned = g.emit("reshape", x, shape=(6, 2))
    mesh = DeviceMesh((3, 1, 2), ("dp", "pp", "tp"))
    function = g.function("main", [("y", greatest), ("z", turned)])
    stages = compiled(Module("global", (function,), (mesh,)))
    check_schedule(stages["sharded"], stages["distributed"])
    text = print_module(stages["distributed"])
    assert "value=-inf" in text
    assert "value=0.0" in text
    for before, after in (("value=-inf", "value=0.0"), ("value=0.0", "value=1.0")):
        assert problem(stages["sharded"], parse(text.replace(before, after)))


def test_an_op_with_other_numbers_of_results() -> None:
    """It is none of the model's, whatever its results are."""
    g = Builder()
    x = g.emit("annotate_sharding", g.input("x", TensorType((4, 5), "float32")), placements="S[0]")
    first, _ = g.emit("split", x, sizes=(3, 2), axis=1)
    stages = compiled(Module("global", (g.function("main", [("y", first)]),), (DeviceMesh((2,), ("tp",)),)))
    text = print_module(stages["distributed"])
    for sizes in ("(3, 1, 1)", "(1, 1, 3)"):
        rows = sizes.strip("()").split(", ")
        changed, count = re.subn(
            r"(%[\w.]+: f32)\[2,3\]( @ \{0,1\}), (%[\w.]+: f32)\[2,2\]( @ \{0,1\}) = split(.*)sizes=\(3, 2\)",
            rf"\1[2,{rows[0]}]\2, \3[2,{rows[1]}]\4, %third: f32[2,{rows[2]}]\4 = split\5sizes={sizes}",
            text,
        )
        assert count == 1, text
        with pytest.raises(VerificationError, match="the schedule gives another value as the output 'y'"):
            check_schedule(stages["sharded"], parse(changed))


@pytest.mark.parametrize("ranks", [1, 3])
def test_windows_of_which_a_device_has_all(ranks: int) -> None:
    """On one device the rows are cut into one part, which is a window's attribute; the columns are not cut."""
    plan = dr.compile(Pooled(), (torch.randn(7, 6),), mesh=ranks, shardings={"x": "S[0]"}, check=True)
    assert plan.proof is not None


class Pooled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_max_pool2d(x[None, None], (3, 4))
