"""Check that a schedule computes what the sharded program does.

The sharded stage is the whole computation: ops on whole tensors, with layouts of inputs and outputs. The schedule, the
distributed stage, has the ops that devices run on parts of them. Each value of the schedule is given a piece (`Piece`):
which tensor of the sharded program it is a part of, which elements of it each device holds, and along which axes the
devices hold terms of a pending reduction. Pieces follow from op to op:

- inputs have the layouts that the sharded program gives them;
- an op on pieces must be an op of the sharded program on these tensors, which its factor rule allows to run on such
  pieces (`local_ops`), or the ops that its entry gives for a cut factor (`Split.expand`);
- communication and ops that move elements change who holds which (`Semantics.moved`); a reduction ends a pending one;
- terms of a sum that are moved are tensors of their own, until a sum in a stated order adds all of them;
- rows that are sent by data are the model's on the device of their group (`Routed`), and ops must act on each alone.

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
from distir_relax.ops import Expansion, Routing, Trait, evaluate, lookup
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.positions import PADDING, Positions, Vector
from distir_relax.ops.table.rule import Rule
from distir_relax.ops.table.spmd_inference import infer_placed, local_attrs
from distir_relax.proof.expressions import Expressions
from distir_relax.proof.local_ops import Instance, expanded_layouts, layouts_of_results
from distir_relax.proof.pieces import Equalities, Groups, Layout, Mismatch, Piece, Routed, Tables

_FEW = 1 << 16
"""The elements of a tensor up to which its other shapes are followed."""

_HINT = "compile the model again: distir.txt does not compute what sharded.txt does"


def check_schedule(sharded: Module, distributed: Module) -> None:
    """Check a schedule against its sharded program.

    Both are verified. Symbolic sizes are given values, typical ones and others (`_sizes`). Raises
    `VerificationError` that names the first op that is none of the sharded program's, with its place in the model.
    """
    with gc_disabled():
        _check(sharded, distributed)


def _check(sharded: Module, distributed: Module) -> None:
    programs = inline(sharded), inline(distributed)
    for sizes in _sizes(programs[0]):
        given = [specialize(program, sizes) for program in programs]
        checker = _Schedule(given[0], given[1], programs[0].main, programs[1].main)
        checker.check()
        if checker.open:
            op, reason = next(iter(checker.open.values()))
            raise VerificationError(
                f"the schedule does {print_op(op)}, which is not the model's op on its parts: {reason}",
                op.location,
                _HINT,
            )


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

    def __init__(self, function: Function, original: Function, tables: Tables, attributes: _Attributes) -> None:
        self.tables = tables
        self.attributes = attributes
        self.expressions = Expressions()
        self.numbers: dict[str, int] = {}
        self.types: dict[int, TensorType] = {}
        self.equalities: dict[int, Equalities] = {}
        """Those of the dims of each tensor."""
        self.instances: dict[tuple[str, tuple[int, ...]], list[tuple[Instance, tuple[int, ...]]]] = {}
        """Ops by name and numbers of operands, with the numbers of their results."""
        self.expandable: list[_Expandable] = []
        self.constants: dict[int, float] = {}
        self.layouts: defaultdict[int, dict[DTensorType, DTensorType]] = defaultdict(dict)
        """The layouts that the sharded program has of each tensor, each with its symbolic form."""
        self.routed: dict[tuple[int, int], set[int]] = {}
        """By rows and the groups of each, of rows that are sent by data: the tensors with the numbers of all groups."""
        self.shapes: dict[int, list[int]] = {}
        """For each tensor that has them, the tensors of its elements in other shapes, and itself."""
        self.sources: dict[int, Op] = {}
        """The ops without operands, by the numbers of their results."""
        self.shares: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        """The tensors of the terms of sums (`share`), each with the sum, the axis, and the coordinates of a device."""
        self._share_numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._instances: dict[object, tuple[Instance, list[Equalities]]] = {}
        for item, symbolic in zip(function.inputs, original.inputs, strict=True):
            (number,) = self.expressions.new()
            self.equalities[number] = (None,) * len(item.value.dtensor.shape)
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
        if entry.split.routing in (Routing.DISPATCH, Routing.COMBINE) and self._is_numbered(operands[2]):
            # Rows are the same rows, wherever they are.
            self._name(op.results[0], symbolic.results[0], operands[0])
            self.routed.setdefault((operands[0], operands[1]), set()).add(operands[2])
            self.instances.setdefault((op.name, operands), [(self._instance(op, operands)[0], operands[:1])])
            return
        before = self.expressions.count
        results = self.expressions.add(op, operands, op.attrs)
        for value, original, number in zip(op.results, symbolic.results, results, strict=True):
            self._name(value, original, number)
        if self.expressions.count > before:
            instance, equalities = self._instance(op, operands)
            self.equalities.update(zip(results, equalities, strict=True))
            self.instances.setdefault((op.name, operands), []).append((instance, results))
            if not operands:
                self.sources[results[0]] = op
            if self._keeps_elements(op, entry):
                shapes = self.shapes.setdefault(operands[0], [operands[0]])
                shapes.append(results[0])
                self.shapes[results[0]] = shapes
            if entry.split.expand:
                self.expandable.append(_Expandable(instance, symbolic, operands, results))
            constant = op.attrs.get("value")
            if Trait.SCALAR in entry.traits and isinstance(constant, (int, float)):
                self.constants[results[0]] = float(constant)

    def _name(self, value: Value, symbolic: Value, number: int) -> None:
        self.numbers[value.name] = number
        self.types[number] = value.dtensor.tensor
        self.layouts[number].setdefault(value.dtensor, symbolic.dtensor)

    def _instance(self, op: Op, operands: Sequence[int]) -> tuple[Instance, list[Equalities]]:
        """Return the instance of an op, and the equalities of its results; equal instances are one object."""
        kinds = tuple(v.dtensor.tensor for v in op.operands)
        results = tuple(v.dtensor.tensor for v in op.results)
        equalities = tuple(self.equalities[number] for number in operands)
        key = (op.name, self.attributes.of(op), kinds, results, equalities)
        if key not in self._instances:
            instance = Instance(op, kinds, results, equalities)
            self._instances[key] = instance, instance.equalities_of_results(self.tables)
        return self._instances[key]

    def _is_numbered(self, number: int) -> bool:
        """Whether a tensor has the numbers from 0 on."""
        op = self.sources.get(number)
        return op is not None and bool(np.array_equal(evaluate(op, [])[0], np.arange(self.types[number].elements)))

    def _keeps_elements(self, op: Op, entry: OpDef) -> bool:
        """Whether an op on a tensor, which is not large, gives its elements in the same order."""
        if entry.semantics.moved is None or len(op.operands) != 1 or len(op.results) != 1:
            return False
        kinds = [value.dtensor.tensor for value in (*op.operands, *op.results)]
        if kinds[0].elements != kinds[1].elements or not 0 < kinds[0].elements <= _FEW:
            return False
        numbered = [[np.arange(n) * _stride(k.shape, dim) for dim, n in enumerate(k.shape)] for k in kinds]
        return _same_positions(entry.semantics.moved(numbered[:1], op.attrs)[0], numbered[1])

    def share(self, term: int, axis: int, place: tuple[int, ...]) -> int:
        """Return the tensor of the terms that a device adds to a pending sum along an axis, by its coordinates."""
        key = term, axis, place
        if key not in self._share_numbers:
            number = self._share_numbers[key] = len(self.bases) - 1
            self.shares[number] = key
            self.types[number], self.equalities[number] = self.types[term], (None,) * len(self.types[term].shape)
            self.bases.append(self.bases[-1] + max(1, self.types[term].elements))
        return self._share_numbers[key]

    def term_at(self, number: int) -> int:
        """Return the tensor that an element belongs to, by its number among those of all."""
        return bisect_right(self.bases, number) - 1


class _Schedule:
    def __init__(self, sharded: Module, distributed: Module, symbolic: Function, original: Function) -> None:
        self.sharded = sharded
        self.main = distributed.main
        self.mesh: DeviceMesh = distributed.meshes[0]
        self.tables = Tables()
        self.attributes = _Attributes()
        self.terms = _Terms(sharded.main, symbolic, self.tables, self.attributes)
        self.original_ops = original.ops
        self.originals = {v.name: v for op in original.ops for v in op.results}
        self.originals.update((item.value.name, item.value) for item in original.inputs)
        """The values of the schedule with symbolic sizes, where it has them."""
        self.pieces: dict[str, Piece | None] = {}
        self.open: dict[str, tuple[Op, str]] = {}
        """The ops that are not explained so far, and why, by the name of their first result."""
        self.producers = {v.name: op for op in self.main.ops for v in op.results}
        self.groups: dict[tuple[int, ...], Groups] = {}
        self._groups: dict[int, Groups] = {}
        """The groups of device sets, by identity."""
        self.expansions = _Expansions(self)
        self._memo: dict[object, list[Layout] | Mismatch] = {}
        self._fitting: dict[object, bool] = {}
        self._having: dict[object, bool] = {}
        self._vectors: dict[tuple[int, int, int, int | None], Vector] = {}
        self._origins: dict[int, tuple[int, int, int, int | None]] = {}
        """The row, distance, size and equality that each of these vectors, by its identity, is made of."""
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
            given = self.layout(layouts[item.value.name], item.value.placed.devices, number).of(number)
            self.pieces[item.value.name] = given
            self.expansions.know(item.value, [given])
        for op, original in zip(self.main.ops, self.original_ops, strict=True):
            if self.terms.expandable:
                self.expansions.add(original)
            for value, piece in zip(op.results, self._pieces(op), strict=True):
                self.pieces[value.name] = piece
                if piece is not None and piece.term in self.expansions.terms:
                    self.expansions.know(value, list(self._forms(piece, value.placed.devices)))
        self._check_outputs()

    def groups_of(self, devices: tuple[int, ...]) -> Groups:
        """Return the groups of a device set."""
        # Most equal device sets are one object, and the hash of a large one takes long.
        found = self._groups.get(id(devices))
        if found is None:
            found = self.groups.setdefault(devices, Groups(self.mesh, devices))
            if found.devices is devices:
                self._groups[id(devices)] = found
        return found

    def layout(self, kind: DTensorType, devices: tuple[int, ...], number: int) -> Layout:
        """Return the layout that a type of the sharded program gives to a tensor on some devices."""
        equalities = self.terms.equalities[number]
        key = ("layout", kind, id(self.groups_of(devices)), equalities)
        return self._cached(key, lambda: [self._layout(kind, devices, equalities)])[0]

    def _layout(self, kind: DTensorType, devices: tuple[int, ...], equalities: Equalities) -> Layout:
        places = [[place[axis] for axis in self.axes] for place in self.groups_of(devices).coordinates]
        dims = []
        for dim, size in enumerate(kind.shape):
            axes = [i for i, p in enumerate(kind.placements) if isinstance(p, Shard) and p.dim == dim]
            rows: dict[tuple[int, ...], int] = {}
            for place in places:
                key = tuple(place[axis] for axis in axes)
                if key not in rows:
                    parts = local_intervals(kind.placements, dim, size, place)
                    row = self.tables.row(np.concatenate([np.zeros(0), *(np.arange(a, b) for a, b in parts)]))
                    rows[key] = self.tables.first(row, equalities[dim])
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
                self.open[op.results[0].name] = (op, "an operand is none of the model's values")
            return found or nothing
        entry = lookup(op.name, op.location)
        try:
            if Trait.TRANSFER in entry.traits:
                return [self._sent(op, known[0])]
            if Trait.ANNOTATION in entry.traits or self._is_identity(op, entry):
                return [self._restricted(op, known[0])]
            if entry.split.routing is not None and entry.semantics.collective_semantics is not None:
                return [self._exchanged(op, entry.split.routing, *known)]
            if op.operands and entry.semantics.collective_semantics is not None:
                return self._with_terms(op, known, lambda pieces: [self._communicated(op, entry, pieces[0])])
            if Trait.ADDS_IN_ORDER in entry.traits:
                return [self._sum_in_order(op, known)]
            if entry.split.routing is Routing.WITHIN:
                known = self._all_as_routed(known)
            return self._local(op, entry, known)
        except Mismatch as reason:
            found = self._expanded(op)
            if found is None:
                self.open[op.results[0].name] = (op, str(reason))
            return found or nothing

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

    def _forms(self, piece: Piece, devices: tuple[int, ...]) -> Iterator[Piece]:
        """Iterate over a piece and the forms of it as terms of sums."""
        yield piece
        found = {piece}
        for axes in self._axes():
            form = self._as_terms(piece, devices, axes)
            if form not in found:
                found.add(form)
                yield form

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
        dims = tuple(self.tables.select(table, positions) for table in piece.dims)
        zeros = frozenset(i for i, position in enumerate(positions) if position in piece.zeros)
        routed = piece.routed
        if routed is not None:
            routed = replace(routed, groups=self.tables.select(routed.groups, positions))
        return replace(piece, dims=dims, zeros=zeros, routed=routed)

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

    def _local(self, op: Op, entry: OpDef, pieces: list[Piece]) -> Sequence[Piece]:
        reasons = []
        try:
            return self._with_terms(op, pieces, lambda forms: self._of_model(op, forms))
        except Mismatch as reason:
            reasons.append(str(reason))
        if entry.semantics.moved is not None and op.operands:
            try:
                return self._with_terms(op, pieces, lambda forms: self._moved(op, entry, forms))
            except Mismatch as reason:
                reasons.append(str(reason))
        raise Mismatch("; ".join(dict.fromkeys(reasons)))

    def _of_model(self, op: Op, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the pieces of the results of an op of the sharded program on these pieces."""
        reasons = []
        operands = tuple(piece.term for piece in pieces)
        for instance, results in self._candidates(op, operands):
            try:
                layouts = self._layouts(op, instance, [piece.layout for piece in pieces], operands, results)
                return [layout.of(number) for layout, number in zip(layouts, results, strict=True)]
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
            layouts = (self.layout(kind, value.placed.devices, number) for kind in self.terms.layouts[number])
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
        routing = instance.entry.split.routing
        given = list(layouts) if routing is None else [replace(layout, routed=None) for layout in layouts]
        groups = self.groups_of(devices)
        key = (
            "op",
            id(instance),
            self.attributes.of(op),
            groups.key,
            sizes,
            tuple(given),
            tuple(claimed),
            tuple(numbers),
        )
        made = self._cached(key, lambda: layouts_of_results(self.tables, instance, op, given, groups, claimed, numbers))
        return made if routing is None else self._routed(routing, instance, layouts, operands[-2], made, groups)

    # Rows by data

    def _routed(
        self,
        routing: Routing,
        instance: Instance,
        layouts: Sequence[Layout],
        ids: int | None,
        made: Sequence[Layout],
        groups: Groups,
    ) -> list[Layout]:
        """Return the layouts of the results of an op on rows that devices have by data.

        It leaves zeros in rows of other groups, so that its result is a term of a sum over the groups, too.
        """
        own = Routed(0, -1 if ids is None else ids, layouts[-1].dims[0])
        routed = {replace(layout.routed, dim=0) for layout in layouts if layout.routed is not None}
        if routed - {own} or (routed and routing is Routing.DISPATCH):
            raise Mismatch("devices have the rows of other groups")
        is_whole = self._have_all(own.groups, instance.operands[-1])
        if routing is Routing.COMBINE or is_whole or (routing is Routing.WITHIN and not routed):
            return list(made)
        axes = groups.varies(self.tables.tables[own.groups])
        factors = [factor.name for factor in instance.rule.factors]
        results = []
        for layout, dims in zip(made, instance.rule.results, strict=True):
            places = [dim for dim, item in enumerate(dims) if [factors[i] for i in item] == ["row"]]
            if places:
                pending = tuple("" if axis in axes else reduction for axis, reduction in enumerate(layout.pending))
                layout = replace(layout, pending=pending, zeros=frozenset(), routed=replace(own, dim=places[0]))
            elif any(layout.pending[axis] for axis in axes):
                raise Mismatch("it needs all rows of its groups")
            results.append(layout)
        return results

    def _all_as_routed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the operands of an op on rows by data: of all rows, devices have those of their groups, too."""
        *_, ids, groups = pieces
        if ids.term is None or groups.term is None or self._have_all(groups.dims[0], self.terms.types[groups.term]):
            return list(pieces)
        routed = Routed(0, ids.term, groups.dims[0])
        sent = {
            rows
            for (rows, of_rows), numbers in self.terms.routed.items()
            if of_rows == ids.term and groups.term in numbers
        }
        return [
            replace(piece, routed=routed) if piece.routed is None and piece.term in sent else piece for piece in pieces
        ]

    def _have_all(self, table: int, groups: TensorType) -> bool:
        """Whether all devices have all groups, and so all rows."""
        whole = self.tables.range(groups.elements)
        return all(row == whole for row in self.tables.tables[table])

    def _exchanged(self, op: Op, routing: Routing, rows: Piece, ids: Piece) -> Piece:
        """Return the piece of rows that are sent to the devices of their groups, or back to where they came from."""
        axis = self.mesh.axes.index(str(op.attrs["axis"]))
        devices = op.results[0].placed.devices
        held = [self.tables.tables[table] for table in rows.dims]
        of_ids = self.tables.tables[ids.dims[0]]
        table = [0] * len(devices)
        result = [list(column) for column in held]
        if rows.term is None or ids.term is None or any(ids.pending) or rows.pending[axis] or ids.routed or ids.zeros:
            raise Mismatch("what it sends by data is not known")
        found = list(self.terms.routed.get((rows.term, ids.term), ()))
        for group in self.groups_of(devices).along((axis,)):
            attrs: Mapping[str, Any] = local_attrs(op.attrs, group[0])
            ranges = [self.tables.range(last - first, first) for first, last in attrs["groups"]]
            ends = np.cumsum(attrs["sizes"])
            whole = self.tables.rows[of_ids[group[0]]]
            if len({of_ids[i] for i in group}) > 1 or any(len({row[i] for i in group}) > 1 for row in held[1:]):
                raise Mismatch("devices know the groups of other rows")
            if len(ends) != len(group) or ends[-1] != len(whole):
                raise Mismatch("it sends other numbers of rows")
            for position, own, end, size in zip(group, ranges, ends, attrs["sizes"], strict=True):
                part = self.tables.row(whole[end - size : end])
                before, after = (part, of_ids[position]) if routing is Routing.DISPATCH else (of_ids[position], part)
                equality = self.terms.equalities[rows.term][0]
                if held[0][position] != self.tables.first(before, equality):
                    raise Mismatch("it sends other rows than those of which it knows the groups")
                result[0][position], table[position] = self.tables.first(after, equality), own
            owned = np.sort(np.concatenate([self.tables.rows[row] for row in ranges]))
            found = [number for number in found if np.array_equal(owned, np.arange(self.terms.types[number].elements))]
        routed = Routed(0, ids.term, self.tables.table(table))
        if rows.routed != (None if routing is Routing.DISPATCH else routed):
            raise Mismatch("devices have the rows of other groups")
        if not found:
            raise Mismatch("the model sends no such rows")
        dims = tuple(map(self.tables.table, result))
        return Piece(
            rows.term, dims, rows.pending, (None,) * len(dims), frozenset(),
            routed if routing is Routing.DISPATCH else None,
        )  # fmt: skip

    def _claimed(self, value: Value, number: int, devices: tuple[int, ...]) -> Layout | None:
        """Return a layout that the sharded program gives to a tensor, in which devices hold as many elements.

        Without one, return a layout in which they do along some dims.
        """
        layouts = [self.layout(kind, devices, number) for kind in self.terms.layouts[number]]
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

    def has_parts(self, piece: Piece, dim: int, other: int) -> bool:
        """Whether devices have the elements of another table of a dim, and padding, or nothing of the piece at all."""
        key = piece.dims, dim, other
        if key not in self._having:
            self._having[key] = self._have_parts(piece, dim, other)
        return self._having[key]

    def _have_parts(self, piece: Piece, dim: int, other: int) -> bool:
        devices = zip(*(self.tables.tables[table] for table in piece.dims), self.tables.tables[other], strict=True)
        for *rows, row in set(devices):
            vector = self.tables.rows[rows[dim]]
            if all(map(self.tables.has_elements, rows)) and not np.array_equal(
                vector[vector >= 0], self.tables.rows[row]
            ):
                return False
        return True

    def _moved(self, op: Op, entry: OpDef, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of the results of an op on each device that moves elements."""
        devices = op.results[0].placed.devices
        if len({piece.pending for piece in pieces}) > 1:
            raise Mismatch("only some of its operands are terms of a pending reduction")
        mixed = len({piece.term for piece in pieces}) > 1
        places = [{d: i for i, d in enumerate(value.placed.devices)} for value in op.operands]
        made: dict[object, list[Positions]] = {}
        moved = []
        for position, device in enumerate(devices):
            held = [(piece, place[device]) for piece, place in zip(pieces, places, strict=True) if device in place]
            attrs = local_attrs(op.attrs, position)
            key = (tuple((p.term, *(self.tables.tables[t][i] for t in p.dims)) for p, i in held), repr(attrs))
            if key not in made:
                parts = [self._positions(piece, i, mixed) for piece, i in held]
                shapes = [value.placed.local(position).shape for value in op.results]
                made[key] = self._apply(entry, parts, attrs, shapes)
            moved.append(made[key])
        zeros = self._zeros_of_all(pieces, places, devices)
        columns = zip(op.results, zip(*moved, strict=True), strict=True)
        results = [replace(self._of_moved(op, pieces, value, column), zeros=zeros) for value, column in columns]
        return [self._still_routed(pieces, result) for result in results]

    @staticmethod
    def _still_routed(pieces: Sequence[Piece], result: Piece) -> Piece:
        """Return the piece of elements moved from pieces with the rows that devices have by data."""
        routed = pieces[0].routed
        if any(piece.routed is not None for piece in pieces) and (len(pieces) > 1 or result.term != pieces[0].term):
            raise Mismatch("it needs all rows, of which devices have some by data")
        return replace(result, routed=routed)

    def _of_moved(self, op: Op, pieces: Sequence[Piece], value: Value, result: Sequence[Positions]) -> Piece:
        """Return the piece of elements of pieces that an op moved to these positions."""
        if not value.placed.shape:
            return self._scalar(pieces[0], pieces[0].pending)
        value_of_padding = op.attrs.get("value")
        fills = [
            self._common_fill([p.fills[dim] for p in pieces if dim < len(p.fills)]) for dim in range(len(result[0]))
        ]
        for dim in range(len(result[0])):
            if any((positions[dim] < 0).any() for positions in result):
                was_padded = any((vector < 0).any() for vector in self._padded(pieces, dim))
                if isinstance(value_of_padding, (int, float)) and self._adds_padding(op, pieces, dim, result):
                    new = float(value_of_padding)
                    fills[dim] = new if not was_padded or fills[dim] == new else None
                elif not was_padded:
                    fills[dim] = None
        term = pieces[0].term if len({piece.term for piece in pieces}) == 1 else None
        return self._piece(result, term, pieces[0].pending, tuple(fills), value.placed)

    @staticmethod
    def _zeros_of_all(
        pieces: Sequence[Piece], places: Sequence[Mapping[int, int]], devices: Sequence[int]
    ) -> frozenset[int]:
        """Return the devices that have zeros only of all pieces, of each at its place."""
        return frozenset(
            position
            for position, device in enumerate(devices)
            if all(place.get(device) in piece.zeros for piece, place in zip(pieces, places, strict=True))
        )

    def _adds_padding(self, op: Op, pieces: Sequence[Piece], dim: int, result: Sequence[Positions]) -> bool:
        """Whether an op adds padding along a dim, to the operand's that may be there."""
        if len(pieces) > 1 or len(pieces[0].dims) != len(result[0]):
            return True
        index = {device: i for i, device in enumerate(op.operands[0].placed.devices)}
        rows = self.tables.tables[pieces[0].dims[dim]]
        for device, positions in zip(op.results[0].placed.devices, result, strict=True):
            before, after = self.tables.rows[rows[index[device]]] < 0, positions[dim] < 0
            if after.sum() > before.sum() or (
                after.any() and after.sum() == before.sum() and len(after) != len(before)
            ):
                return True
            if after.sum() == before.sum() and not np.array_equal(after, before):
                return True
        return False

    def _scalar(self, piece: Piece, pending: tuple[str, ...]) -> Piece:
        """Return the piece of the only element of a piece, in no dims."""
        numbers = {sum(int(v[0]) for v in self._positions(piece, i, True)) for i in self._places(piece)}
        if len(numbers) > 1 or min(numbers) < 0:
            raise Mismatch("it is no scalar of the model")
        (number,) = numbers
        term = self.terms.term_at(number)
        scalar = next((n for n in self.terms.shapes.get(term, [term]) if not self.terms.types[n].shape), None)
        if self.terms.bases[term] != number or scalar is None:
            raise Mismatch("it is no scalar of the model")
        return Piece(scalar, (), pending, (), piece.zeros)

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
    def _apply(
        entry: OpDef, parts: Sequence[Positions], attrs: Mapping[str, Attribute], shapes: Sequence[tuple[int, ...]]
    ) -> list[Positions]:
        """Return the positions of results of these shapes; those of a result without elements may be any."""
        assert entry.semantics.moved is not None
        try:
            return entry.semantics.moved(parts, attrs)
        except ValueError as error:
            if all(0 in shape for shape in shapes):
                return [[np.arange(size) for size in shape] for shape in shapes]
            raise Mismatch(str(error)) from None

    def _positions(self, piece: Piece, position: int, absolute: bool) -> Positions:
        """Return the numbers of the elements of a piece on one device; with `absolute` among those of all tensors."""
        return self._positions_of(piece.term, [self.tables.tables[table][position] for table in piece.dims], absolute)

    def _positions_of(self, term: int | None, rows: Sequence[int], absolute: bool) -> Positions:
        if term is None:
            return [self.tables.rows[row] for row in rows]
        shape, equalities = self.terms.types[term].shape, self.terms.equalities[term]
        result = [self._spaced(row, _stride(shape, dim), shape[dim], equalities[dim]) for dim, row in enumerate(rows)]
        if absolute and result:
            base = self.terms.bases[term]
            result[0] = np.where(result[0] >= 0, result[0] + base, result[0])
        return result

    def _spaced(self, row: int, stride: int, size: int, equality: int | None) -> Vector:
        """Return the numbers of elements of a dim of `size`, which are `stride` apart; equal ones are one object."""
        key = row, stride, size, equality
        if key not in self._vectors:
            vector = self.tables.rows[row]
            self._vectors[key] = np.where(vector >= 0, vector * stride, vector)
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
        for number in [] if term is None else [term, *self.terms.shapes.get(term, ())]:
            rows = self._rows(positions, number, base)
            if rows is not None:
                dims = tuple(self.tables.table(column) for column in zip(*rows, strict=True))
                return Piece(number, dims, pending, fills)
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
        if len(positions[0]) != len(self.terms.types[term].shape):
            return None
        made: dict[int, list[int] | None] = {}
        rows = []
        for vectors in positions:
            if id(vectors) not in made:
                made[id(vectors)] = self._regular(vectors, term, base)
            row = made[id(vectors)]
            if row is None:
                return None
            rows.append(row)
        return rows

    def _regular(self, vectors: Positions, term: int, base: int) -> list[int] | None:
        rows: list[int] = []
        has_elements = all(len(vector) for vector in vectors)
        shape = self.terms.types[term].shape
        carried = 0
        for dim, (vector, size, equality) in enumerate(zip(vectors, shape, self.terms.equalities[term], strict=True)):
            stride = _stride(shape, dim)
            row, *origin = self._origins.get(id(vector), (-1,))
            if origin == [stride, size, equality] and not carried and (base == 0 or dim > 0):
                # An op that moves elements along other dims returns the numbers of this one as they are.
                rows.append(row)
                continue
            inside = vector >= 0
            offset = (vector - (base if dim == 0 else 0) + carried)[inside]
            # Numbers between two elements of this dim are those of the dims within.
            carried = int(offset[0] % stride) if len(offset) else 0
            offset -= carried
            index = offset // stride
            if np.array_equal(index * stride, offset) and not ((index < 0) | (index >= max(size, 1))).any():
                numbers = np.full(len(vector), PADDING)
                numbers[inside] = index
                rows.append(self.tables.first(self.tables.row(numbers), equality))
            elif has_elements:
                return None
            else:
                rows.append(self.tables.range(len(vector)))
        return rows

    def _communicated(self, op: Op, entry: OpDef, piece: Piece) -> Piece:
        """Return the piece that a collective gives, computed once for tensors of the same sizes and layouts."""
        if piece.term is None or piece.routed is not None or piece.zeros:
            return self._collective(op, entry, piece)
        shape, equalities = self.terms.types[piece.term].shape, self.terms.equalities[piece.term]
        attributes = self.attributes.of(op)
        key = ("collective", op.name, attributes, op.results[0].placed, shape, equalities, piece.layout)
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
        shapes = [op.results[0].placed.local(position).shape for position in range(len(devices))]
        if all(0 in shape for shape in shapes):
            pending = (*pending[:axis], "", *pending[axis + 1 :])
        elif reduction is not None:
            is_same = not pending[axis] and (reduction != "sum" or self.mesh.shape[axis] == 1)
            if pending[axis] != reduction and not is_same:
                raise Mismatch(
                    f"it reduces by {reduction} along {self.mesh.axes[axis]} a value that is "
                    + (f"a term of a pending {pending[axis]}" if pending[axis] else "no term of a sum")
                )
            pending = (*pending[:axis], "", *pending[axis + 1 :])
        elif pending[axis] == "sum":
            piece = self._as_shares(piece, axis, groups)
            pending = piece.pending
        elif pending[axis]:
            raise Mismatch(f"it moves terms of a pending {pending[axis]} along the axis of the reduction")
        tables = [self.tables.tables[table] for table in piece.dims]
        result: list[Positions] = [[] for _ in devices]
        made: dict[object, list[Positions]] = {}
        zeros: set[int] = set()
        for group in groups.along((axis,)):
            attrs = local_attrs(op.attrs, group[0])
            own = [shapes[position] for position in group]
            if piece.routed is not None and len({self.tables.tables[piece.routed.groups][i] for i in group}) > 1:
                raise Mismatch("it needs all rows, of which devices have some by data")
            rows = tuple(tuple(table[position] for table in tables) for position in group)
            if piece.zeros.issuperset(group):
                zeros.update(group)
            if reduction is not None and not piece.zeros.isdisjoint(group):
                # Zeros are terms of any elements.
                held = next((at for at, p in zip(rows, group, strict=True) if p not in piece.zeros), rows[0])
                rows = tuple(held if p in piece.zeros else at for at, p in zip(rows, group, strict=True))
            if reduction is not None and len(set(rows)) > 1 and not all(0 in shape for shape in own):
                raise Mismatch("it reduces different elements")
            key = (rows, repr(attrs))
            if key not in made:
                parts = [self._positions_of(piece.term, at, False) for at in rows]
                made[key] = self._apply(entry, parts, attrs, own)
            for position, positions in zip(group, made[key], strict=True):
                result[position] = positions
        if zeros and not any(pending):
            raise Mismatch("it reduces nothing")
        # The sum of terms of padding is no such number again, but for zeros.
        fills = tuple(fill if reduction != "sum" or fill == 0.0 else None for fill in piece.fills)
        moved = self._piece(result, piece.term, pending, fills, op.results[0].placed)
        return self._still_routed([piece], replace(moved, zeros=frozenset(zeros)))

    # Sums in a stated order

    def _as_shares(self, piece: Piece, axis: int, groups: Groups) -> Piece:
        """Return a piece of the terms of a pending sum along an axis: each is a tensor of its own (`_Terms.share`)."""
        if not piece.dims or piece.routed is not None:
            raise Mismatch("it moves a term of a sum that has no dims, or rows by data")
        positions = []
        for i, place in enumerate(groups.coordinates):
            vectors = self._positions(piece, i, True)
            if all(len(vector) for vector in vectors):
                number = sum(int(vector.max()) for vector in vectors)
                term = self.terms.term_at(number) if number >= 0 else None
                if term is None or any((vector < 0).any() for vector in vectors):
                    raise Mismatch("it moves padding of a term of a sum")
                share = self.terms.share(term, axis, place)
                vectors[0] = vectors[0] + (self.terms.bases[share] - self.terms.bases[term])
            positions.append(vectors)
        dims = tuple(
            self.tables.table(self.tables.row(vectors[dim]) for vectors in positions) for dim in range(len(piece.dims))
        )
        pending = (*piece.pending[:axis], "", *piece.pending[axis + 1 :])
        return Piece(None, dims, pending, piece.fills)

    def _sum_in_order(self, op: Op, pieces: Sequence[Piece]) -> Piece:
        """Return the piece of a sum of the terms of the model's sum, each of them whole or its shares in order.

        The sum of the shares of a single tensor is that tensor.
        """
        if any(piece.routed is not None or any(piece.pending) for piece in pieces):
            raise Mismatch("a term of it is a term of another pending sum")
        devices = op.results[0].placed.devices
        if any(value.placed.devices != devices for value in op.operands):
            raise Mismatch("its operands are on other devices")
        found: set[tuple[int, ...]] = set()
        held: list[Positions] = []
        for position, place in enumerate(self.groups_of(devices).coordinates):
            items = [self._found(piece, position) for piece in pieces]
            if any(not _same_positions(vectors, items[0][1]) for _, vectors in items):
                raise Mismatch("it adds different elements")
            held.append(items[0][1])
            found.add(self._added([term for term, _ in items], place))
        terms = found.pop()
        candidates = self.terms.instances.get((op.name, terms), ())
        if found or not (candidates or len(terms) == 1):
            raise Mismatch("the model adds other terms")
        number = candidates[0][1][0] if candidates else terms[0]
        pending, kind = pieces[0].pending, op.results[0].placed
        if not kind.shape:
            return Piece(number, (), pending, ())
        base = self.terms.bases[number]
        positions = [[vectors[0] + base, *vectors[1:]] for vectors in held]
        return self._piece(positions, None, pending, (None,) * len(kind.shape), kind)

    def _added(self, terms: Sequence[int], place: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensors whose terms, or shares of them in order, a device adds; it has these coordinates."""
        added = []
        remaining = list(terms)
        while remaining:
            term, count = remaining[0], 1
            if term in self.terms.shares:
                term, axis, _ = self.terms.shares[term]
                count = self.mesh.shape[axis]
                of_group = [(*place[:axis], i, *place[axis + 1 :]) for i in range(count)]
                if remaining[:count] != [self.terms.share(term, axis, other) for other in of_group]:
                    raise Mismatch("the terms of a sum are not each there once, in order")
            added.append(term)
            remaining = remaining[count:]
        return tuple(added)

    def _found(self, piece: Piece, position: int) -> tuple[int, Positions]:
        """Return the tensor of which a device has elements, and their positions in it."""
        if not piece.dims:
            assert piece.term is not None
            return piece.term, []
        vectors = self._positions(piece, position, True)
        if not all(len(vector) and vector.min() >= 0 for vector in vectors):
            raise Mismatch("a term of it has padding, or no elements")
        term = self.terms.term_at(sum(int(vector[0]) for vector in vectors))
        vectors[0] = vectors[0] - self.terms.bases[term]
        last = sum(int(vector.max()) for vector in vectors)
        if sum(int(vector.min()) for vector in vectors) < 0 or last >= max(1, self.terms.types[term].elements):
            raise Mismatch("a term of it is no part of one tensor")
        return term, vectors

    def _as_terms(self, piece: Piece, devices: tuple[int, ...], axes: Sequence[int]) -> Piece:
        """Return a piece as terms of sums, if devices along axes have each element at most once, others zeros there."""
        for dim, axis in product(range(len(piece.dims)), axes):
            rows = self.tables.tables[piece.dims[dim]]
            if piece.routed is not None or piece.fills[dim] != 0.0 or not any(map(self.tables.is_padded, set(rows))):
                continue
            groups = self.groups_of(devices)
            tables = [self.tables.tables[table] for table in piece.dims]
            nothing = {i for table in tables for i, row in enumerate(table) if not len(self.tables.rows[row])}
            nothing |= piece.zeros
            if piece.pending[axis] == "sum":
                for group in groups.along((axis,)):
                    zeros = {i for i in group if i not in nothing and not self.tables.has_elements(rows[i])}
                    if zeros and not (zeros | nothing).issuperset(group):
                        piece = replace(piece, zeros=piece.zeros | zeros)
                continue
            held, others = [], []
            for group in groups.along((axis,)):
                if nothing.issuperset(group):
                    others.append(group)
                else:
                    held.append([i for i in group if i not in piece.zeros])
            whole = self._united(rows, held, others) if axis in groups.varies(rows) else None
            if whole is not None and not piece.pending[axis]:
                pending = (*piece.pending[:axis], "sum", *piece.pending[axis + 1 :])
                dims = [self._of_others(table, rows, held) for table in piece.dims]
                piece = replace(piece, dims=(*dims[:dim], whole, *dims[dim + 1 :]), pending=pending)
        return piece

    def _of_others(self, table: int, padded: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
        """Return the table of a dim of a tensor of which some devices have zeros only, those of any elements.

        `padded` are the rows of the dim with padding. Devices without elements get the row of one in their group that
        has some.
        """
        rows = list(self.tables.tables[table])
        for group in groups:
            others = [rows[position] for position in group if self.tables.has_elements(padded[position])]
            for position in group if others else ():
                if not self.tables.has_elements(padded[position]):
                    rows[position] = others[0]
        return self.tables.table(rows)

    def _united(
        self, rows: Sequence[int], groups: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
    ) -> int | None:
        """Return the table of the elements that a group has together, each at its place on one device at most.

        In the groups `others`, devices have no element of the tensor, so that any rows are right: those without padding
        remain so if other dims are padded.
        """
        united = list(rows)
        for number, group in enumerate((*groups, *others)):
            vectors = [self.tables.rows[rows[position]] for position in group]
            stacked = np.stack(vectors) if len({len(vector) for vector in vectors}) == 1 else None
            if number < len(groups) and (stacked is None or ((stacked >= 0).sum(axis=0) > 1).any()):
                return None
            if stacked is not None:
                row = self.tables.row(stacked.max(axis=0))
                for position in group:
                    united[position] = row
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
            number = self.terms.numbers[expected.value.name]
            wanted = self.layout(expected.value.dtensor, devices, number).of(number)
            if not any(self._is(form, wanted) for form in self._forms(piece, devices)):
                what = "another value" if piece.term != wanted.term else "other parts, or terms of a sum,"
                raise VerificationError(
                    f"the schedule gives {what} as the output {expected.name!r}", f"output {expected.name!r}", _HINT
                )

    def _is(self, piece: Piece, wanted: Piece) -> bool:
        """Whether a piece is another, or equal to it."""
        if piece.term is not None and piece.term == wanted.term and not self.terms.types[piece.term].elements:
            return True
        if (piece.term, piece.pending) != (wanted.term, wanted.pending) or piece.routed is not None:
            return False
        tables = self.tables.tables
        pairs_of_dims = [zip(tables[a], tables[b], strict=True) for a, b in zip(piece.dims, wanted.dims, strict=True)]
        columns = zip(*pairs_of_dims, strict=True)
        # A device without elements has them all, and zeros are terms of all.
        return all(
            position in piece.zeros
            or all(a == b for a, b in pairs)
            or all(any(not len(self.tables.rows[pair[side]]) for pair in pairs) for side in (0, 1))
            for position, pairs in enumerate(columns)
        )


def _same_positions(vectors: Positions, others: Positions) -> bool:
    return len(vectors) == len(others) and all(map(np.array_equal, vectors, others))


class _Attributes:
    """Numbers of attributes: equal ones have one, numbers of different kinds differ."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._of_ops: dict[int, int] = {}
        """By the identity of an op's attributes, which many ops share."""

    def of(self, op: Op) -> int:
        """Return the number of the attributes of an op, which lives as long as this."""
        found = self._of_ops.get(id(op.attrs))
        if found is None:
            found = self._of_ops[id(op.attrs)] = self.number(op.attrs)
        return found

    def number(self, attrs: Mapping[str, Attribute]) -> int:
        """Return the number of attributes."""
        key = tuple((name, repr(value)) for name, value in sorted(attrs.items()))
        return self._numbers.setdefault(key, len(self._numbers))


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
        attributes = -1 if is_opaque else self.schedule.attributes.of(op)
        self._number(op.name, op.operands, attributes, op.results)

    def know(self, value: Value, forms: Sequence[Piece]) -> None:
        """Note that a value is a piece of a tensor, in each of these forms."""
        for piece in forms:
            if piece.term in self.terms and piece.routed is None:
                self.values[piece.term].append((value, piece))

    def results(self, op: Op) -> Sequence[Piece] | None:
        """Return the pieces of an op's results, if it is the end of an expansion."""
        if not self.schedule.terms.expandable:
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
                key = (item.results, devices, tuple((value.name, piece) for value, piece in chosen))
                if key not in self.tried and all(value.placed.devices == devices for value, _ in chosen):
                    self.tried.add(key)
                    self._expand_one(item, chosen, devices)

    def _expand_one(self, item: _Expandable, operands: Sequence[tuple[Value, Piece]], devices: tuple[int, ...]) -> None:
        schedule, instance = self.schedule, item.instance
        groups = schedule.groups_of(devices)
        layouts = [piece.layout for _, piece in operands]
        values = tuple(schedule.originals[value.name] for value, _ in operands)
        for kinds in product(*(schedule.terms.layouts[number].items() for number in item.results)):
            exact = [schedule.layout(kind, devices, n) for (kind, _), n in zip(kinds, item.results, strict=True)]
            found = []
            for claimed in (exact, [self._padded(layout) for layout in exact]):
                with suppress(Mismatch):
                    layouts_found = expanded_layouts(schedule.tables, instance, layouts, groups, claimed)
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
        tables = self.schedule.tables
        dims = []
        for table in layout.dims:
            vectors = [tables.rows[row] for row in tables.tables[table]]
            most = max(map(len, vectors))
            rows = (np.concatenate([vector, np.full(most - len(vector), PADDING)]) for vector in vectors)
            dims.append(tables.table(map(tables.row, rows)))
        return replace(layout, dims=tuple(dims))

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
                    if schedule.has_parts(piece, dim, schedule.layout(kind, groups.devices, number).dims[dim]):
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
        attributes: int,
        results: Sequence[Value],
    ) -> None:
        """Give the results of an op with attributes of this number theirs; -1 for one that is equal to no other."""
        numbers = tuple(self._number_of(value) for value in operands)
        groups = self.schedule.groups_of(results[0].placed.devices)
        key = object() if attributes < 0 else (name, numbers, attributes, id(groups))
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
        self.expansions._number(name, operands, self.expansions.schedule.attributes.number(attrs), results)
        return results[0] if len(results) == 1 else results
