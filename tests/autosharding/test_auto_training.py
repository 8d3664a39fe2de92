"""Steps of training laid out by optimisation, alone and inside of strategies: right, as foreseen, and faster."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.autosharding.autoshard import build_graph
from distir_relax.autosharding.integer_program import solution_seconds
from distir_relax.autosharding.optimize import compute_costs
from distir_relax.autosharding.solver import solve
from distir_relax.bundle import read_bundle
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.training import Training, TrainingStep
from distir_relax.errors import DistIRError
from distir_relax.ir import Function, Input, Module, Op, Output, TensorType, Value
from distir_relax.layout import DeviceMesh, Partial
from distir_relax.optimizers import AdamW
from distir_relax.simulation.simulator import simulate_module
from tests.autosharding.test_auto import FAST, Block
from tests.autosharding.test_placements import MACHINE
from tests.machines import link, machine
from tests.runtime.processes import python


def training(count: int = 2, batch: int = 7) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count)))
    example = torch.randn(batch, 11, 60), torch.randn(batch, 11, 60)
    return Training(model, nn.functional.mse_loss, AdamW(1e-3), example, clip_norm=1.0)


def assert_trains(given: Training, step: TrainingStep) -> None:
    """Two steps change the loss and the parameters as they do on one device."""
    alone = given.compile(strategy="1/1/1/1")
    batches = [tuple(torch.randn_like(tensor) for tensor in given.example_batch) for _ in range(2)]
    assert [step(*b) for b in batches] == pytest.approx([alone(*b) for b in batches], rel=1e-5)
    expected = alone.parameters()
    for name, found in step.parameters().items():
        # Adam divides by the root of squares: a gradient of nearly nothing moves a weight by the whole rate.
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=2e-4)


def makespan(step: TrainingStep) -> float:
    return simulate_module(step.plan.modules["distributed"], FAST).makespan


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", [3, (2, 3)])
def test_a_step_is_faster_than_by_rules_and_right(mesh: int | tuple[int, ...]) -> None:
    given = training()
    step = given.compile(mesh=mesh, shardings="auto", profile=FAST, verify=True)
    rules = ["3/1/1/1", "1/3/1/1", "3/1/1/1,zero=2"] if mesh == 3 else ["2/3/1/1", "3/2/1/1,zero=1", "1/6/1/1"]
    assert makespan(step) < min(makespan(given.compile(strategy=rule)) for rule in rules)
    assert_trains(given, step)


def test_a_step_takes_what_was_foreseen() -> None:
    """With collectives in program order, as the integer program counts them."""
    step = training().compile(mesh=(2, 3), shardings="auto", profile=FAST, overlap=0)
    (record,) = (r for r in step.plan.modules["sharded"].records if type(r).__name__ == "Autosharding")
    found = simulate_module(step.plan.modules["distributed"], FAST)
    assert found.makespan == pytest.approx(record.time / 1e12, rel=1e-6)
    assert record.time == pytest.approx(record.bound, rel=1e-4)
    assert found.peak_memory.max() <= record.bytes <= 1.25 * found.peak_memory.max()


@pytest.mark.sweep
def test_states_lie_in_parts_where_memory_is_little() -> None:
    given = training()
    # Sending costs so much that nothing is split where nobody has to.
    slow = replace(FAST, levels=link(1e-3, 1e6))
    free = given.compile(mesh=3, shardings="auto", profile=slow)
    need = float(simulate_module(free.plan.modules["distributed"], slow).peak_memory.max())
    tight = given.compile(mesh=3, shardings="auto", profile=slow, memory=0.6 * need)
    assert simulate_module(tight.plan.modules["distributed"], slow).peak_memory.max() <= 0.6 * need
    assert_trains(given, tight)


@pytest.mark.sweep
def test_layers_are_one_set_of_variables() -> None:
    sizes: list[int] = []
    for count in (2, 5):
        step = training(count).compile(mesh=3, shardings="auto", profile=FAST)
        graph = build_graph(step.plan.modules["global"], step.plan.mesh)
        sizes.append(len(graph.nodes))
    # Sums of squares over all parameters, by which gradients are clipped, are a chain.
    assert sizes[1] - sizes[0] < 4 * 16


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "strategy", ["3/1/1/4", "1/3/2/2", "2/2/1/3", "1/2/3/4,schedule=gpipe", "2/1/2/3,checkpoint=block"]
)
def test_inside_a_strategy(strategy: str) -> None:
    given = training(3, 12)
    step = given.compile(strategy=f"{strategy},placements=auto", profile=FAST, verify=True)
    assert makespan(step) <= makespan(given.compile(strategy=strategy, profile=FAST))
    assert_trains(given, step)


def test_what_is_simulated_is_what_is_compiled() -> None:
    """With many microbatches, of which a simulation has three written out."""
    source = training(2, 14).read(CompileOptions(profile=FAST))
    for text in ("2/1/1/7,placements=auto", "1/2/2/7,placements=auto"):
        mine = source.with_strategy(dr.Strategy.parse(text))
        whole = simulate_module(mine.distributed(), FAST)
        # Of equally good solutions it may be another one.
        assert mine.simulate(FAST).makespan == pytest.approx(whole.makespan, rel=1e-3)


def test_rules_beside_a_search_are_refused() -> None:
    for option in ("zero=1", "sequence_parallel", "experts=data"):
        with pytest.raises(DistIRError, match="placements=auto cannot be combined"):
            dr.Strategy.parse(f"2/2/1/1,{option},placements=auto")
    with pytest.raises(DistIRError, match="placements is rules, auto, found 'best'"):
        dr.Strategy.parse("2/2/1/1,placements=best")


def f32(name: str, *shape: int) -> Value:
    return Value(name, TensorType(shape, "float32"))


def updated(draw: random.Random) -> Module:
    """A weight that is used, and updated in place by what that gave."""
    rows, width = draw.choice((3, 5, 7, 12)), draw.choice((3, 5, 7, 12))
    x, w, y = f32("x", rows, width), f32("w", width, width), f32("y", rows, width)
    g, new = f32("g", width, width), f32("new", width, width)
    ops = [Op("linear", (x, w), (y,))]
    ops.append(Op("linear_weight_grad", (y, x), (g,), {}))
    ops.append(Op("assign", (w, g), (new,)))
    inputs = (Input(x, "input"), Input(w, "parameter"))
    return Module("global", (Function("main", inputs, tuple(ops), (Output("y", y), Output("w.new", new))),))


@pytest.mark.parametrize("mesh", [(2,), (3,), (5,)])
def test_updates_in_place_are_as_good_as_can_be(mesh: tuple[int, ...]) -> None:
    for seed in range(4):
        graph = build_graph(updated(random.Random(seed)), DeviceMesh(mesh, ("a",)))
        costs = compute_costs(graph, MACHINE)
        every = itertools.product(*(range(len(node.strategies)) for node in graph.nodes))
        times = [solution_seconds(graph, costs, chosen) for chosen in every]
        assert math.inf in times, "what is updated cannot be moved"
        assert solve(graph, costs).seconds == pytest.approx(min(times), rel=1e-9)


@pytest.mark.sweep
def test_a_sum_is_made_once() -> None:
    """Two products over a split dim are added before they are reduced, where reducing is dear."""
    x, y = f32("x", 35, 127), f32("y", 35, 127)
    v, w = f32("v", 9, 127), f32("w", 9, 127)
    a, b, c = f32("a", 35, 9), f32("b", 35, 9), f32("c", 35, 9)
    ops = (Op("linear", (x, v), (a,)), Op("linear", (y, w), (b,)), Op("add", (a, b), (c,)))
    inputs = tuple(Input(value, "parameter") for value in (x, y, v, w))
    graph = build_graph(Module("global", (Function("main", inputs, ops, (Output("c", c),)),)), DeviceMesh((3,), ("a",)))
    slow = replace(machine(3, link(1e-6, 1e11), flops=1e9), bandwidth=1e10)
    costs = compute_costs(graph, slow)
    found = solve(graph, costs)
    every = itertools.product(*(range(len(node.strategies)) for node in graph.nodes))
    assert found.seconds == pytest.approx(min(solution_seconds(graph, costs, chosen) for chosen in every), rel=1e-9)
    pending = [
        node.strategies[way].final_layouts[0] == (Partial("sum"),)
        for node, way in zip(graph.nodes, found.chosen, strict=True)
    ]
    assert sum(pending) in (0, 2)
    assert any(way.final_layouts[0] == (Partial("sum"),) for node in graph.nodes for way in node.strategies)


@pytest.mark.sweep
def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\nimport distir_relax as dr\n\ndef build():\n"
        "    model = nn.Sequential(nn.Linear(64, 127), nn.ReLU(), nn.Linear(127, 10))\n"
        "    example = torch.randn(15, 64), torch.randn(15, 10)\n"
        "    return dr.Training(model, nn.functional.mse_loss, example_batch=example)\n"
    )
    done = python(
        "-m", "distir_relax", "compile", f"{tmp_path / 'm.py'}:build", "-o", tmp_path / "m.dist", "--train",
        "--mesh", "3", "--auto", "--profile", "dgx-h100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "placements found for dgx-h100" in done.stdout
    assert read_bundle(tmp_path / "m.dist").manifest.training is not None
