"""Ops of the sharded program that devices run as others, because a factor of theirs is cut (`Split.expand`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.ir import Attribute, DTensorType, Op, Size, Value, per_rank
from distir_relax.layout import Shard, local_length, maximum
from distir_relax.ops import Expansion, Trait, lookup
from distir_relax.ops.table.rule import Rule
from distir_relax.ops.table.spmd_inference import infer_placed
from distir_relax.proof.layouts import Layouts
from distir_relax.proof.local_ops import expanded_layouts
from distir_relax.proof.pieces import Groups, Layout, Mismatch, Piece
from distir_relax.proof.terms import Expandable


class Expansions:
    """Ops of the sharded program that devices run as other ops, because a factor of theirs is cut.

    Both the ops of the schedule and those that an entry gives have numbers: equal ops on equal operands have one. A
    value with the number of an expansion's result is a piece of the op's result.
    """

    def __init__(self, layouts: Layouts, originals: Mapping[str, Value]) -> None:
        self.layouts = layouts
        self.originals = originals
        self.terms = {number for item in layouts.terms.expandable for number in item.operands}
        """The tensors that are operands of such ops."""
        self.numbers: dict[str, int] = {}
        """The number of each value by the ops that compute it on a device."""
        self.made: dict[object, tuple[int, ...]] = {}
        self.count = self.emitted = 0
        self.expected: defaultdict[int, list[Piece]] = defaultdict(list)
        """The pieces that a value with each number may be."""
        self.values: defaultdict[int, list[tuple[Value, Piece]]] = defaultdict(list)
        """The values of the schedule that are pieces of each of `terms`."""
        self.tried: set[object] = set()

    def add(self, op: Op) -> None:
        """Give the results of an op numbers; its sizes are symbolic, where the program's are."""
        entry = lookup(op.name, op.location)
        is_collective = entry.semantics.collective_semantics is not None
        is_opaque = op.operands and Trait.ON_COMMUNICATOR in entry.traits and not is_collective
        attributes = -1 if is_opaque else self.layouts.terms.attributes.of(op)
        self.number(op.name, op.operands, attributes, op.results)

    def know(self, value: Value, forms: Sequence[Piece]) -> None:
        """Note that a value is a piece of a tensor, in each of these forms."""
        for piece in forms:
            if piece.term in self.terms and piece.routed is None:
                self.values[piece.term].append((value, piece))

    def results(self, op: Op) -> Sequence[Piece] | None:
        """Return the pieces of an op's results, if it is the end of an expansion."""
        if not self.layouts.terms.expandable:
            return None
        found = self._expected(op)
        if found is None:
            self._expand(op.results[0].placed.devices)
            found = self._expected(op)
        return found

    def number(
        self,
        name: str,
        operands: Sequence[Value],
        attributes: int,
        results: Sequence[Value],
    ) -> None:
        """Give the results of an op with attributes of this number theirs; -1 for one that is equal to no other."""
        numbers = tuple(self._number_of(value) for value in operands)
        groups = self.layouts.groups_of(results[0].placed.devices)
        key = object() if attributes < 0 else (name, numbers, attributes, id(groups))
        if key not in self.made:
            self.count += len(results)
            self.made[key] = tuple(range(self.count - len(results), self.count))
        self.numbers.update((value.name, n) for value, n in zip(results, self.made[key], strict=True))

    def _expected(self, op: Op) -> list[Piece] | None:
        pieces = []
        for value in op.results:
            options = self.expected.get(self.numbers[value.name], ())
            fitting = [piece for piece in options if self.layouts.fits(piece.layout, value.placed)]
            if not fitting:
                return None
            pieces.append(fitting[0])
        return pieces

    def _expand(self, devices: tuple[int, ...]) -> None:
        """Expand the ops whose operands the schedule has by now."""
        for item in self.layouts.terms.expandable:
            for chosen in product(*(self.values[number] for number in item.operands)):
                key = (item.results, devices, tuple((value.name, piece) for value, piece in chosen))
                if key not in self.tried and all(value.placed.devices == devices for value, _ in chosen):
                    self.tried.add(key)
                    self._expand_one(item, chosen, devices)

    def _expand_one(self, item: Expandable, operands: Sequence[tuple[Value, Piece]], devices: tuple[int, ...]) -> None:
        placed, instance = self.layouts, item.instance
        groups = placed.groups_of(devices)
        layouts = [piece.layout for _, piece in operands]
        values = tuple(self.originals[value.name] for value, _ in operands)
        for kinds in product(*(placed.terms.layouts[number].items() for number in item.results)):
            exact = [placed.layout(kind, devices, n) for (kind, _), n in zip(kinds, item.results, strict=True)]
            found = []
            padded = [self._padded(layout) for layout in exact]
            for claimed in [exact] if padded == exact else [exact, padded]:
                with suppress(Mismatch):
                    layouts_found = expanded_layouts(placed.tables, instance, layouts, groups, claimed)
                    found += [layouts_found] if layouts_found not in found else []
            if not found:
                continue
            types = [tuple(v.dtensor.tensor for v in side) for side in (item.original.operands, item.original.results)]
            emitter = _Emitter(self, devices, instance.op.location)
            parts = list(self._parts(instance.rule, item, operands, values, [kind for _, kind in kinds], groups))
            for (name, expand), (factor, cut, size) in product(instance.entry.split.expand.items(), parts):
                if name in ("*", factor):
                    try:
                        made = expand(Expansion(emitter, values, item.original.attrs, cut, size, *types))
                    except (DistIRError, ValueError):
                        continue
                    for position, (value, number) in enumerate(zip(made, item.results, strict=True)):
                        options = self.expected[self.numbers[value.name]]
                        options += [layouts_found[position].of(number) for layouts_found in found]

    def _padded(self, layout: Layout) -> Layout:
        """Return a layout in which devices have as many elements of each dim as the one with most, or padding."""
        tables = self.layouts.tables
        dims = []
        for table in layout.dims:
            most = max(len(tables.rows[row]) for row in tables.tables[table])
            dims.append(tables.table(tables.padded(row, most) for row in tables.tables[table]))
        return replace(layout, dims=tuple(dims))

    def _parts(
        self,
        rule: Rule,
        item: Expandable,
        operands: Sequence[tuple[Value, Piece]],
        values: Sequence[Value],
        results: Sequence[DTensorType],
        groups: Groups,
    ) -> Iterator[tuple[str, tuple[tuple[str, tuple[Size, ...]], ...], Size]]:
        """Iterate over the factors that may be cut: name, how the dim is cut, and its local sizes."""
        placed = self.layouts
        for (_, piece), original, dims, number in zip(operands, values, rule.operands, item.operands, strict=True):
            for dim, factors in enumerate(dims):
                for kind, symbolic in placed.terms.layouts[number].items() if factors else ():
                    if placed.has_parts(piece, dim, placed.layout(kind, groups.devices, number).dims[dim]):
                        for parts in self._cut(symbolic, dim, groups):
                            yield from ((rule.factors[i].name, parts, original.placed.shape[dim]) for i in factors)
        for symbolic, dims in zip(results, rule.results, strict=True):
            for dim, factors in enumerate(dims):
                for parts in self._cut(symbolic, dim, groups) if factors else ():
                    sizes = self._sizes(symbolic, dim, groups)
                    for local_size in (per_rank(sizes), maximum(*sizes)):
                        yield from ((rule.factors[i].name, parts, local_size) for i in factors)

    def _cut(self, kind: DTensorType, dim: int, groups: Groups) -> Iterator[tuple[tuple[str, tuple[Size, ...]], ...]]:
        """Iterate over how a type cuts a dim, axis by axis; over nothing if it does not."""
        mesh, axes = groups.mesh, self.layouts.axes
        split = [i for i, p in enumerate(kind.placements) if isinstance(p, Shard) and p.dim == dim]
        parts = []
        for count, axis in enumerate(split):
            placements = [kind.placements[i] for i in split[: count + 1]]
            lengths: dict[tuple[int, ...], list[Size]] = {}
            rows = []
            for place in groups.coordinates:
                before = tuple(place[axes[i]] for i in split[:count])
                if before not in lengths:
                    places = [(*before, index) for index in range(mesh.shape[axes[axis]])]
                    lengths[before] = [local_length(placements, dim, kind.shape[dim], place) for place in places]
                rows.append(lengths[before])
            parts.append((mesh.axes[axes[axis]], tuple(per_rank(column) for column in zip(*rows, strict=True))))
        if parts:
            yield tuple(parts)

    def _sizes(self, kind: DTensorType, dim: int, groups: Groups) -> list[int]:
        places = [tuple(place[axis] for axis in self.layouts.axes) for place in groups.coordinates]
        lengths = {place: local_length(kind.placements, dim, kind.shape[dim], place) for place in set(places)}
        return [lengths[place] for place in places]

    def _number_of(self, value: Value) -> int:
        if value.name not in self.numbers:
            self.count += 1
            self.numbers[value.name] = self.count - 1
        return self.numbers[value.name]


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Gives the ops of an expansion numbers."""

    expansions: Expansions
    devices: tuple[int, ...]
    location: str

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """See `Emitter.emit`."""
        kinds = infer_placed(name, [v.placed for v in operands], attrs, self.devices, self.location)
        self.expansions.emitted += 1
        # No value of a program has a name with a space.
        results = tuple(Value(f"expanded {self.expansions.emitted} {i}", kind) for i, kind in enumerate(kinds))
        self.expansions.number(name, operands, self.expansions.layouts.terms.attributes.number(attrs), results)
        return results[0] if len(results) == 1 else results
