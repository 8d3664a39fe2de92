"""Check that a schedule computes what the sharded program does.

The sharded stage is the whole computation: ops on whole tensors, with layouts of inputs and outputs. The schedule, the
distributed stage, has the ops that devices run on parts of them. Each value of the schedule is given a piece (`Piece`):
which tensor of the sharded program it is a part of, which elements of it each device holds, and along which axes the
devices hold terms of a pending reduction. Pieces follow from op to op:

- inputs have the layouts that the sharded program gives them;
- an op on pieces must be an op of the sharded program on these tensors, which its factor rule allows to run on such
  pieces (`local_ops`), or the ops that its entry gives for a cut factor (`Split.expand`);
- communication and ops that move elements change who holds which (`Semantics.moved`); a reduction ends a pending one.

The outputs must be the outputs of the sharded program, in their layouts. The check shares no code with the lowering of
the sharded program; of the op table it reads factor rules, expansions, and what ops do with positions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import (
    Attribute,
    DTensorType,
    Function,
    Module,
    Op,
    PlacedType,
    Size,
    TensorType,
    Value,
    at_rank,
    gc_disabled,
    inline,
    per_rank,
    print_op,
)
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.layout import DeviceMesh, Shard, evaluate_size, is_symbolic, local_intervals, local_length, maximum
from distir_relax.layout import Partial as PartialPlacement
from distir_relax.ops import Expansion, Trait, lookup
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.positions import PADDING, Positions, Vector
from distir_relax.ops.table.rule import Rule
from distir_relax.ops.table.spmd_inference import infer_placed, local_attrs
from distir_relax.proof.expressions import Expressions
from distir_relax.proof.local_ops import Instance, expanded_layouts, layouts_of_results
from distir_relax.proof.pieces import SAME, Groups, Layout, Mismatch, Piece, Tables

_HINT = "compile the model again: distir.txt does not compute what sharded.txt does"


@dataclass(frozen=True, slots=True)
class Unproved:
    """An op of the schedule whose result is not known to be a piece, and why."""

    op: Op
    reason: str


def check_schedule(sharded: Module, distributed: Module) -> list[Unproved]:
    """Check a schedule against its sharded program; return the ops that are taken on trust, with reasons.

    Both are verified. Symbolic sizes are given values, typical ones and others (`_sizes`). Raises
    `VerificationError` that names the first op that is none of the sharded program's, with its place in the model.

    If rows go to devices by data, or sums have a fixed order, all ops that depend on them are taken on trust.
    """
    with gc_disabled():
        return _check(sharded, distributed)


def _check(sharded: Module, distributed: Module) -> list[Unproved]:
    found: dict[str, Unproved] = {}
    programs = inline(sharded), inline(distributed)
    limit = _limit(programs[1].main)
    for sizes in _sizes(programs[0]):
        given = [specialize(program, sizes) for program in programs]
        checker = _Schedule(given[0], given[1], programs[0].main, programs[1].main)
        checker.check()
        found.update(checker.assumed)
        if checker.open and not limit:
            first = next(iter(checker.open.values()))
            raise VerificationError(
                f"the schedule does {print_op(first.op)}, which is not the model's op on its parts: {first.reason}",
                first.op.location,
                _HINT,
            )
        found.update((name, Unproved(item.op, limit)) for name, item in checker.open.items())
    return list(found.values())


def _limit(schedule: Function) -> str:
    """Return why not all ops of a schedule can be followed; an empty text if they can."""
    for op in schedule.ops:
        entry = lookup(op.name, op.location)
        is_collective = entry.semantics.collective_semantics is not None and op.operands
        if entry.split.routing is not None or (is_collective and entry.semantics.moved is None):
            return "which rows a device has depends on data"
        if Trait.ADDS_IN_ORDER in entry.traits:
            return "it is part of a sum in a fixed order"
    return ""


def _sizes(sharded: Module) -> list[dict[str, int]]:
    """Return up to three choices of values of symbols by name: typical ones, and others.

    No symbolic size becomes 0 or 1: a dim of one element has no factor that could be cut.
    """
    symbols = module_symbols(sharded)
    if not symbols:
        return [{}]
    shapes = {v.dtensor.shape for op in sharded.main.ops for v in (*op.operands, *op.results)}
    sizes = {size for shape in shapes for size in shape if is_symbolic(size)}
    found: list[dict[str, int]] = []
    for factor, more in product((1, 2, 3, 5, 8), (0, 1)):
        values = {name: factor * s.typical + more * (i + 1) for i, (name, s) in enumerate(symbols.items())}
        values = {name: n if symbols[name].contains(n) else symbols[name].typical for name, n in values.items()}
        if values not in found and all(evaluate_size(size, values) > 1 for size in sizes):
            found.append(values)
    return found[:3]


@dataclass(frozen=True, slots=True)
class _Expandable:
    """An op with `Split.expand`, its form with symbolic sizes, and the numbers of its operands and results."""

    instance: Instance
    original: Op
    operands: tuple[int, ...]
    results: tuple[int, ...]


class _Terms:
    """The tensors of a sharded program, by number: equal expressions have one, and redistribution keeps it."""

    def __init__(self, function: Function, original: Function) -> None:
        self.expressions = Expressions()
        self.numbers: dict[str, int] = {}
        self.types: dict[int, TensorType] = {}
        self.instances: dict[tuple[str, tuple[int, ...]], list[tuple[Instance, tuple[int, ...]]]] = {}
        """Ops by name and numbers of operands, with the numbers of their results."""
        self.expandable: list[_Expandable] = []
        self.constants: dict[int, float] = {}
        self.layouts: defaultdict[int, dict[DTensorType, DTensorType]] = defaultdict(dict)
        """The layouts that the sharded program has of each tensor, each with its symbolic form."""
        self._instances: dict[object, Instance] = {}
        for item, symbolic in zip(function.inputs, original.inputs, strict=True):
            (number,) = self.expressions.new()
            self._name(item.value, symbolic.value, number)
        for op, symbolic_op in zip(function.ops, original.ops, strict=True):
            self._add(op, symbolic_op)
        ends = np.cumsum([0, *(max(1, self.types[n].elements) for n in range(self.expressions.count))])
        self.bases = [int(end) for end in ends]
        """The number of the first element of each tensor among those of all."""

    def _add(self, op: Op, symbolic: Op) -> None:
        entry = lookup(op.name, op.location)
        operands = tuple(self.numbers[v.name] for v in op.operands)
        kinds = [Value(v.name, v.dtensor.tensor) for v in (*op.operands, *op.results)]
        keeps = not entry.traits.isdisjoint({Trait.REDISTRIBUTION, Trait.ANNOTATION, Trait.PLACE})
        if keeps or entry.is_identity(kinds[: len(operands)], kinds[len(operands) :]):
            self._name(op.results[0], symbolic.results[0], operands[0])
            return
        before = self.expressions.count
        results = self.expressions.add(op, operands, op.attrs)
        for value, original, number in zip(op.results, symbolic.results, results, strict=True):
            self._name(value, original, number)
        if self.expressions.count > before:
            instance = self._instance(op)
            self.instances.setdefault((op.name, operands), []).append((instance, results))
            if entry.split.expand:
                self.expandable.append(_Expandable(instance, symbolic, operands, results))
            constant = op.attrs.get("value")
            if Trait.SCALAR in entry.traits and isinstance(constant, (int, float)):
                self.constants[results[0]] = float(constant)

    def _name(self, value: Value, symbolic: Value, number: int) -> None:
        self.numbers[value.name] = number
        self.types[number] = value.dtensor.tensor
        self.layouts[number].setdefault(value.dtensor, symbolic.dtensor)

    def _instance(self, op: Op) -> Instance:
        """Return the instance of an op; equal ones are one object."""
        operands = tuple(v.dtensor.tensor for v in op.operands)
        results = tuple(v.dtensor.tensor for v in op.results)
        key = (op.name, tuple((k, repr(v)) for k, v in sorted(op.attrs.items())), operands, results)
        if key not in self._instances:
            self._instances[key] = Instance(op, operands, results)
        return self._instances[key]

    def term_at(self, number: int) -> int:
        """Return the tensor that an element belongs to, by its number among those of all."""
        return bisect_right(self.bases, number) - 1


class _Schedule:
    def __init__(self, sharded: Module, distributed: Module, symbolic: Function, original: Function) -> None:
        self.sharded = sharded
        self.main = distributed.main
        self.mesh: DeviceMesh = distributed.meshes[0]
        self.terms = _Terms(sharded.main, symbolic)
        self.original_ops = original.ops
        self.originals = {v.name: v for op in original.ops for v in op.results}
        self.originals.update((item.value.name, item.value) for item in original.inputs)
        """The values of the schedule with symbolic sizes, where it has them."""
        self.tables = Tables()
        self.pieces: dict[str, Piece | None] = {}
        self.assumed: dict[str, Unproved] = {}
        """The ops that are taken on trust, by the name of their first result."""
        self.open: dict[str, Unproved] = {}
        """The ops that are not explained so far, by the name of their first result."""
        self.producers = {v.name: op for op in self.main.ops for v in op.results}
        self.groups: dict[tuple[int, ...], Groups] = {}
        self.expansions = _Expansions(self)
        self._memo: dict[object, list[Layout] | Mismatch] = {}
        self._fitting: dict[object, bool] = {}
        self._vectors: dict[tuple[int, int, int], Vector] = {}
        self._origins: dict[int, tuple[int, int, int]] = {}
        """The row, distance and size that each of these vectors, by its identity, is made of."""
        missing = set(sharded.meshes[0].axes) - set(self.mesh.axes)
        if missing:
            raise VerificationError(f"the mesh of the schedule has no axis {min(missing)}", "", _HINT)
        self.axes = [self.mesh.axes.index(axis) for axis in sharded.meshes[0].axes]
        """The numbers of the axes of the sharded program's mesh in that of the schedule."""

    def check(self) -> None:
        """See `check_schedule`."""
        layouts = {item.value.name: item.value.dtensor for item in self.sharded.main.inputs}
        for item in self.main.inputs:
            if item.value.name not in layouts:
                raise VerificationError(
                    f"the schedule takes an input %{item.value.name}, the model does not", "", _HINT
                )
            number = self.terms.numbers[item.value.name]
            given = self.layout(layouts[item.value.name], item.value.placed.devices).of(number)
            self.pieces[item.value.name] = given
            self.expansions.know(item.value, given)
        for op, original in zip(self.main.ops, self.original_ops, strict=True):
            if self.expansions.terms:
                self.expansions.add(original)
            for value, piece in zip(op.results, self._pieces(op), strict=True):
                self.pieces[value.name] = piece
                if piece is not None:
                    self.expansions.know(value, piece)
        self._check_outputs()

    def groups_of(self, devices: tuple[int, ...]) -> Groups:
        """Return the groups of a device set."""
        if devices not in self.groups:
            self.groups[devices] = Groups(self.mesh, devices)
        return self.groups[devices]

    def layout(self, kind: DTensorType, devices: tuple[int, ...]) -> Layout:
        """Return the layout that a type of the sharded program gives to a value on some devices."""
        return self._cached(("layout", kind, devices), lambda: [self._layout(kind, devices)])[0]

    def _layout(self, kind: DTensorType, devices: tuple[int, ...]) -> Layout:
        places = [[place[axis] for axis in self.axes] for place in self.groups_of(devices).coordinates]
        dims = []
        for dim, size in enumerate(kind.shape):
            axes = [i for i, p in enumerate(kind.placements) if isinstance(p, Shard) and p.dim == dim]
            rows: dict[tuple[int, ...], int] = {}
            for place in places:
                key = tuple(place[axis] for axis in axes)
                if key not in rows:
                    parts = local_intervals(kind.placements, dim, size, place)
                    rows[key] = self.tables.row(np.concatenate([np.zeros(0), *(np.arange(a, b) for a, b in parts)]))
            dims.append(self.tables.table(rows[tuple(place[axis] for axis in axes)] for place in places))
        pending = [""] * len(self.mesh.shape)
        for axis, placement in zip(self.axes, kind.placements, strict=True):
            if isinstance(placement, PartialPlacement) and self.mesh.shape[axis] > 1:
                pending[axis] = placement.reduction
        return Layout(tuple(dims), tuple(pending), (None,) * len(dims))

    def _cached(self, key: object, compute: Callable[[], list[Layout]]) -> list[Layout]:
        """Return the layouts that `compute` gives, once for each key; it may raise `Mismatch` instead."""
        found = self._memo.get(key)
        if found is None:
            try:
                found = compute()
            except Mismatch as reason:
                found = reason
            self._memo[key] = found
        if isinstance(found, Mismatch):
            raise found
        return found

    def _pieces(self, op: Op) -> Sequence[Piece | None]:
        """Return the pieces of the results of an op."""
        operands = [self.pieces[value.name] for value in op.operands]
        known = [piece for piece in operands if piece is not None]
        nothing: list[Piece | None] = [None] * len(op.results)
        if len(known) < len(operands):
            found = self._expanded(op)
            if found is None:
                self.open[op.results[0].name] = Unproved(op, "an operand is none of the model's values")
            return found or nothing
        entry = lookup(op.name, op.location)
        try:
            if Trait.TRANSFER in entry.traits:
                return [self._sent(op, known[0])]
            if Trait.ANNOTATION in entry.traits or self._is_identity(op, entry):
                return [self._restricted(op, known[0])]
            if op.operands and entry.semantics.collective_semantics is not None:
                return self._with_terms(op, known, lambda pieces: [self._communicated(op, entry, pieces[0])])
            return self._with_terms(op, known, lambda pieces: self._local(op, entry, pieces))
        except Mismatch as reason:
            found = self._expanded(op) or self._assumed(op, entry)
            if found is None:
                self.open[op.results[0].name] = Unproved(op, str(reason))
            return found or nothing

    def _assumed(self, op: Op, entry: OpDef) -> Sequence[Piece] | None:
        """Return the pieces of rows that data sends to devices, by the layouts of the sharded program; else None."""
        if entry.split.routing is None and (entry.semantics.collective_semantics is None or not op.operands):
            return None
        numbers = [self.terms.numbers.get(value.name) for value in op.results]
        if entry.semantics.moved is not None or None in numbers:
            return None
        self.assumed[op.results[0].name] = Unproved(op, "which rows a device has depends on data")
        layouts = [
            self._claimed(v, n, v.placed.devices) for v, n in zip(op.results, numbers, strict=True) if n is not None
        ]
        return [layout.of(n) for layout, n in zip(layouts, numbers, strict=True) if layout] or None

    def _expanded(self, op: Op) -> Sequence[Piece] | None:
        """Return the pieces of an op's results at the end of an expansion, which explains the ops before it, too."""
        found = self.expansions.results(op)
        worklist = [] if found is None else list(op.operands)
        while worklist:
            name = worklist.pop().name
            if self.pieces[name] is None:
                before = self.producers[name]
                self.open.pop(before.results[0].name, None)
                worklist += before.operands
        return found

    def _with_terms(
        self, op: Op, known: list[Piece], compute: Callable[[list[Piece]], Sequence[Piece]]
    ) -> Sequence[Piece]:
        """Return `compute(known)`; if it raises `Mismatch`, that of pieces as terms of sums."""
        try:
            return compute(known)
        except Mismatch as reason:
            for axes in self._axes():
                changed = [
                    self._as_terms(piece, v.placed.devices, axes) for piece, v in zip(known, op.operands, strict=True)
                ]
                if changed != known:
                    with suppress(Mismatch):
                        return compute(changed)
            raise reason

    def _axes(self) -> Iterator[tuple[int, ...]]:
        """Iterate over sets of mesh axes, small ones first."""
        axes = [axis for axis, size in enumerate(self.mesh.shape) if size > 1]
        for count in range(len(axes)):
            yield from combinations(axes, count + 1)

    def _is_identity(self, op: Op, entry: OpDef) -> bool:
        if Trait.TRIVIAL not in entry.traits or len(op.operands) != 1:
            return False
        source, target = op.operands[0].placed, op.results[0].placed
        if source is target or source == target:
            return True
        if source.dtype != target.dtype or set(target.devices) - set(source.devices):
            return False
        # One that some devices do not execute.
        return op.attrs == {} or all(
            source.local(source.devices.index(d)) == target.local(i) for i, d in enumerate(target.devices)
        )

    def _restricted(self, op: Op, piece: Piece) -> Piece:
        source, target = op.operands[0].placed.devices, op.results[0].placed.devices
        if source == target:
            return piece
        index = {device: position for position, device in enumerate(source)}
        return self._selected(piece, [index[device] for device in target])

    def _selected(self, piece: Piece, positions: Sequence[int]) -> Piece:
        return replace(piece, dims=tuple(self.tables.select(table, positions) for table in piece.dims))

    def _sent(self, op: Op, piece: Piece) -> Piece:
        source, target = op.operands[0].placed.devices, op.results[0].placed.devices
        if len(source) != len(target):
            raise Mismatch("it has other numbers of senders and receivers")
        before, after = self.groups_of(source).coordinates, self.groups_of(target).coordinates
        for axis, reduction in enumerate(piece.pending):
            if reduction and any(a[axis] != b[axis] for a, b in zip(before, after, strict=True)):
                raise Mismatch(f"it sends terms of a pending {reduction} along the axis of the sum")
        return piece

    # Ops on each device

    def _local(self, op: Op, entry: OpDef, pieces: Sequence[Piece]) -> Sequence[Piece]:
        reasons = []
        operands = tuple(piece.term for piece in pieces)
        for instance, results in self._candidates(op, operands):
            try:
                layouts = self._layouts(op, instance, [piece.layout for piece in pieces], operands, results)
                return [layout.of(number) for layout, number in zip(layouts, results, strict=True)]
            except Mismatch as reason:
                reasons.append(str(reason))
        if entry.semantics.moved is not None and op.operands:
            try:
                return [self._moved(op, entry, pieces)]
            except Mismatch as reason:
                reasons.append(str(reason))
        raise Mismatch("; ".join(dict.fromkeys(reasons)) or "the model has no such op on these tensors")

    def _candidates(self, op: Op, operands: tuple[int | None, ...]) -> list[tuple[Instance, tuple[int, ...]]]:
        """Return the ops of the sharded program with these operands, the likeliest first: those with an op's name."""
        candidates = self.terms.instances.get((op.name, operands), [])  # type: ignore[arg-type]
        if len(candidates) < 2:
            return candidates

        def order(candidate: tuple[Instance, tuple[int, ...]]) -> int:
            value, number = op.results[0], candidate[1][0]
            if self.terms.numbers.get(value.name) == number:
                return 0
            layouts = (self.layout(kind, value.placed.devices) for kind in self.terms.layouts[number])
            return 1 if any(self.fits(layout, value.placed) for layout in layouts) else 2

        return sorted(candidates, key=order)

    def _layouts(
        self,
        op: Op,
        instance: Instance,
        layouts: Sequence[Layout],
        operands: tuple[int | None, ...],
        results: tuple[int, ...],
    ) -> list[Layout]:
        devices = op.results[0].placed.devices
        if any(value.placed.devices != devices for value in op.operands):
            raise Mismatch("its operands are on other devices")
        claimed = [self._claimed(value, number, devices) for value, number in zip(op.results, results, strict=True)]
        numbers = [self.terms.constants.get(number) for number in operands if number is not None]
        sizes = tuple(value.placed.shape for value in op.results)
        groups = self.groups_of(devices)
        key = ("op", id(instance), id(op.attrs), groups.key, sizes, tuple(layouts), tuple(claimed), tuple(numbers))
        return self._cached(
            key, lambda: layouts_of_results(self.tables, instance, op, layouts, groups, claimed, numbers)
        )

    def _claimed(self, value: Value, number: int, devices: tuple[int, ...]) -> Layout | None:
        """Return a layout that the sharded program gives to a tensor, in which devices hold as many elements.

        Without one, return a layout in which they do along some dims.
        """
        layouts = [self.layout(kind, devices) for kind in self.terms.layouts[number]]
        found = next((layout for layout in layouts if self.fits(layout, value.placed)), None)
        return found or next((layout for layout in layouts if self.fits(layout, value.placed, 1)), None)

    def fits(self, layout: Layout, kind: PlacedType, dims: int | None = None) -> bool:
        """Whether devices hold as many elements by a layout as by a type, along all dims or at least `dims` of them."""
        if len(layout.dims) != len(kind.shape):
            return False
        least = len(layout.dims) if dims is None else dims
        return sum(self._fits(table, size) for table, size in zip(layout.dims, kind.shape, strict=True)) >= least

    def _fits(self, table: int, size: Size) -> bool:
        key = table, size
        if key not in self._fitting:
            lengths = [len(self.tables.rows[row]) for row in self.tables.tables[table]]
            self._fitting[key] = all(n == at_rank(size, position) for position, n in enumerate(lengths))
        return self._fitting[key]

    # Ops that move elements

    def has_parts(self, table: int, other: int) -> bool:
        """Whether devices have the elements of another table, and padding."""
        pairs = set(zip(self.tables.tables[table], self.tables.tables[other], strict=True))
        vectors = [(self.tables.rows[a], self.tables.rows[b]) for a, b in pairs]
        return all(np.array_equal(a[a >= 0], b) or (a >= SAME).any() for a, b in vectors)

    def _moved(self, op: Op, entry: OpDef, pieces: Sequence[Piece]) -> Piece:
        devices = op.results[0].placed.devices
        pending = {piece.pending for piece in pieces}
        if len(pending) > 1:
            raise Mismatch("only some of its operands are terms of a pending reduction")
        mixed = len({piece.term for piece in pieces}) > 1
        places = [{d: i for i, d in enumerate(value.placed.devices)} for value in op.operands]
        made: dict[object, Positions] = {}
        result = []
        for position, device in enumerate(devices):
            held = [(piece, place[device]) for piece, place in zip(pieces, places, strict=True) if device in place]
            attrs = local_attrs(op.attrs, position)
            key = (tuple((p.term, *(self.tables.tables[t][i] for t in p.dims)) for p, i in held), repr(attrs))
            if key not in made:
                parts = [self._positions(piece, i, mixed) for piece, i in held]
                made[key] = self._apply(entry, parts, attrs)[0]
            result.append(made[key])
        if not op.results[0].placed.shape:
            return self._scalar(pieces[0], pending.pop())
        fill = op.attrs.get("value")
        fills = [
            self._common_fill([p.fills[dim] for p in pieces if dim < len(p.fills)]) for dim in range(len(result[0]))
        ]
        for dim in range(len(result[0])):
            before = [(vector < 0).sum() for vector in self._padded(pieces, dim)]
            if sum(before) == 0 and any((positions[dim] < 0).any() for positions in result):
                fills[dim] = float(fill) if isinstance(fill, (int, float)) else None
        term = None if mixed else pieces[0].term
        return self._piece(result, term, pending.pop(), tuple(fills), op.results[0].placed)

    def _scalar(self, piece: Piece, pending: tuple[str, ...]) -> Piece:
        """Return the piece of the only element of a piece, in no dims."""
        numbers = {sum(int(v[0]) for v in self._positions(piece, i, True)) for i in self._places(piece)}
        term = self.terms.term_at(min(numbers))
        if len(numbers) > 1 or self.terms.bases[term] not in numbers or self.terms.types[term].shape:
            raise Mismatch("it is no scalar of the model")
        return Piece(term, (), pending, ())

    def _places(self, piece: Piece) -> range:
        return range(len(self.tables.tables[piece.dims[0]])) if piece.dims else range(0)

    def _padded(self, pieces: Sequence[Piece], dim: int) -> Iterator[Any]:
        for piece in pieces:
            if dim < len(piece.dims):
                for row in set(self.tables.tables[piece.dims[dim]]):
                    yield self.tables.rows[row]

    @staticmethod
    def _common_fill(fills: Sequence[float | None]) -> float | None:
        return fills[0] if fills and len(set(fills)) == 1 else None

    @staticmethod
    def _apply(entry: OpDef, parts: Sequence[Positions], attrs: Mapping[str, Attribute]) -> list[Positions]:
        assert entry.semantics.moved is not None
        try:
            return entry.semantics.moved(parts, attrs)
        except ValueError as error:
            raise Mismatch(str(error)) from None

    def _positions(self, piece: Piece, position: int, absolute: bool) -> Positions:
        """Return the numbers of the elements of a piece on one device; with `absolute` among those of all tensors."""
        rows = [self.tables.tables[table][position] for table in piece.dims]
        if piece.term is None:
            return [self.tables.rows[row] for row in rows]
        shape = self.terms.types[piece.term].shape
        result = [self._spaced(row, _stride(shape, dim), shape[dim]) for dim, row in enumerate(rows)]
        if absolute and result:
            base = self.terms.bases[piece.term]
            result[0] = np.where((result[0] >= 0) & (result[0] < SAME), result[0] + base, result[0])
        return result

    def _spaced(self, row: int, stride: int, size: int) -> Vector:
        """Return the numbers of elements of a dim of `size`, which are `stride` apart; equal ones are one object."""
        key = row, stride, size
        if key not in self._vectors:
            vector = self.tables.rows[row]
            self._vectors[key] = np.where((vector >= 0) & (vector < SAME), vector * stride, vector)
            self._origins[id(self._vectors[key])] = key
        return self._vectors[key]

    def _piece(
        self,
        positions: Sequence[Positions],
        term: int | None,
        pending: tuple[str, ...],
        fills: tuple[float | None, ...],
        kind: PlacedType,
    ) -> Piece:
        """Return the piece of elements with these numbers on each device: those of `term`, or of all tensors."""
        base = 0
        if term is None:
            numbers = [sum(int(v[0]) for v in vectors) for vectors in positions if all(len(v) for v in vectors)]
            term = self.terms.term_at(min(numbers)) if numbers and min(numbers) >= 0 else None
            base = self.terms.bases[term] if term is not None else 0
        rows = None if term is None else self._rows(positions, term, base)
        if rows is not None:
            return Piece(term, tuple(self.tables.table(column) for column in zip(*rows, strict=True)), pending, fills)
        if term is not None and base == 0:
            # The numbers of a known tensor, in other dims than its own.
            base = self.terms.bases[term]
            positions = [[vectors[0] + base, *vectors[1:]] if vectors else vectors for vectors in positions]
        tables = tuple(
            self.tables.table(self.tables.row(vectors[dim]) for vectors in positions) for dim in range(len(kind.shape))
        )
        return Piece(None, tables, pending, fills)

    def _rows(self, positions: Sequence[Positions], term: int, base: int) -> list[list[int]] | None:
        """Return the rows of elements of a tensor on each device; None if its dims are not those of the tensor."""
        shape = self.terms.types[term].shape
        if len(positions[0]) != len(shape):
            return None
        made: dict[int, list[int] | None] = {}
        rows = []
        for vectors in positions:
            if id(vectors) not in made:
                made[id(vectors)] = self._regular(vectors, shape, base)
            row = made[id(vectors)]
            if row is None:
                return None
            rows.append(row)
        return rows

    def _regular(self, vectors: Positions, shape: Sequence[int], base: int) -> list[int] | None:
        rows = []
        for dim, (vector, size) in enumerate(zip(vectors, shape, strict=True)):
            stride = _stride(shape, dim)
            row, its_stride, its_size = self._origins.get(id(vector), (-1, 0, 0))
            if (its_stride, its_size) == (stride, size) and (base == 0 or dim > 0):
                # An op that moves elements along other dims returns the numbers of this one as they are.
                rows.append(row)
                continue
            inside = (vector >= 0) & (vector < SAME)
            offset = vector - (base if dim == 0 else 0)
            index = offset // stride
            if not np.array_equal((index * stride)[inside], offset[inside]) or (index[inside] >= max(size, 1)).any():
                return None
            if (index[inside] < 0).any():
                return None
            is_same = len(vector) > 0 and bool((vector >= SAME).all())
            row = self.tables.row(np.where(inside, index, np.where(vector < 0, PADDING, SAME)))
            rows.append(self.tables.same(len(vector), size) if is_same else row)
        return rows

    def _communicated(self, op: Op, entry: OpDef, piece: Piece) -> Piece:
        """Return the piece that a collective gives, computed once for tensors of the same sizes and layouts."""
        if piece.term is None:
            return self._collective(op, entry, piece)
        attrs = tuple(sorted((key, repr(value)) for key, value in op.attrs.items()))
        shape = self.terms.types[piece.term].shape
        key = ("collective", op.name, attrs, op.results[0].placed, shape, piece.layout)
        moved: list[Piece] = []

        def compute() -> list[Layout]:
            moved.append(self._collective(op, entry, piece))
            return [moved[0].layout] if moved[0].term == piece.term else []

        found = self._cached(key, compute)
        if found:
            return found[0].of(piece.term)
        return moved[0] if moved else self._collective(op, entry, piece)

    def _collective(self, op: Op, entry: OpDef, piece: Piece) -> Piece:
        devices = op.results[0].placed.devices
        if entry.semantics.moved is None:
            raise Mismatch("what it moves depends on data")
        axis = self.mesh.axes.index(str(op.attrs["axis"]))
        pending, reduction = piece.pending, op.attrs.get("op")
        groups = self.groups_of(devices)
        if reduction is not None:
            is_same = not pending[axis] and (reduction != "sum" or self.mesh.shape[axis] == 1)
            if pending[axis] != reduction and not is_same:
                raise Mismatch(
                    f"it reduces by {reduction} along {self.mesh.axes[axis]} a value that is "
                    + (f"a term of a pending {pending[axis]}" if pending[axis] else "no term of a sum")
                )
            pending = (*pending[:axis], "", *pending[axis + 1 :])
        elif pending[axis]:
            raise Mismatch(f"it moves terms of a pending {pending[axis]} along the axis of the sum")
        tables = [self.tables.tables[table] for table in piece.dims]
        result: list[Positions] = [[] for _ in devices]
        made: dict[object, list[Positions]] = {}
        for group in groups.along((axis,)):
            attrs = local_attrs(op.attrs, group[0])
            rows = tuple(tuple(table[position] for table in tables) for position in group)
            if reduction is not None and len(set(rows)) > 1:
                raise Mismatch("it reduces different elements")
            key = (rows, repr(attrs))
            if key not in made:
                made[key] = self._apply(entry, [self._positions(piece, position, False) for position in group], attrs)
            for position, positions in zip(group, made[key], strict=True):
                result[position] = positions
        return self._piece(result, piece.term, pending, piece.fills, op.results[0].placed)

    def _as_terms(self, piece: Piece, devices: tuple[int, ...], axes: Sequence[int]) -> Piece:
        """Return a piece as terms of sums, if devices along axes have each element at most once, others zeros there."""
        groups = self.groups_of(devices)
        for dim, axis in product(range(len(piece.dims)), axes):
            rows = self.tables.tables[piece.dims[dim]]
            if piece.term is None or piece.fills[dim] != 0.0 or not any(map(self.tables.is_padded, set(rows))):
                continue
            whole = self._united(rows, groups.along((axis,))) if axis in groups.varies(rows) else None
            if whole is not None and not piece.pending[axis]:
                pending = (*piece.pending[:axis], "sum", *piece.pending[axis + 1 :])
                piece = replace(piece, dims=(*piece.dims[:dim], whole, *piece.dims[dim + 1 :]), pending=pending)
        return piece

    def _united(self, rows: Sequence[int], groups: Sequence[Sequence[int]]) -> int | None:
        """Return the table of the elements that a group has together, each at its place on one device at most."""
        united = [0] * len(rows)
        for group in groups:
            vectors = [self.tables.rows[rows[position]] for position in group]
            if len({len(vector) for vector in vectors}) > 1:
                return None
            stacked = np.stack(vectors)
            if ((stacked >= 0).sum(axis=0) > 1).any():
                return None
            for position in group:
                united[position] = self.tables.row(stacked.max(axis=0))
        return self.tables.table(united)

    def _check_outputs(self) -> None:
        outputs = self.sharded.main.outputs
        if [o.name for o in outputs] != [o.name for o in self.main.outputs]:
            raise VerificationError("the schedule has other outputs than the model", "", _HINT)
        for expected, actual in zip(outputs, self.main.outputs, strict=True):
            piece = self.pieces[actual.value.name]
            if piece is None:
                continue
            devices = actual.value.placed.devices
            wanted = self.layout(expected.value.dtensor, devices).of(self.terms.numbers[expected.value.name])
            forms = [piece, *(self._as_terms(piece, devices, axes) for axes in self._axes())]
            if not any(self._is(form, wanted) for form in forms):
                what = "another value" if piece.term != wanted.term else "other parts, or terms of a sum,"
                raise VerificationError(
                    f"the schedule gives {what} as the output {expected.name!r}", f"output {expected.name!r}", _HINT
                )

    def _is(self, piece: Piece, wanted: Piece) -> bool:
        """Whether a piece is another, or equal to it."""
        if (piece.term, piece.pending) != (wanted.term, wanted.pending):
            return False
        tables = self.tables.tables
        pairs_of_dims = [zip(tables[a], tables[b], strict=True) for a, b in zip(piece.dims, wanted.dims, strict=True)]
        columns = zip(*pairs_of_dims, strict=True)
        # A device without elements has them all.
        return all(
            all(self.tables.may_be(a, b) for a, b in pairs)
            or all(any(not len(self.tables.rows[pair[side]]) for pair in pairs) for side in (0, 1))
            for pairs in set(columns)
        )


