"""Every placement to every other: the plan's cost, and that it moves the right numbers, on uneven meshes."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest
import torch

from distir_relax.interpret import assemble, run_devices, scatter
from distir_relax.ir import (
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    Value,
    parse,
    print_module,
    verify,
)
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, R, Segment, Shard
from distir_relax.layout.partition import refine_cut
from distir_relax.lowering import Project, ToDistIR
from distir_relax.ops import Trait, check, lookup
from distir_relax.sharding import bytes_sent, cost, plan, plan_bytes, transition_cost

SHAPE = (7, 12, 5)
SUM = Partial("sum")


def shards(ranks: int) -> list[Placement]:
    """Uneven, empty and interleaved ways to split a tensor of `SHAPE`."""
    sizes = {2: [(7, 0), (5, 7), (1, 4)], 3: [(3, 3, 1), (5, 0, 7), (2, 2, 1)]}[ranks]
    found: list[Placement] = [R]
    found += [Shard(dim, Cut.of(*s)) for dim, s in enumerate(sizes)]
    stretches = {2: (3, 1), 3: (2, 1, 1)}[ranks]
    return [*found, Shard(1, Cut((Segment(3, stretches),)))]


def move(
    source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: DeviceMesh, tail: str, shape: tuple[int, ...]
) -> None:
    """Redistribute a tensor of whole numbers, so that sums of terms are exact."""
    x = Value("x", DTensorType(shape, "float64", source))
    y = Value("y", DTensorType(shape, "float64", target))
    op = Op("redistribute", (x,), (y,), {"placements": target})
    module = Module("sharded", (Function("main", (Input(x),), (op,), (Output("y", y),)),), (mesh,))
    verify(module, check)
    distributed = ToDistIR(tail).run(module)
    verify(distributed, check)
    data = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(1)).double()
    found = run_devices(distributed, {"x": scatter(data, x.type, mesh)})["y"]
    assert torch.equal(assemble(found, y.type, mesh), data)


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_axis(ranks: int, tail: str) -> None:
    ends = [*shards(ranks), *map(Partial, ("sum", "mean", "max", "min"))]
    for source, target in itertools.product(ends, repeat=2):
        move((source,), (target,), DeviceMesh((ranks,), ("tp",)), tail, SHAPE)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_two_axes(tail: str) -> None:
    """All pairs; where both axes cut one dim, a device holds what both leave it."""
    layouts = list(itertools.product([*shards(2), SUM], [*shards(3), SUM]))
    pairs = list(itertools.product(layouts, repeat=2))
    for source, target in random.Random(0).sample(pairs, len(pairs) // 2):
        move(source, target, DeviceMesh((2, 3), ("dp", "tp")), tail, SHAPE)


def nested(codes: tuple[object, ...], shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """Placements from R, I and dims to split; axes that cut one dim cut it one within the other."""
    found: list[Placement] = []
    for code, n in zip(codes, mesh, strict=True):
        if isinstance(code, int):
            others = [p.cut for p in found if isinstance(p, Shard) and p.dim == code and p.cut]
            found.append(Shard(code, refine_cut(shape[code], others, n)))
        else:
            found.append(R if code == "R" else SUM)
    return tuple(found)


CODES = ("R", "I", 0, 1, 2)


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_three_axes(tail: str) -> None:
    shape, mesh = (7, 6, 9), DeviceMesh((2, 2, 2), ("dp", "pp", "tp"))
    layouts = [nested(codes, shape, mesh.shape) for codes in itertools.product(CODES, repeat=3)]
    pairs = list(itertools.product(layouts, repeat=2))
    for source, target in random.Random(tail).sample(pairs, 700):
        move(source, target, mesh, tail, shape)


@pytest.mark.parametrize("target", [(SUM, R), (SUM, Partial("max")), (R, SUM)])
def test_a_scalar(target: tuple[Placement, ...]) -> None:
    for source in itertools.product((R, SUM, Partial("mean")), repeat=2):
        move(source, target, DeviceMesh((2, 3), ("dp", "tp")), "ragged", ())


def test_a_dim_cut_by_two_axes_travels_as_text_and_to_ranks() -> None:
    """Sizes that differ by device within one op survive printing, parsing and projection."""
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    source, target = nested((0, 0), (11, 4), mesh.shape), nested(("R", 0), (11, 4), mesh.shape)
    x = Value("x", DTensorType((11, 4), "float32", source))
    y = Value("y", DTensorType((11, 4), "float32", target))
    op = Op("redistribute", (x,), (y,), {"placements": target})
    module = Module("sharded", (Function("main", (Input(x),), (op,), (Output("y", y),)),), (mesh,))
    distributed = ToDistIR().run(module)
    ranked = Project().run(distributed)
    for program in (module, distributed, ranked):
        verify(program, check)
        assert parse(print_module(program)) == program
    names = [op.name for op in distributed.main.ops if Trait.COMMUNICATES in lookup(op.name).traits]
    assert names == ["resplit", "all_gather"]


def edges(
    at: tuple[Placement, ...], known: list[list[Placement]], mesh: tuple[int, ...]
) -> list[tuple[tuple[Placement, ...], float]]:
    """Every single step from `at`, with what each device sends for a tensor of one byte."""
    held = 1.0
    for placement, n in zip(at, mesh, strict=True):
        held /= n if isinstance(placement, Shard) else 1
    found = []
    for axis, options in enumerate(known):
        have = at[axis]
        for want in options:
            if want != have and not (have == R and want == SUM):  # R to S to I is R to I
                found.append(((*at[:axis], want, *at[axis + 1 :]), transition_cost(have, want, mesh[axis], held)))
    return found


def least(source: tuple[Placement, ...], known: list[list[Placement]], mesh: tuple[int, ...]) -> dict[object, float]:
    """The fewest bytes from `source` to every layout, by Dijkstra's search over all steps."""
    best: dict[object, float] = {source: 0.0}
    queue: list[tuple[float, int, tuple[Placement, ...]]] = [(0.0, 0, source)]
    count = 0
    while queue:
        sent, _, at = heapq.heappop(queue)
        if sent > best[at]:
            continue
        for layout, more in edges(at, known, mesh):
            if sent + more < best.get(layout, math.inf) - 1e-12:
                best[layout], count = sent + more, count + 1
                heapq.heappush(queue, (sent + more, count, layout))
    return best


