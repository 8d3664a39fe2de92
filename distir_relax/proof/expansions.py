"""Ops of the sharded program that devices run as others, because a factor of theirs is cut (`Split.expand`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.ir import Attribute, DTensorType, Op, Size, Value, per_rank
from distir_relax.layout import Shard, local_length, maximum
from distir_relax.ops import Expansion, RingExpansion, Trait, lookup
from distir_relax.ops.table.spmd_inference import infer_placed
from distir_relax.proof.exchanged_parts import held_by_index, layouts_after_turns
from distir_relax.proof.layouts import Layouts
from distir_relax.proof.local_ops import expanded_layouts
from distir_relax.proof.pieces import Groups, Layout, Mismatch, Piece
from distir_relax.proof.terms import Expandable

Parts = tuple[tuple[str, tuple[Size, ...]], ...]
"""How a dim is cut, axis by axis: see `Expansion.parts`."""
_Variant = tuple[Callable[[Any], tuple[Value, ...]], Expansion, list[list[Layout]]]
"""The ops of an entry, what they are given, and the layouts that the results may have then."""


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
        self.users: defaultdict[int, list[Expandable]] = defaultdict(list)
        """The ops with each tensor as an operand."""
        for item in layouts.terms.expandable:
            for number in dict.fromkeys(item.operands):
                self.users[number].append(item)
        self.fresh: dict[int, None] = dict.fromkeys(self.terms)
        """The tensors of which values have come to be known since ops were expanded the last time."""
        self.arrays: dict[int, Any] = {}
        """The elements of tensors that are known when compiling."""

    def add(self, op: Op) -> None:
        """Give the results of an op numbers; its sizes are symbolic, where the program's are."""
        entry = lookup(op.name, op.location)
        is_collective = entry.semantics.collective_semantics is not None
        is_opaque = op.operands and Trait.ON_COMMUNICATOR in entry.traits and not is_collective
        numbers = self.layouts.terms.attributes
        if Trait.WAIT in entry.traits:
            self.numbers[op.results[0].name] = self._number_of(op.operands[0])
            return
        is_started = "stream" in op.attrs
        plain = numbers.number({k: v for k, v in op.attrs.items() if k != "stream"}) if is_started else numbers.of(op)
        attributes = -1 if is_opaque else plain
        self.number(op.name, op.operands, attributes, op.results)

    def know(self, value: Value, forms: Sequence[Piece]) -> None:
        """Note that a value is a piece of a tensor, in each of these forms."""
        for piece in forms:
            if piece.term in self.terms and piece.routed is None and self._is_placed(piece, value.placed.devices):
                self.values[piece.term].append((value, piece))
                self.fresh[piece.term] = None

    def _is_placed(self, piece: Piece, devices: tuple[int, ...]) -> bool:
        """Whether devices have parts of a tensor that the sharded program places there, and not some on their way."""
        assert piece.term is not None
        placed = self.layouts
        layouts = (placed.layout(kind, devices, piece.term) for kind in placed.terms.layouts[piece.term])
        return any(all(placed.has_parts(piece, *dim) for dim in enumerate(layout.dims)) for layout in layouts)

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
        """Expand the ops whose operands the schedule has by now; those without operands on these devices."""
        items = {id(item): item for number in self.fresh for item in self.users[number]}
        self.fresh.clear()
        for item in items.values():
            for chosen in product(*(self.values[number] for number in item.operands)):
                first = chosen[0][0].placed.devices
                if all(value.placed.devices == first for value, _ in chosen):
                    self._try(item, chosen, first)
        for item in self.layouts.terms.expandable:
            if not item.operands:
                self._try(item, (), devices)

    def _try(self, item: Expandable, chosen: Sequence[tuple[Value, Piece]], devices: tuple[int, ...]) -> None:
        key = (item.results, devices, tuple((value.name, piece) for value, piece in chosen))
        if key not in self.tried:
            self.tried.add(key)
            self._expand_one(item, chosen, devices)

    def _expand_one(self, item: Expandable, operands: Sequence[tuple[Value, Piece]], devices: tuple[int, ...]) -> None:
        placed = self.layouts
        groups = placed.groups_of(devices)
        emitter = _Emitter(self, devices, item.instance.op.location)
        for kinds in product(*(placed.terms.layouts[number].items() for number in item.results)):
            exact = [placed.layout(kind, devices, n) for (kind, _), n in zip(kinds, item.results, strict=True)]
            given = _Given(item, emitter, operands, [kind for _, kind in kinds], exact, groups)
            for expand, expansion, found in (*self._plain(given), *self._in_turns(given)):
                try:
                    made = expand(expansion)
                except (DistIRError, ValueError):
                    continue
                for position, (value, number) in enumerate(zip(made, item.results, strict=True)):
                    options = self.expected[self.numbers[value.name]]
                    options += [layouts[position].of(number) for layouts in found]

    def _plain(self, given: _Given) -> Iterator[_Variant]:
        """Iterate over the expansions along one factor, with the layouts that their results may have."""
        instance, exact = given.item.instance, given.results
        layouts = [piece.layout for _, piece in given.operands]
        found = []
        padded = [self._padded(layout) for layout in exact]
        for claimed in [exact] if padded == exact else [exact, padded]:
            with suppress(Mismatch):
                layouts_found = expanded_layouts(self.layouts.tables, instance, layouts, given.groups, claimed)
                found += [layouts_found] if layouts_found not in found else []
        parts = list(self._parts(given)) if found else []
        for (name, expand), (factor, cut, size) in product(instance.entry.split.expand.items(), parts):
            if name in ("*", factor):
                yield expand, self._expansion(given, cut, size), found

    def _in_turns(self, given: _Given) -> Iterator[_Variant]:
        """Iterate over the expansions in which devices exchange parts of a second factor (`Split.ring`)."""
        tables, instance, groups = self.layouts.tables, given.item.instance, given.groups
        layouts = [piece.layout for _, piece in given.operands]
        indices = [set(column) for column in zip(*groups.coordinates, strict=True)]
        axes = [axis for axis, size in enumerate(groups.mesh.shape) if len(indices[axis]) == size > 1]
        for (name, ring), axis in product(instance.entry.split.ring.items(), axes):
            given_layouts = instance, layouts, given.results, ring.factor, groups, axis
            key = ("turns", id(instance), *map(tuple, given_layouts[1:3]), ring.factor, groups.key, axis)
            with suppress(Mismatch):
                found = self.layouts.cached(key, partial(layouts_after_turns, tables, *given_layouts))
                first, second = (
                    held_by_index(tables, instance.rule, layouts, factor, groups, axis)
                    for factor in (name, ring.factor)
                )
                known = tuple(self._array(number) for number in given.item.operands)
                plain = self._expansion(given, ((groups.mesh.axes[axis], ()),), 0)

                def by_index(numbers: tuple[int, ...], axis: int = axis) -> Size:
                    return per_rank([numbers[place[axis]] for place in groups.coordinates])

                for arrays in (known, (None,) * len(known)):
                    yield (
                        ring.expand,
                        RingExpansion(**vars(plain), first=first, second=second, arrays=arrays, by_index=by_index),
                        [found],
                    )

    def _expansion(self, given: _Given, cut: Parts, size: Size) -> Expansion:
        values = tuple(self.originals[value.name] for value, _ in given.operands)
        original = given.item.original
        types = (tuple(v.dtensor.tensor for v in side) for side in (original.operands, original.results))
        return Expansion(given.emitter, values, original.attrs, cut, size, *types)

    def _array(self, number: int) -> Any:
        """Return the elements of a tensor, None if they are not known when compiling."""
        if number not in self.arrays:
            op = self.layouts.terms.sources.get(number)
            array = None if op is None else lookup(op.name, op.location).semantics.array
            self.arrays[number] = None if op is None or array is None else array(op.attrs)
        return self.arrays[number]

    def _padded(self, layout: Layout) -> Layout:
        """Return a layout in which devices have as many elements of each dim as the one with most, or padding."""
        tables = self.layouts.tables
        dims = []
        for table in layout.dims:
            most = max(len(tables.rows[row]) for row in tables.tables[table])
            dims.append(tables.table(tables.padded(row, most) for row in tables.tables[table]))
        return replace(layout, dims=tuple(dims))

    def _parts(self, given: _Given) -> Iterator[tuple[str, Parts, Size]]:
        """Iterate over the factors that may be cut: name, how the dim is cut, and its local sizes."""
        placed, groups, rule, numbers = self.layouts, given.groups, given.item.instance.rule, given.item.operands
        for (value, piece), dims, number in zip(given.operands, rule.operands, numbers, strict=True):
            size_of_dims = self.originals[value.name].placed.shape
            for dim, factors in enumerate(dims):
                for kind, symbolic in placed.terms.layouts[number].items() if factors else ():
                    if placed.has_parts(piece, dim, placed.layout(kind, groups.devices, number).dims[dim]):
                        for parts in self._cut(symbolic, dim, groups):
                            yield from ((rule.factors[i].name, parts, size_of_dims[dim]) for i in factors)
        for symbolic, dims in zip(given.kinds, rule.results, strict=True):
            for dim, factors in enumerate(dims):
                for parts in self._cut(symbolic, dim, groups) if factors else ():
                    sizes = self._sizes(symbolic, dim, groups)
                    for local_size in (per_rank(sizes), maximum(*sizes)):
                        yield from ((rule.factors[i].name, parts, local_size) for i in factors)

    def _cut(self, kind: DTensorType, dim: int, groups: Groups) -> Iterator[Parts]:
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
class _Given:
    """An op to expand: its operands in the schedule, and types and layouts that its results may have."""

    item: Expandable
    emitter: _Emitter
    operands: Sequence[tuple[Value, Piece]]
    kinds: Sequence[DTensorType]
    results: Sequence[Layout]
    groups: Groups


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

    # Equal ops have one number.
    earlier = emit
