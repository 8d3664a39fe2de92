"""From one layout of a tensor to another: which collectives do it with the fewest bytes, and what they cost.

The placements of mesh axes are independent of each other but for one thing: a step moves what a device holds at that
time, so it is cheap while the tensor is split along many axes. Along one axis a tensor takes one of a few *routes*,
each a step before, a step amid and a step after::

    before (shrinks)            amid                        after (grows)
    R -> S  slice, free         S -> S'  all-to-all         S -> R  all-gather
    I -> S  reduce-scatter      I -> R   all-reduce         S -> I[sum]  zeros around the shard, free

All that shrinks comes first and all that grows comes last, whatever the axis; it remains to choose a route for each
axis, and the choice depends on the kinds of placement and on the mesh alone. So a route may pass through a split that
neither end has: with ``I`` along one axis and ``R`` along another, each replica reduces a part of its own.

Bytes are those that each device sends (`layout.collectives`), counted for shards of equal size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from distir_relax.ir import DTensorType
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, R, Routed, Shard, collective_between
from distir_relax.layout.partition import refined


@dataclass(frozen=True, slots=True)
class Transition:
    """One collective along mesh axis number `axis`: the placement there goes from `source` to `target`."""

    axis: int
    source: Placement
    target: Placement


def plan(source: DTensorType, target: DTensorType, mesh: DeviceMesh) -> tuple[Transition, ...]:
    """The steps that take a tensor from one layout to the other with the fewest bytes sent.

    Of plans that send equally much the one with the fewest steps is taken. Any placement leads to any other: into
    ``I[sum]`` a shard is put among zeros, ``I[mean]``, ``I[min]`` and ``I[max]`` are what every device holds.
    """
    return _plan(source.shape, source.placements, target.placements, mesh.shape)


def bytes_sent(source: DTensorType, target: DTensorType, mesh: DeviceMesh) -> float:
    """Bytes that each device sends in `plan`, for shards of equal size."""
    return transitions_bytes(plan(source, target, mesh), source, mesh)


def transitions_bytes(steps: tuple[Transition, ...], source: DTensorType, mesh: DeviceMesh) -> float:
    """Bytes that each device sends in `steps`, one after the other from `source`, for shards of equal size."""
    held = float(source.tensor.bytes)
    for axis, placement in enumerate(source.placements):
        if isinstance(placement, Shard):
            held /= mesh.shape[axis]
    sent = 0.0
    for step in steps:
        n = mesh.shape[step.axis]
        sent += transition_cost(step.source, step.target, n, held)
        held *= (n if isinstance(step.source, Shard) else 1) / (n if isinstance(step.target, Shard) else 1)
    return sent


def transition_cost(source: Placement, target: Placement, ranks: int, held: float) -> float:
    """Bytes that each of `ranks` devices, holding `held` bytes, sends in one step from `source` to `target`."""
    collective = collective_between(source, target)
    return collective.sends(ranks, held) if collective else 0.0


def cost(source: Placement, target: Placement, ranks: int, size: float) -> float:
    """Bytes that each device sends to take a tensor of `size` bytes from `source` to `target` along a lone axis."""
    if source == target:
        return 0.0
    held = size / ranks if isinstance(source, Shard) else size
    if isinstance(source, Partial) and isinstance(target, Partial):
        return transition_cost(source, Shard(0) if target.reduction == "sum" else R, ranks, held)
    return transition_cost(source, target, ranks, held)


_SLICE, _SCATTER = 1, 2
_EXCHANGE, _REDUCE = 1, 2
_GATHER = 1


@dataclass(frozen=True, slots=True)
class _Route:
    """How the placement along one axis changes: a step before, one amid and one after the others' exchanges.

    `split`: it starts as a shard; `passing`: it is split only on the way, along a dim that has to be found.
    """

    before: int = 0
    amid: int = 0
    after: int = 0
    split: bool = False
    passing: bool = False

    @property
    def steps(self) -> int:
        return sum(map(bool, (self.before, self.amid, self.after)))


# The routes that may be best, by the kinds of placement at both ends; `tests/sharding/test_reshard_plan.py` searches
# all paths. A letter for each end: R, S, I (sum) and J (another reduction); S to T is from one split to another.
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
    # Rows that lie with their experts stay there while other axes change: devices hold unlike ones.
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
    room = _room(shape, source, target, mesh)
    passing = _splittable(room, mesh)
    routes = _choose(kinds, mesh, tuple(passing))
    steps: tuple[list[Transition], ...] = ([], [], [], [], [])
    found: list[Shard] = []
    for axis, route in enumerate(routes):
        have, want = source[axis], target[axis]
        if mesh[axis] == 1:
            continue
        if route.passing:
            dim = max(range(len(room)), key=room.__getitem__)
            room[dim] //= mesh[axis]
            others = [p.cut for p in (*source, *target, *found) if isinstance(p, Shard) and p.dim == dim and p.cut]
            middle: Placement = Shard(dim, refined(shape[dim], others, mesh[axis]))
            found.append(middle)  # type: ignore[arg-type]
        else:
            middle = want
        if route.before:
            steps[route.before - 1].append(Transition(axis, have, middle))
            have = middle
        if route.amid:
            reached = R if route.amid == _REDUCE else middle
            steps[2].append(Transition(axis, have, reached))
            have = reached
        if route.after:
            steps[3].append(Transition(axis, have, R))
            have = R
        if have == R and want == Partial("sum") and shape:
            # Too small to be split on the way: the first device keeps all of it.
            steps[0].append(Transition(axis, R, Shard(0, Cut.of(shape[0], *[0] * (mesh[axis] - 1)))))
            have = steps[0][-1].target
        if have != want:
            steps[4].append(Transition(axis, have, want))
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


def _room(
    shape: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: tuple[int, ...]
) -> list[int]:
    """Into how many parts each dim can still be cut, beside the cuts at both ends."""
    room = list(shape)
    for have, want, n in zip(source, target, mesh, strict=True):
        for dim in {p.dim for p in (have, want) if isinstance(p, Shard)}:
            room[dim] //= n
    return room


def _splittable(room: list[int], mesh: tuple[int, ...]) -> list[bool]:
    """The axes along which some dim is large enough to be split on the way, if all axes before do so too."""
    left = list(room)
    found = []
    for n in mesh:
        widest = max(left, default=0)
        found.append(widest >= n)
        if found[-1]:
            left[left.index(widest)] //= n
    return found


@lru_cache(maxsize=65536)
def _choose(kinds: tuple[str, ...], mesh: tuple[int, ...], passing: tuple[bool, ...]) -> tuple[_Route, ...]:
    """The route of each axis that makes the whole cheapest: fewest bytes, then fewest steps."""
    options = [
        [r for r in _ROUTES[kind] if n > 1 and (may or not r.passing)] or [_Route()]
        for kind, n, may in zip(kinds, mesh, passing, strict=True)
    ]
    if all(len(routes) == 1 for routes in options):
        return tuple(routes[0] for routes in options)
    unit = math.prod(mesh) ** 2  # Whole numbers: that equal costs compare equal.
    return min(itertools.product(*options), key=lambda routes: _weight(routes, mesh, unit))


def _weight(routes: tuple[_Route, ...], mesh: tuple[int, ...], held: int) -> tuple[int, int]:
    sent = steps = 0
    for route, n in zip(routes, mesh, strict=True):
        if route.split or route.before == _SLICE:
            held //= n
    for route, n in zip(routes, mesh, strict=True):
        if route.before == _SCATTER:
            held //= n
            sent += (n - 1) * held
    for route, n in zip(routes, mesh, strict=True):
        sent += route.amid * (n - 1) * held // n
        steps += route.steps
    for route, n in zip(routes, mesh, strict=True):
        if route.after:
            sent += (n - 1) * held
            held *= n
    return sent, steps
