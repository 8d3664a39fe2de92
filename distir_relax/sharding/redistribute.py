"""From one layout of a tensor to another: what it costs, and which collectives do it."""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.errors import PlacementError
from distir_relax.ir import DeviceMesh, DTensorType, Partial, Placement, Replicate, Shard


def cost(source: Placement, target: Placement, ranks: int, size: float) -> float:
    """Bytes that each device sends to take a tensor of `size` bytes from `source` to `target` along an axis.

    Ring algorithms: with n devices an all-gather or a reduce-scatter sends (n-1)/n of the tensor, an all-reduce twice
    that (Thakur, Rabenseifner and Gropp, 2005); an all-to-all sends (n-1)/n of the device's own shard, and where it
    does not do (`exchanges`) the tensor is gathered; taking one's own slice sends nothing. Raises `PlacementError` for what cannot be done: splitting a value into terms of a sum.
    """
    if source == target:
        return 0.0
    part = (ranks - 1) / ranks
    match source, target:
        case Replicate(), Shard():
            return 0.0
        case Shard(), Replicate():
            return part * size
        case Shard(), Shard():
            return part * size / ranks if exchanges(source, target) else part * size
        case Partial(), Replicate():
            return 2 * part * size
        case Partial(), Shard():
            return part * size
    raise PlacementError(f"cannot lay {source} out as {target}")


def exchanges(source: Shard, target: Shard) -> bool:
    """Whether one all-to-all takes a tensor from `source` to `target`: other dims, and shards that are one block each."""
    blocks = all(p.cut is None or p.cut.is_block for p in (source, target))
    return blocks and source.dim != target.dim


@dataclass(frozen=True, slots=True)
class Step:
    """One collective along mesh axis number `axis`: the placement there goes from `source` to `target`."""

    axis: int
    source: Placement
    target: Placement


def plan(source: DTensorType, target: DTensorType, mesh: DeviceMesh) -> tuple[Step, ...]:
    """The steps that take a tensor from one layout to the other, axis by axis.

    Reductions come first (they shrink what follows when they scatter), then exchanges and gathers, then slices; a dim
    is never split along two axes at once.
    """
    order = {"reduce": 0, "move": 1, "gather": 2, "slice": 3}
    steps: list[tuple[int, Step]] = []
    for axis, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if have == want or mesh.shape[axis] == 1:
            continue
        taken = {p.dim for i, p in enumerate(source.placements) if i != axis and isinstance(p, Shard)}
        if isinstance(want, Shard) and want.dim in taken and not isinstance(have, Replicate):
            middle: Placement = Replicate()
            steps.append((order["gather" if isinstance(have, Shard) else "reduce"], Step(axis, have, middle)))
            steps.append((order["slice"], Step(axis, middle, want)))
            continue
        kind = {
            ("Partial", "Replicate"): "reduce",
            ("Partial", "Shard"): "reduce",
            ("Shard", "Shard"): "move",
            ("Shard", "Replicate"): "gather",
            ("Replicate", "Shard"): "slice",
        }.get((type(have).__name__, type(want).__name__))
        if kind is None:
            raise PlacementError(f"cannot lay {have} out as {want}")
        steps.append((order[kind], Step(axis, have, want)))
    return tuple(step for _, step in sorted(steps, key=lambda item: item[0]))
