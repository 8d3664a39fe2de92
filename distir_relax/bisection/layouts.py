"""Correspondence of the values of ranks' programs to those of the model.

A value of a rank's program is a piece of the value of the same name in the sharded stage, whose layout says which one;
a received or awaited copy is a piece of the value that it is a copy of. Values that only distribution needs (halos,
operands of collectives) have no counterpart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from distir_relax.bisection.rounding import rms
from distir_relax.ir import DTensorType, Function, Module, Op, PlacedType, TensorType
from distir_relax.layout import At, DeviceMesh, Interval, Partial, Replicate, Shard, local_intervals
from distir_relax.ops import Trait, lookup
from distir_relax.runtime.outputs import place

if TYPE_CHECKING:
    import torch

Taps = Mapping[int, Mapping[str, "torch.Tensor"]]
"""The tensors of ranks: by rank, and by the name of the value in the rank's program."""


@dataclass(frozen=True)
class LocalValue:
    """A value of a rank's program that is a piece of a value of the model, at `coordinates` of the mesh of its layout.

    `order` is its position in the schedule.
    """

    rank: int
    name: str
    order: int
    coordinates: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The parts of a value on ranks, with pending reductions done: the tensor `found`, and its intervals of each dim.

    Several `values` are terms of one reduction, of which the largest has the root mean square `scale`; otherwise it is
    0.
    """

    values: tuple[LocalValue, ...]
    found: torch.Tensor
    intervals: tuple[list[Interval], ...]
    scale: float = 0.0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same piece of a global tensor."""
        return _select(whole, self.intervals)

    def position(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return the global index of an element of the piece."""
        return tuple(_global(intervals, i) for intervals, i in zip(self.intervals, index, strict=True))


class Layouts:
    """The pieces of the values of a model that the ranks' programs have. All stages are inlined, with fixed sizes."""

    def __init__(self, sharded: Module, distributed: Module, ranked: Module, padded: bool = False) -> None:
        self.ranked = ranked
        self._padded = padded
        """Whether short shards are padded at their end."""
        self._meshes = sharded.meshes
        self._world = distributed.meshes[0].size
        self.layouts: dict[str, DTensorType] = {v.name: v.dtensor for op in sharded.main.ops for v in op.results}
        self.local: dict[str, list[LocalValue]] = {}
        """The pieces of each value of the model, in the order of the schedule."""
        self.types: dict[tuple[int, str], TensorType] = {}
        """The type of each of these pieces."""
        placed = self._counterparts(distributed.main, {v.name: op for op in sharded.main.ops for v in op.results})
        for rank, function in enumerate(self.programs):
            for op in function.ops:
                if not op.callee and Trait.STARTS in lookup(op.name, op.location).traits:
                    continue
                for value in op.results:
                    if value.name in placed:
                        self._add(rank, value.name, value.tensor, *placed[value.name])
        for values in self.local.values():
            values.sort(key=lambda value: (value.order, value.rank))

    @cached_property
    def programs(self) -> list[Function]:
        """The program of each rank."""
        return [self.ranked.function(name) for name in self.ranked.ranks]

    def op_of(self, value: LocalValue) -> Op:
        """Return the op of the rank's program that computes a value."""
        return next(op for op in self.programs[value.rank].ops if any(v.name == value.name for v in op.results))

    def pieces(self, name: str, taps: Taps) -> Iterator[Piece]:
        """Iterate over the pieces of a value of the model that were recorded, pending reductions done."""
        layout = self.layouts[name]
        pending = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Partial)]
        values = [v for v in self.local.get(name, ()) if v.name in taps.get(v.rank, {})]

        def key(value: LocalValue) -> tuple[object, ...]:
            rest = tuple(c for axis, c in enumerate(value.coordinates) if axis not in pending)
            return (value.name, rest) if pending else (value.name, rest, value.rank)

        mesh = self._meshes[layout.mesh]
        for _, group in itertools.groupby(sorted(values, key=key), key):
            members = sorted(group, key=lambda value: value.rank)
            if pending and len(members) != _terms(layout, mesh):
                continue
            terms = [taps[v.rank][v.name] for v in members]
            found = _reduced(terms, layout, pending)
            scale = max(map(rms, terms)) if pending and found.is_floating_point() else 0.0
            intervals = tuple(
                local_intervals(layout.placements, dim, size, members[0].coordinates)
                for dim, size in enumerate(layout.shape)
            )
            lengths = [sum(stop - start for start, stop in pieces) for pieces in intervals]
            yield Piece(tuple(members), found[tuple(slice(n) for n in lengths)], intervals, scale)

    def assemble(self, name: str, taps: Taps) -> torch.Tensor | None:
        """Return a global value from its pieces, of replicas that of the first rank; None if some were not recorded."""
        import torch

        layout = self.layouts[name]
        result, covered = None, torch.zeros(layout.shape, dtype=torch.bool)
        for piece in self.pieces(name, taps):
            if result is None:
                result = torch.zeros(layout.shape, dtype=piece.found.dtype)
            if piece.found.numel() and not piece.of(covered).all():
                intervals = list(piece.intervals)
                place(result, piece.found, intervals)
                place(covered, torch.ones_like(piece.found, dtype=torch.bool), intervals)
        return result if result is not None and bool(covered.all()) else None

    def _counterparts(self, main: Function, producers: Mapping[str, Op]) -> dict[str, tuple[str, PlacedType, int]]:
        """Return, by name of a value of the schedule, the model's value, its type, and its position in the schedule.

        A value of another op than the model's (`producers`) is a step of a mean, say, which devices compute otherwise.
        """
        counterpart: dict[str, tuple[str, PlacedType, int]] = {}
        for order, op in enumerate(main.ops):
            copies = not lookup(op.name, op.location).traits.isdisjoint({Trait.TRANSFER, Trait.WAIT})
            for value in op.results:
                source = counterpart.get(op.operands[0].name, ("",))[0] if copies else value.name
                if source not in self.layouts:
                    continue
                producer = producers[source]
                moves = not lookup(producer.name).traits.isdisjoint({Trait.REDISTRIBUTION, Trait.PLACE})
                if copies or moves or producer.name == op.name:
                    counterpart[value.name] = source, value.placed, order
        return counterpart

    def _add(self, rank: int, name: str, local: TensorType, source: str, placed: PlacedType, order: int) -> None:
        layout = self.layouts[source]
        mesh = self._meshes[layout.mesh]
        if rank not in placed.devices or placed.local(placed.devices.index(rank)) != local:
            return
        # The layout of a pipeline stage is over the devices of that stage.
        position = placed.devices.index(rank) if len(placed.devices) == mesh.size else rank
        if position >= mesh.size or local.dtype != layout.dtype:
            return
        reductions = {p.reduction for p in layout.placements if isinstance(p, Partial)}
        known = all(isinstance(p, (Replicate, Shard, Partial, At)) for p in layout.placements)
        if not known or len(reductions) > 1:
            return
        coordinates = mesh.coordinates(position)
        shape = tuple(
            sum(b - a for a, b in local_intervals(layout.placements, dim, size, coordinates))
            for dim, size in enumerate(layout.shape)
        )
        pairs = list(zip(local.shape, shape, strict=True)) if len(shape) == len(local.shape) else [(0, 1)]
        if local.shape == shape or (self._padded and all(n >= own for n, own in pairs)):
            self.local.setdefault(source, []).append(LocalValue(rank, name, order, coordinates))
            self.types[rank, name] = local