def _stride(shape: Sequence[int], dim: int) -> int:
    """Return how far elements that are neighbours along a dim are apart in the order of all."""
    return math.prod(max(1, size) for size in shape[dim + 1 :])


class _Expansions:
    """Ops of the sharded program that devices run as other ops, because a factor of theirs is cut.

    Both the ops of the schedule and those that an entry gives have numbers: equal ops on equal operands have one. A
    value with the number of an expansion's result is a piece of the op's result.
    """

    def __init__(self, schedule: _Schedule) -> None:
        self.schedule = schedule
        self.terms = {number for item in schedule.terms.expandable for number in item.operands}
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
        is_opaque = op.operands and Trait.ON_COMMUNICATOR in entry.traits
        self._number(op.name, op.operands, op.attrs, op.results, opaque=bool(is_opaque))

    def know(self, value: Value, piece: Piece) -> None:
        """Note that a value is a piece of a tensor."""
        if piece.term in self.terms:
            self.values[piece.term].append((value, piece))

    def results(self, op: Op) -> Sequence[Piece] | None:
        """Return the pieces of an op's results, if it is the end of an expansion."""
        if not self.terms:
            return None
        found = self._expected(op)
        if found is None:
            self._expand(op.results[0].placed.devices)
            found = self._expected(op)
        return found

    def _expected(self, op: Op) -> list[Piece] | None:
        pieces = []
        for value in op.results:
            options = self.expected.get(self.numbers[value.name], ())
            fitting = [piece for piece in options if self.schedule.fits(piece.layout, value.placed)]
            if not fitting:
                return None
            pieces.append(fitting[0])
        return pieces

    def _expand(self, devices: tuple[int, ...]) -> None:
        """Expand the ops whose operands the schedule has by now."""
        for item in self.schedule.terms.expandable:
            for chosen in product(*(self.values[number] for number in item.operands)):
                key = (item.results, tuple(value.name for value, _ in chosen))
                if key not in self.tried and all(value.placed.devices == devices for value, _ in chosen):
                    self.tried.add(key)
                    self._expand_one(item, chosen, devices)

    def _expand_one(self, item: _Expandable, operands: Sequence[tuple[Value, Piece]], devices: tuple[int, ...]) -> None:
        schedule, instance = self.schedule, item.instance
        groups = schedule.groups_of(devices)
        layouts = [piece.layout for _, piece in operands]
        values = tuple(schedule.originals[value.name] for value, _ in operands)
        for kinds in product(*(schedule.terms.layouts[number].items() for number in item.results)):
            claimed = [schedule.layout(kind, devices) for kind, _ in kinds]
            try:
                found, rule = expanded_layouts(schedule.tables, instance, layouts, groups, claimed)
            except Mismatch:
                continue
            types = [tuple(v.dtensor.tensor for v in side) for side in (item.original.operands, item.original.results)]
            emitter = _Emitter(self, devices, instance.op.location)
            parts = list(self._parts(rule, item, operands, values, [kind for _, kind in kinds], groups))
            for (name, expand), (factor, cut, size) in product(instance.entry.split.expand.items(), parts):
                if name in ("*", factor):
                    try:
                        made = expand(Expansion(emitter, values, item.original.attrs, cut, size, *types))
                    except (DistIRError, ValueError):
                        continue
                    for value, layout, number in zip(made, found, item.results, strict=True):
                        self.expected[self.numbers[value.name]].append(layout.of(number))

    def _parts(
        self,
        rule: Rule,
        item: _Expandable,
        operands: Sequence[tuple[Value, Piece]],
        values: Sequence[Value],
        results: Sequence[DTensorType],
        groups: Groups,
    ) -> Iterator[tuple[str, tuple[tuple[str, tuple[Size, ...]], ...], Size]]:
        """Iterate over the factors that may be cut: name, how the dim is cut, and its local sizes."""
        schedule = self.schedule
        for (_, piece), original, dims, number in zip(operands, values, rule.operands, item.operands, strict=True):
            for dim, factors in enumerate(dims):
                for kind, symbolic in schedule.terms.layouts[number].items() if factors else ():
                    if schedule.has_parts(piece.dims[dim], schedule.layout(kind, groups.devices).dims[dim]):
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
        mesh, axes = groups.mesh, self.schedule.axes
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
        places = [tuple(place[axis] for axis in self.schedule.axes) for place in groups.coordinates]
        lengths = {place: local_length(kind.placements, dim, kind.shape[dim], place) for place in set(places)}
        return [lengths[place] for place in places]

    def _number(
        self,
        name: str,
        operands: Sequence[Value],
        attrs: Mapping[str, Attribute],
        results: Sequence[Value],
        opaque: bool = False,
    ) -> None:
        numbers = tuple(self._number_of(value) for value in operands)
        items = tuple((key, repr(value)) for key, value in sorted(attrs.items()))
        devices = results[0].placed.devices
        key = object() if opaque else (name, numbers, items, devices)
        if key not in self.made:
            self.count += len(results)
            self.made[key] = tuple(range(self.count - len(results), self.count))
        self.numbers.update((value.name, n) for value, n in zip(results, self.made[key], strict=True))

    def _number_of(self, value: Value) -> int:
        if value.name not in self.numbers:
            self.count += 1
            self.numbers[value.name] = self.count - 1
        return self.numbers[value.name]


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Gives the ops of an expansion numbers."""

    expansions: _Expansions
    devices: tuple[int, ...]
    location: str

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """See `Emitter.emit`."""
        kinds = infer_placed(name, [v.placed for v in operands], attrs, self.devices, self.location)
        self.expansions.emitted += 1
        # No value of a program has a name with a space.
        results = tuple(Value(f"expanded {self.expansions.emitted} {i}", kind) for i, kind in enumerate(kinds))
        self.expansions._number(name, operands, attrs, results)
        return results[0] if len(results) == 1 else results
