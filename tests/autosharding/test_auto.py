"""`shardings="auto"`: what is compiled runs as the model does, costs what was foreseen, and keeps to what is asked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.autoshard import build_graph
from distir_relax.autosharding.optimize import cost_table_of, optimize
from distir_relax.bundle import read_bundle
from distir_relax.cost.profile import Profile
from distir_relax.errors import AnnotationError, DistIRError
from distir_relax.simulation.simulator import simulate_module
from tests.machines import link, machine
from tests.runtime.processes import python

FAST = replace(machine(8, link(1e-6, 1e11), flops=1e11), bandwidth=1e10, overhead=1e-6)


class Block(nn.Module):
    """Attention and a feed-forward of odd sizes."""

    def __init__(self, width: int = 60, heads: int = 5, hidden: int = 127) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        y = self.norm(x)
        q, k, v = (part(y).view(rows, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(x)))


def model_and_input(count: int = 3) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).eval(), torch.randn(7, 11, 60)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("mesh", [3, 5, (2, 3), (2, 2, 2)])
def test_ranks_compute_what_the_model_does(mesh: int | tuple[int, ...]) -> None:
    model, x = model_and_input(2)
    plan = dr.compile(model, (x,), mesh=mesh, shardings="auto", profile=FAST, verify=True)
    assert "S[" in plan.text("sharded"), "something is split"
    torch.testing.assert_close(plan(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [(3,), (2, 3)])
def test_the_compiled_program_takes_what_was_foreseen(mesh: tuple[int, ...]) -> None:
    model, x = model_and_input()
    plan = dr.compile(model, (x,), mesh=mesh, shardings="auto", profile=FAST)
    graph = build_graph(plan.modules["global"], plan.mesh)
    found = optimize(graph, cost_table_of(graph, FAST), FAST.memory)
    simulated = simulate_module(plan.modules["distributed"], FAST)
    assert simulated.makespan == pytest.approx(found.seconds, rel=1e-9)
    assert found.gap <= 1e-3
    assert simulated.peak_memory.max() <= found.bytes <= 1.1 * simulated.peak_memory.max()


def test_blocks_are_one_set_of_variables() -> None:
    sizes: list[int] = []
    for count in (2, 6):
        model, x = model_and_input(count)
        plan = dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST)
        graph = build_graph(plan.modules["global"], plan.mesh)
        sizes.append(sum(node.op is not None for node in graph.nodes))
    assert sizes[0] == sizes[1]


def test_no_other_way_to_shard_is_faster() -> None:
    model, x = model_and_input()

    def seconds(**options: object) -> float:
        plan = dr.compile(model, (x,), profile=FAST, **options)  # type: ignore[arg-type]
        return simulate_module(plan.modules["distributed"], FAST).makespan

    best = seconds(mesh=3, shardings="auto")
    assert best <= min(seconds(strategy="3/1/1/1"), seconds(strategy="1/3/1/1"), seconds(strategy="1/1/1/1"))


def test_annotations_are_kept() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(60, 127), nn.Linear(127, 60)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = dr.annotate_sharding(self.up(x), dr.DeviceMesh((2,), ("tp",)), "S[2: 100|27]")
            return self.down(torch.relu(hidden))

    model, x = Marked().eval(), torch.randn(7, 11, 60)
    plan = dr.compile(model, (x,), mesh=2, shardings="auto", profile=FAST)
    assert re.search(r"%linear\S*: R.DTensor\(\(7, 11, 127\).*S\[2: 100\|27\]", plan.text("sharded"))
    torch.testing.assert_close(plan(x), model(x), rtol=1e-4, atol=1e-5)


def peak(plan: dr.Plan, profile: Profile = FAST) -> float:
    return float(simulate_module(plan.modules["distributed"], profile).peak_memory.max())


def test_memory_is_a_limit() -> None:
    model, x = model_and_input()
    # Sending costs so much that nothing is split where nobody has to.
    slow = replace(FAST, levels=link(1e-3, 1e6))
    free = dr.compile(model, (x,), mesh=3, shardings="auto", profile=slow)
    limit = 0.6 * peak(free, slow)
    tight = dr.compile(model, (x,), mesh=3, shardings="auto", profile=slow, memory=limit)
    assert peak(tight, slow) <= limit
    torch.testing.assert_close(tight(x), model(x), rtol=1e-4, atol=1e-5)
    of_machine = dr.compile(model, (x,), mesh=3, shardings="auto", profile=replace(slow, memory=limit))
    assert peak(of_machine, slow) <= limit


def test_what_does_not_fit_says_what_would() -> None:
    model, x = model_and_input()
    with pytest.raises(DistIRError, match=r"the minimum is .* at .* of %") as raised:
        dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST, memory=1000.0)
    found = re.search(r"memory=(\d+)", raised.value.hint)
    assert found is not None
    least = float(found[1])
    plan = dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST, memory=1.001 * least)
    # The copy of a gather along an inner dim comes on top.
    assert peak(plan) <= 1.02 * least
    with pytest.raises(DistIRError, match="the minimum is"):
        dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST, memory=0.98 * least)


def test_what_it_cannot_be_asked_for() -> None:
    model, x = model_and_input(1)
    with pytest.raises(AnnotationError, match="expected a mesh"):
        dr.compile(model, (x,), shardings="auto")
    with pytest.raises(AnnotationError, match="found also the strategy 1/2/1/1"):
        dr.compile(model, (x,), shardings="auto", strategy="1/2/1/1")
    with pytest.raises(AnnotationError, match="found 'best'"):
        dr.compile(model, (x,), shardings="best", mesh=2)  # type: ignore[arg-type]
    with pytest.raises(AnnotationError, match="memory limits a search"):
        dr.compile(model, (x,), memory=1e9, mesh=1)


def test_the_pass_stands_in_the_place_of_propagation() -> None:
    model, x = model_and_input(1)
    seen: list[str] = []
    dr.compile(
        model, (x,), mesh=2, shardings="auto", profile=FAST,
        passes=lambda passes: [seen.append(type(p).__name__) or p for p in passes],
    )  # fmt: skip
    assert PlaceBySearch.__name__ in seen
    assert "Propagate" not in seen


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n"
        "    return nn.Sequential(nn.Linear(64, 127), nn.ReLU(), nn.Linear(127, 10)).eval(), (torch.randn(5, 64),)\n"
    )
    base = ("-m", "distir_relax", "compile", f"{tmp_path / 'm.py'}:build", "-o", tmp_path / "m.dist", "--mesh", "3")
    done = python(*base, "--auto", "--profile", "dgx-h100")
    assert done.returncode == 0, done.stderr
    assert re.search(r"placements found for dgx-h100: .* a step, at most 0\.0\d% from the best there are", done.stdout)
    assert read_bundle(tmp_path / "m.dist").records.count('"record": "searched"') == 1
    both = python(*base, "--auto", "--shard", "0.weight=S[0]")
    assert both.returncode == 2
    assert "either --auto or --shard" in both.stderr


def test_the_smallest_conflict_is_named() -> None:
    """Of three marks one keeps a large weight whole on every device; the others are harmless."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(60, 1270), nn.Linear(1270, 60)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mesh = dr.DeviceMesh((3,), ("tp",))
            weight = dr.annotate_sharding(self.up.weight, mesh, "R")
            hidden = torch.relu(nn.functional.linear(dr.annotate_sharding(x, mesh, "R"), weight, self.up.bias))
            return dr.annotate_sharding(self.down(hidden), mesh, "R")

    model, x = Marked().eval(), torch.randn(7, 60)
    free = dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST)
    # The weight is 305 kB; a third of it has room, beside a third of the other.
    assert peak(free) > 305e3
    with pytest.raises(DistIRError, match=r"no placements with annotation R on %\S*up\S* fit in 280 kB") as raised:
        dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST, memory=280e3)
    assert "and the mark" not in raised.value.message
    found = re.search(r"memory=(\d+)", raised.value.hint)
    assert found is not None
    dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST, memory=1.001 * float(found[1]))