def _terms(layout: DTensorType, mesh: DeviceMesh) -> int:
    sizes = [n for p, n in zip(layout.placements, mesh.shape, strict=True) if isinstance(p, Partial)]
    total = 1
    for n in sizes:
        total *= n
    return total


def _reduced(terms: Sequence[torch.Tensor], layout: DTensorType, pending: Sequence[int]) -> torch.Tensor:
    import torch

    if not pending:
        return terms[0]
    # Terms are larger than their sum where they cancel: add them in float64.
    stacked = torch.stack([x.double() if x.is_floating_point() else x for x in terms])
    placement = layout.placements[pending[0]]
    assert isinstance(placement, Partial)
    if placement.reduction in ("max", "min"):
        result = stacked.amax(0) if placement.reduction == "max" else stacked.amin(0)
    else:
        result = stacked.sum(0) if placement.reduction == "sum" else stacked.mean(0)
    return result.to(terms[0].dtype)


def _select(whole: torch.Tensor, intervals: Sequence[list[Interval]]) -> torch.Tensor:
    import torch

    for dim, pieces in enumerate(intervals):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in pieces]
        whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else whole.narrow(dim, 0, 0)
    return whole


def _global(intervals: Sequence[Interval], index: int) -> int:
    for start, stop in intervals:
        if index < stop - start:
            return start + index
        index -= stop - start
    raise IndexError(index)
