"""Reshard plans: the collectives that convert one layout to another with the fewest bytes sent, and their cost.

The placements of mesh axes are independent but for one thing: a step moves the current local shard, so it is cheap
while the tensor is split along many axes. Along one axis a tensor takes one of a few *routes*, each with at most one
step in each of three phases::

    before (shrinks)            amid                        after (grows)
    R -> S  slice, free         S -> S'  all-to-all         S -> R  all-gather
    I -> S  reduce-scatter      I -> R   all-reduce         S -> I[sum]  zeros around the shard, free

All shrinking steps come first and all growing ones last, whatever the axis. So only the route of each axis remains to
be chosen, which depends on the kinds of placement and the mesh alone. A route may pass through a split that neither end
has: with ``I`` along one axis and ``R`` along another, each replica reduces a part of its own.

Bytes are those that each device sends (`layout.collectives`), for shards of equal size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from distir_relax.ir import DTensorType
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, R, Routed, Shard, collective_between, typical_value
from distir_relax.layout.partition import refine_cut


@dataclass(frozen=True, slots=True)
class Transition:
    """One step along mesh axis number `axis`, from placement `source` to `target`."""

    axis: int
    source: Placement
    target: Placement


def plan(source: DTensorType, target: DTensorType, mesh: DeviceMesh) -> tuple[Transition, ...]:
    """Return the steps from one layout to another with the fewest bytes sent; ties favor fewer steps.

    Any placement can become any other: for ``I[sum]`` a shard is surrounded by zeros; the terms of ``I[mean]``,
    ``I[min]`` and ``I[max]`` are the value itself.
    """
    return _plan(source.shape, source.placements, target.placements, mesh.shape)


def bytes_sent(source: DTensorType, target: DTensorType, mesh: DeviceMesh) -> float:
    """Return the bytes that each device sends in `plan`, for shards of equal size."""
    return plan_bytes(plan(source, target, mesh), source, mesh)


def plan_bytes(steps: tuple[Transition, ...], source: DTensorType, mesh: DeviceMesh) -> float:
    """Return the bytes that each device sends in `steps` from `source`, for shards of equal size."""
    local_bytes = float(source.tensor.bytes)
    for axis, placement in enumerate(source.placements):
        if isinstance(placement, Shard):
            local_bytes /= mesh.shape[axis]
    sent = 0.0
    for step in steps:
        n = mesh.shape[step.axis]
        sent += transition_cost(step.source, step.target, n, local_bytes)
        local_bytes *= (n if isinstance(step.source, Shard) else 1) / (n if isinstance(step.target, Shard) else 1)
    return sent


def transition_cost(source: Placement, target: Placement, ranks: int, local_bytes: float) -> float:
    """Return the bytes that each of `ranks` devices sends in one step, with `local_bytes` on each before it."""
    collective = collective_between(source, target)
    return collective.balanced_volume(ranks, local_bytes) if collective else 0.0


def cost(source: Placement, target: Placement, ranks: int, size: float) -> float:
    """Return the bytes that each device sends to convert a tensor of `size` bytes along a single axis."""
    if source == target:
        return 0.0
    local_bytes = size / ranks if isinstance(source, Shard) else size
    if isinstance(source, Partial) and isinstance(target, Partial):
        return transition_cost(source, Shard(0) if target.reduction == "sum" else R, ranks, local_bytes)
    return transition_cost(source, target, ranks, local_bytes)


_SLICE, _SCATTER = 1, 2
_EXCHANGE, _REDUCE = 1, 2
_GATHER = 1


@dataclass(frozen=True, slots=True)
class _Route:
    """The steps along one axis, before, amid and after the exchanges of others; 0 is no step.

    `split`: it starts as a shard; `passing`: it is split only on the way, along a dim to be chosen.
    """

    before: int = 0
    amid: int = 0
    after: int = 0
    split: bool = False
    passing: bool = False

    @property
    def steps(self) -> int:
        return sum(map(bool, (self.before, self.amid, self.after)))


# Candidate routes by the kinds of placement at both ends; `tests/sharding/test_reshard_plan.py` compares with a search
# of all paths. A letter for each end: R, S, I (sum) and J (another reduction); ST is between two different splits.
_ROUTES: dict[str, tuple[_Route, ...]] = {
    "RR": (_Route(), _Route(_SLICE, 0, _GATHER, passing=True)),
    "RS": (_Route(_SLICE),),
    "RI": (_Route(_SLICE, passing=True), _Route()),
    "RJ": (_Route(), _Route(_SLICE, 0, _GATHER, passing=True)),
    "SR": (_Route(0, 0, _GATHER, split=True),),
    "SS": (_Route(split=True),),
    "ST": (_Route(0, _EXCHANGE, split=True),),
    "SI": (_Route(split=True),),
    "SJ": (_Route(0, 0, _GATHER, split=True),),
    "IR": (_Route(0, _REDUCE), _Route(_SCATTER, 0, _GATHER, passing=True)),
    "IS": (_Route(_SCATTER),),
    "II": (_Route(), _Route(_SCATTER, passing=True)),
    "IJ": (_Route(0, _REDUCE), _Route(_SCATTER, 0, _GATHER, passing=True)),
    "JI": (_Route(_SCATTER, passing=True), _Route(0, _REDUCE)),
    "JJ": (_Route(),),
    # Routed rows stay as they are while other axes change: devices have different ones.
    "EE": (_Route(),),
    "JK": (_Route(0, _REDUCE), _Route(_SCATTER, 0, _GATHER, passing=True)),
}
_ROUTES["JR"], _ROUTES["JS"] = _ROUTES["IR"], _ROUTES["IS"]


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: tuple[int, ...]
) -> tuple[Transition, ...]:
    if source == target:
        return ()
    kinds = tuple("RR" if n == 1 else _kind(a, b) for a, b, n in zip(source, target, mesh, strict=True))
    parts = _remaining_parts(shape, source, target, mesh)
    passing = _can_pass(parts, mesh)
    routes = _choose_routes(kinds, mesh, tuple(passing))
    steps: tuple[list[Transition], ...] = ([], [], [], [], [])
    added: list[Shard] = []
    for axis, route in enumerate(routes):
        current, final = source[axis], target[axis]
        if mesh[axis] == 1:
            continue
        if route.passing:
            dim = max(range(len(parts)), key=parts.__getitem__)
            parts[dim] //= mesh[axis]
            others = [p.cut for p in (*source, *target, *added) if isinstance(p, Shard) and p.dim == dim and p.cut]
            middle: Placement = Shard(dim, refine_cut(shape[dim], others, mesh[axis]))
            added.append(middle)  # type: ignore[arg-type]
        else:
            middle = final
        if route.before:
            steps[route.before - 1].append(Transition(axis, current, middle))
            current = middle
        if route.amid:
            next_placement = R if route.amid == _REDUCE else middle
            steps[2].append(Transition(axis, current, next_placement))
            current = next_placement
        if route.after:
            steps[3].append(Transition(axis, current, R))
            current = R
        if current == R and final == Partial("sum") and shape:
            # No dim is large enough to split: the first device has all of it, after a reduction along the axis.
            middle = Shard(0, Cut.of(shape[0], *[0] * (mesh[axis] - 1)))
            steps[4 if route.steps else 0].append(Transition(axis, R, middle))
            current = middle
        if current != final:
            steps[4].append(Transition(axis, current, final))
    return tuple(itertools.chain.from_iterable(steps))


def _kind(source: Placement, target: Placement) -> str:
    first, second = _letter(source), _letter(target)
    if source == target:
        return first + second
    if first == second == "S":
        return "ST"
    return "JK" if first == second == "J" else first + second


def _letter(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "I" if placement.reduction == "sum" else "J"
    if isinstance(placement, Routed):
        return "E"
    return "S" if isinstance(placement, Shard) else "R"


def _remaining_parts(
    shape: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: tuple[int, ...]
) -> list[int]:
    """Return into how many parts each dim can still be cut, given the cuts at both ends; typically, if symbolic."""
    parts = list(map(typical_value, shape))
    for source_placement, target_placement, n in zip(source, target, mesh, strict=True):
        for dim in {p.dim for p in (source_placement, target_placement) if isinstance(p, Shard)}:
            parts[dim] //= n
    return parts


def _can_pass(parts: list[int], mesh: tuple[int, ...]) -> list[bool]:
    """Return for each axis whether some dim is large enough to be split on the way, after all earlier axes."""
    remaining = list(parts)
    result = []
    for n in mesh:
        widest = max(remaining, default=0)
        result.append(widest >= n)
        if result[-1]:
            remaining[remaining.index(widest)] //= n
    return result


@lru_cache(maxsize=65536)
def _choose_routes(kinds: tuple[str, ...], mesh: tuple[int, ...], passing: tuple[bool, ...]) -> tuple[_Route, ...]:
    """Return the cheapest routes: fewest bytes, then fewest steps."""
    options = [
        [r for r in _ROUTES[kind] if n > 1 and (can_pass or not r.passing)] or [_Route()]
        for kind, n, can_pass in zip(kinds, mesh, passing, strict=True)
    ]
    if all(len(routes) == 1 for routes in options):
        return tuple(routes[0] for routes in options)
    unit = math.prod(mesh) ** 2  # An integer, so that equal costs compare equal.
    return min(itertools.product(*options), key=lambda routes: _route_cost(routes, mesh, unit))


def _route_cost(routes: tuple[_Route, ...], mesh: tuple[int, ...], local_bytes: int) -> tuple[int, int]:
    sent = steps = 0
    for route, n in zip(routes, mesh, strict=True):
        if route.split or route.before == _SLICE:
            local_bytes //= n
    for route, n in zip(routes, mesh, strict=True):
        if route.before == _SCATTER:
            local_bytes //= n
            sent += (n - 1) * local_bytes
    for route, n in zip(routes, mesh, strict=True):
        sent += route.amid * (n - 1) * local_bytes // n
        steps += route.steps
    for route, n in zip(routes, mesh, strict=True):
        if route.after:
            sent += (n - 1) * local_bytes
            local_bytes *= n
    return sent, steps
