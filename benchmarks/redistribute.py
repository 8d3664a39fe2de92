"""Redistribution plans against those of torch's DTensor: bytes that each device sends, and time to plan.

    python benchmarks/redistribute.py

Every pair of placements {R, S[0], S[1], S[2], I[sum]} per mesh axis, for a tensor of three dims. torch plans twice, in
this process and without communication: as it does by default, and with its planner of least cost. The bytes of its
steps are counted as those of ours, with ring algorithms (see `distir_relax.sharding`). Plans are made cold: caches are
emptied before each.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as theirs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

import distir_relax.sharding.reshard_plan as ours
from distir_relax.ir import DTensorType
from distir_relax.layout import DeviceMesh, Placement, R
from distir_relax.layout import Partial as Intermediate
from distir_relax.layout import Shard as Split
from distir_relax.layout.partition import refine_cut

SHAPE = (256, 256, 256)
MESHES = ((2, 2), (4, 8), (2, 2, 2))
CODES = ("R", "I", 0, 1, 2)
PAIRS = {(2, 2): 625, (4, 8): 625, (2, 2, 2): 1000}
"""How many pairs of a mesh are planned; all of them where there are no more."""


@dataclass
class Totals:
    """What one planner did over all pairs: bytes for a tensor of one byte, and seconds, pair by pair."""

    sent: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.seconds) * 1e3


def main() -> None:
    """Print one row for each mesh."""
    warnings.simplefilter("ignore")
    print(
        "| mesh | pairs | torch default: bytes, pairs with more, most | plan "
        "| torch least cost: bytes, pairs with more | plan | ours: plan |"
    )
    print("|---|---|---|---|---|---|---|")
    for mesh in MESHES:
        default, least, own = compare(mesh)
        more = [a / b if b else float("inf") for a, b in zip(default.sent, own.sent, strict=True) if a > b + 1e-9]
        also = sum(a > b + 1e-9 for a, b in zip(least.sent, own.sent, strict=True))
        fewer = sum(b > a + 1e-9 for a, b in zip(least.sent, own.sent, strict=True))
        assert not fewer, f"torch sends fewer bytes on {fewer} pairs"
        finite = [x for x in more if x != float("inf")]
        count = len(own.sent)
        print(
            f"| {'x'.join(map(str, mesh))} | {count} "
            f"| {sum(default.sent) / sum(own.sent):.2f}x, {len(more) / count:.0%}, {max(finite):.0f}x "
            f"| {default.milliseconds:.2f} ms "
            f"| {sum(least.sent) / sum(own.sent):.2f}x, {also / count:.0%} | {least.milliseconds:.2f} ms "
            f"| {own.milliseconds:.3f} ms |"
        )


def compare(mesh: tuple[int, ...]) -> tuple[Totals, Totals, Totals]:
    """torch's default planner, its planner of least cost, and ours, on the pairs of one mesh."""
    layouts = list(itertools.product(CODES, repeat=len(mesh)))
    pairs = list(itertools.product(layouts, repeat=2))
    step = max(1, len(pairs) // PAIRS[mesh])
    default, least, own = Totals(), Totals(), Totals()
    with torch_mesh(mesh) as device_mesh:
        for source, target in pairs[::step]:
            _ours(source, target, mesh, own)
            _theirs(source, target, device_mesh, default, False)
            _theirs(source, target, device_mesh, least, True)
    return default, least, own


@contextlib.contextmanager
def torch_mesh(shape: tuple[int, ...]) -> Iterator[Any]:
    """A mesh of torch's in this one process: rank 0 of a group that sends nothing."""
    size = 1
    for n in shape:
        size *= n
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def _timed(run: Callable[[], Any], totals: Totals) -> Any:
    start = time.perf_counter()
    result = run()
    totals.seconds.append(time.perf_counter() - start)
    return result


def _ours(source: tuple[Any, ...], target: tuple[Any, ...], mesh: tuple[int, ...], totals: Totals) -> None:
    kinds = [DTensorType(SHAPE, "int8", _placements(codes, mesh)) for codes in (source, target)]
    devices = DeviceMesh(mesh)
    ours._plan.cache_clear()
    ours._choose_routes.cache_clear()
    steps = _timed(lambda: ours.plan(kinds[0], kinds[1], devices), totals)
    totals.sent.append(ours.plan_bytes(steps, kinds[0], devices) / kinds[0].tensor.bytes)


def _placements(codes: tuple[Any, ...], mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """As torch cuts: of axes that split one dim each cuts the parts of those before it."""
    found: list[Placement] = []
    for code, n in zip(codes, mesh, strict=True):
        if isinstance(code, int):
            others = [p.cut for p in found if isinstance(p, Split) and p.dim == code and p.cut]
            found.append(Split(code, refine_cut(SHAPE[code], others, n)))
        else:
            found.append(R if code == "R" else Intermediate("sum"))
    return tuple(found)


def _theirs(source: tuple[Any, ...], target: tuple[Any, ...], mesh: Any, totals: Totals, least: bool) -> None:
    meta = TensorMeta(torch.Size(SHAPE), (SHAPE[1] * SHAPE[2], SHAPE[2], 1), torch.int8)
    specs = [DTensorSpec(mesh, tuple(map(_torch_placement, codes)), tensor_meta=meta) for codes in (source, target)]
    theirs.clear_redistribute_planner_cache()
    steps = _timed(
        lambda: theirs._gen_transform_infos_non_cached(specs[0], specs[1], use_graph_based_transform=least), totals
    )
    held = 1.0
    for axis, placement in enumerate(specs[0].placements):
        held /= mesh.size(axis) if placement.is_shard() else 1
    sent = 0.0
    for step in steps:
        n = mesh.size(step.mesh_dim)
        have, want = (_own(placement) for placement in step.src_dst_placements)
        sent += ours.transition_cost(have, want, n, held)
        held *= (n if isinstance(have, Split) else 1) / (n if isinstance(want, Split) else 1)
    totals.sent.append(sent)


def _torch_placement(code: Any) -> Any:
    return Shard(code) if isinstance(code, int) else Replicate() if code == "R" else Partial("sum")


def _own(placement: Any) -> Placement:
    if placement.is_shard():
        return Split(placement.dim)
    return R if placement.is_replicate() else Intermediate("sum")


if __name__ == "__main__":
    main()