@pytest.mark.parametrize("mesh", [(2, 2), (4, 8), (2, 2, 2), (3, 2, 5)])
def test_no_plan_sends_fewer_bytes(mesh: tuple[int, ...]) -> None:
    """Against a search over all paths through all layouts, dims split by several axes included."""
    shape = (240, 240, 240)
    layouts = [nested(codes, shape, mesh) for codes in itertools.product(CODES, repeat=len(mesh))]
    known = [list(dict.fromkeys(layout[axis] for layout in layouts)) for axis in range(len(mesh))]
    whole = DeviceMesh(mesh)
    chosen = layouts if len(mesh) == 2 else random.Random(0).sample(layouts, 12)
    for source in chosen:
        best = least(source, known, mesh)
        kind = DTensorType(shape, "int8", source)
        for target in layouts:
            found = bytes_sent(kind, DTensorType(shape, "int8", target), whole)
            assert found == pytest.approx(best[target] * kind.tensor.bytes), (source, target)


def test_a_plan_leads_from_its_source_to_its_target() -> None:
    mesh, shape = (2, 2, 2), (16, 16, 16)
    layouts = [nested(codes, shape, mesh) for codes in itertools.product(CODES, repeat=3)]
    for source, target in random.Random(5).sample(list(itertools.product(layouts, repeat=2)), 2000):
        at = list(source)
        for step in plan(DTensorType(shape, "int8", source), DTensorType(shape, "int8", target), DeviceMesh(mesh)):
            assert at[step.axis] == step.source
            at[step.axis] = step.target
        assert tuple(at) == target


def test_replicas_reduce_a_part_each() -> None:
    """Along an axis of replicas nothing has to be sent, yet splitting there makes the reduction cheaper."""
    mesh = DeviceMesh((2, 8), ("dp", "tp"))
    source = DTensorType((64, 64), "float32", (R, SUM))
    target = DTensorType((64, 64), "float32", (R, R))
    steps = plan(source, target, mesh)
    assert [step.axis for step in steps] == [0, 1, 0]
    assert plan_bytes(steps, source, mesh) == pytest.approx(source.tensor.bytes * (7 / 8 + 1 / 2))


def test_what_is_too_small_to_split_is_reduced_whole() -> None:
    mesh = DeviceMesh((4, 8), ("dp", "tp"))
    steps = plan(DTensorType((3,), "float32", (R, SUM)), DTensorType((3,), "float32", (R, R)), mesh)
    assert [(step.axis, step.source, step.target) for step in steps] == [(1, SUM, R)]


def test_costs_are_those_of_ring_algorithms() -> None:
    whole, half = R, Shard(0, Cut.of(2, 2, 2))
    assert cost(whole, half, 3, 90) == 0
    assert cost(half, whole, 3, 90) == pytest.approx(60)
    assert cost(SUM, whole, 3, 90) == pytest.approx(120)
    assert cost(SUM, half, 3, 90) == pytest.approx(60)
    assert cost(half, Shard(1, Cut.of(1, 1, 1)), 3, 90) == pytest.approx(20)
    assert cost(half, Shard(0, Cut.of(1, 2, 3)), 3, 90) == pytest.approx(20)
    assert cost(half, SUM, 3, 90) == 0
    assert cost(half, Partial("max"), 3, 90) == pytest.approx(60)
    assert cost(Partial("max"), SUM, 3, 90) == pytest.approx(60)


def test_the_cost_along_one_axis_is_that_of_its_plan() -> None:
    ends = [*shards(3), *map(Partial, ("sum", "mean", "max", "min"))]
    mesh = DeviceMesh((3,), ("tp",))
    for source, target in itertools.product(ends, repeat=2):
        kind, want = DTensorType(SHAPE, "float64", (source,)), DTensorType(SHAPE, "float64", (target,))
        assert cost(source, target, 3, kind.tensor.bytes) == pytest.approx(bytes_sent(kind, want, mesh))


def test_an_axis_of_one_device_needs_nothing() -> None:
    source = DTensorType((4,), "float32", (Shard(0, Cut.of(4)),))
    assert plan(source, DTensorType((4,), "float32", (R,)), DeviceMesh((1,), ("tp",))) == ()
