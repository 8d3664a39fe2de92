"""Every placement to every other: the plan's cost, and that it moves the right numbers, on uneven meshes."""

from __future__ import annotations

import itertools

import pytest
import torch

from distir_relax.analysis import execute
from distir_relax.ir import (
    Cut,
    DeviceMesh,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    Partial,
    Placement,
    R,
    Segment,
    Shard,
    Value,
    print_placements,
    verify,
)
from distir_relax.lowering import ToDistIR
from distir_relax.ops import check
from distir_relax.sharding import cost, plan

SHAPE = (7, 12, 5)


def shards(ranks: int) -> list[Placement]:
    """Uneven, empty and interleaved ways to split a tensor of `SHAPE`."""
    sizes = {2: [(7, 0), (5, 7), (1, 4)], 3: [(3, 3, 1), (5, 0, 7), (2, 2, 1)]}[ranks]
    found: list[Placement] = [R]
    found += [Shard(dim, Cut.of(*s)) for dim, s in enumerate(sizes)]
    stretches = {2: (3, 1), 3: (2, 1, 1)}[ranks]
    return [*found, Shard(1, Cut((Segment(3, stretches),)))]


def move(source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: DeviceMesh, tail: str) -> None:
    x = Value("x", DTensorType(SHAPE, "float64", source))
    y = Value("y", DTensorType(SHAPE, "float64", target))
    op = Op("redistribute", (x,), (y,), {"placements": print_placements(target)})
    module = Module("sharded", (Function("main", (Input(x),), (op,), (Output("y", y),)),), (mesh,))
    verify(module, check)
    distributed = ToDistIR(tail).run(module)
    verify(distributed, check)
    data = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(execute(module, distributed, {"x": data})["y"], data)


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_axis(ranks: int, tail: str) -> None:
    for source, target in itertools.product(shards(ranks), repeat=2):
        move((source,), (target,), DeviceMesh((ranks,), ("tp",)), tail)


def test_two_axes() -> None:
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    layouts = [
        (a, b)
        for a, b in itertools.product(shards(2), shards(3))
        if not (isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim)
    ]
    for source, target in itertools.product(layouts, repeat=2):
        move(source, target, mesh, "ragged")


def test_costs_are_those_of_ring_algorithms() -> None:
    whole, half = R, Shard(0, Cut.of(2, 2, 2))
    assert cost(whole, half, 3, 90) == 0
    assert cost(half, whole, 3, 90) == pytest.approx(60)
    assert cost(Partial("sum"), whole, 3, 90) == pytest.approx(120)
    assert cost(Partial("sum"), half, 3, 90) == pytest.approx(60)
    assert cost(half, Shard(1, Cut.of(1, 1, 1)), 3, 90) == pytest.approx(20)


def test_an_axis_of_one_device_needs_nothing() -> None:
    source = DTensorType((4,), "float32", (Shard(0, Cut.of(4)),))
    assert plan(source, DTensorType((4,), "float32", (R,)), DeviceMesh((1,), ("tp",))) == ()
