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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, Op, Value, gc_disabled, inline, print_op
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.layout import DeviceMesh, Guard, evaluate_size, is_always, is_symbolic
from distir_relax.ops import Routing, Trait, lookup
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.positions import Positions
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.proof.elements import Elements
from distir_relax.proof.expansions import Expansions
from distir_relax.proof.layouts import Layouts
from distir_relax.proof.local_ops import Instance, layouts_of_results
from distir_relax.proof.ordered_sums import OrderedSums
from distir_relax.proof.pieces import Layout, Mismatch, Piece
from distir_relax.proof.routed_rows import RoutedRows
from distir_relax.proof.terms import Terms
from distir_relax.proof.zero_terms import as_terms

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
    """Return up to three choices of values of symbols by name, by which the guards hold: typical ones, and others.

    No symbolic size becomes 0 or 1, if it can be more: a dim of one element has no factor that could be cut.
    """
    symbols = module_symbols(sharded)
    if not symbols:
        return [{}]
    shapes = {v.dtensor.shape for op in sharded.main.ops for v in (*op.operands, *op.results)}
    sizes = {size for shape in shapes for size in shape if is_symbolic(size)}
    found: list[dict[str, int]] = []
    unlike = [(factor, more, more) for factor in (1, 2, 3, 5, 8) for more in (0, 1)]
    for factor, more, others in (*unlike, *((factor, 1, 0) for factor in (1, 2, 3))):
        values = {name: factor * s.typical + more + others * i for i, (name, s) in enumerate(symbols.items())}
        values = {name: n if symbols[name].contains(n) else symbols[name].typical for name, n in values.items()}
        if values not in found and all(_holds(guard, values) for guard in sharded.guards):
            found.append(values)
    if not found:
        raise VerificationError("no sizes were found for which the program's guards hold", "", _HINT)
    large = [values for values in found if all(evaluate_size(size, values) > 1 for size in sizes)]
    return (large or found)[:3]


def _holds(guard: Guard, values: Mapping[str, int]) -> bool:
    first, second = evaluate_size(guard.first, values), evaluate_size(guard.second, values)
    return is_always(first, guard.relation, second) == guard.holds


class _Schedule:
    def __init__(self, sharded: Module, distributed: Module, symbolic: Function, original: Function) -> None:
        self.sharded = sharded
        self.main = distributed.main
        self.mesh: DeviceMesh = distributed.meshes[0]
        missing = set(sharded.meshes[0].axes) - set(self.mesh.axes)
        if missing:
            raise VerificationError(f"the mesh of the schedule has no axis {min(missing)}", "", _HINT)
        self.terms = Terms(sharded.main, symbolic)
        self.tables = self.terms.tables
        self.layouts = Layouts(self.mesh, [self.mesh.axes.index(axis) for axis in sharded.meshes[0].axes], self.terms)
        self.elements = Elements(self.terms)
        self.sums = OrderedSums(self.layouts, self.elements)
        self.rows = RoutedRows(self.layouts)
        self.original_ops = original.ops
        # With symbolic sizes, where the schedule has them.
        originals = {v.name: v for op in original.ops for v in op.results}
        originals.update((item.value.name, item.value) for item in original.inputs)
        self.expansions = Expansions(self.layouts, originals)
        self.pieces: dict[str, Piece | None] = {}
        self.open: dict[str, tuple[Op, str]] = {}
        """The ops that are not explained so far, and why, by the name of their first result."""
        self.producers = {v.name: op for op in self.main.ops for v in op.results}

    def check(self) -> None:
        """See `check_schedule`."""
        layouts = {item.value.name: item.value.dtensor for item in self.sharded.main.inputs}
        for item in self.main.inputs:
            if item.value.name not in layouts:
                raise VerificationError(
                    f"the schedule takes an input %{item.value.name}, the model does not", "", _HINT
                )
            number = self.terms.numbers[item.value.name]
            given = self.layouts.layout(layouts[item.value.name], item.value.placed.devices, number).of(number)
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
                return [self.rows.exchanged(op, entry.split.routing, *known)]
            if op.operands and entry.semantics.collective_semantics is not None:
                return self._with_terms(op, known, lambda pieces: [self._communicated(op, entry, pieces[0])])
            if Trait.ADDS_IN_ORDER in entry.traits:
                return [self.sums.sum_in_order(op, known)]
            if entry.split.routing is Routing.WITHIN:
                known = self.rows.all_as_routed(known)
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
        explained = set()
        while worklist:
            name = worklist.pop().name
            if self.pieces[name] is None and name not in explained:
                explained.add(name)
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
                    as_terms(self.tables, piece, self.layouts.groups_of(v.placed.devices), axes)
                    for piece, v in zip(known, op.operands, strict=True)
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
            form = as_terms(self.tables, piece, self.layouts.groups_of(devices), axes)
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
        before, after = self.layouts.groups_of(source).coordinates, self.layouts.groups_of(target).coordinates
        for axis, reduction in enumerate(piece.pending):
            if reduction and any(a[axis] != b[axis] for a, b in zip(before, after, strict=True)):
                raise Mismatch(f"it sends terms of a pending {reduction} along the axis of the sum")
        return piece

    def _local(self, op: Op, entry: OpDef, pieces: list[Piece]) -> Sequence[Piece]:
        reasons = []
        try:
            return self._with_terms(op, pieces, lambda forms: self._of_model(op, forms))
        except Mismatch as reason:
            reasons.append(str(reason))
        if entry.semantics.moved is not None and op.operands:
            try:
                return self._with_terms(op, pieces, lambda forms: self.elements.moved(op, entry, forms))
            except Mismatch as reason:
                reasons.append(str(reason))
        raise Mismatch("; ".join(dict.fromkeys(reasons)))

    def _of_model(self, op: Op, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the pieces of the results of an op of the sharded program on these pieces."""
        reasons = []
        operands = tuple(piece.term for piece in pieces)
        for instance, results in self._candidates(op, operands):
            if len(results) != len(op.results):
                reasons.append("it has other numbers of results")
                continue
            try:
                layouts = self._layouts_of(op, instance, [piece.layout for piece in pieces], operands, results)
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
            # Another stage has copies of positions, by their names and a number.
            copied, _, digits = value.name.rpartition("_")
            for rank, name in enumerate((value.name, copied if digits.isdigit() else "")):
                if self.terms.numbers.get(name) == number:
                    return rank
            layouts = (self.layouts.layout(kind, value.placed.devices, number) for kind in self.terms.layouts[number])
            return 2 if any(self.layouts.fits(layout, value.placed) for layout in layouts) else 3

        return sorted(candidates, key=order)

    def _layouts_of(
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
        groups = self.layouts.groups_of(devices)
        key = (
            "op",
            id(instance),
            self.terms.attributes.of(op),
            groups.key,
            sizes,
            tuple(given),
            tuple(claimed),
            tuple(numbers),
        )
        made = self.layouts.cached(
            key, lambda: layouts_of_results(self.tables, instance, op, given, groups, claimed, numbers)
        )
        return made if routing is None else self.rows.of_results(routing, instance, layouts, operands[-2], made, groups)

    def _claimed(self, value: Value, number: int, devices: tuple[int, ...]) -> Layout | None:
        """Return a layout that the sharded program gives to a tensor, in which devices hold as many elements.

        Without one, return a layout in which they do along some dims.
        """
        layouts = [self.layouts.layout(kind, devices, number) for kind in self.terms.layouts[number]]
        found = next((layout for layout in layouts if self.layouts.fits(layout, value.placed)), None)
        return found or next((layout for layout in layouts if self.layouts.fits(layout, value.placed, 1)), None)

    def _communicated(self, op: Op, entry: OpDef, piece: Piece) -> Piece:
        """Return the piece that a collective gives, computed once for tensors of the same sizes and layouts."""
        if piece.term is None or piece.routed is not None or piece.zeros:
            return self._collective(op, entry, piece)
        shape, equalities = self.terms.types[piece.term].shape, self.terms.equalities[piece.term]
        attributes = self.terms.attributes.of(op)
        key = ("collective", op.name, attributes, op.results[0].placed, shape, equalities, piece.layout)
        moved: list[Piece] = []

        def compute() -> list[Layout]:
            moved.append(self._collective(op, entry, piece))
            return [moved[0].layout] if moved[0].term == piece.term else []

        found = self.layouts.cached(key, compute)
        if found:
            return found[0].of(piece.term)
        return moved[0] if moved else self._collective(op, entry, piece)

    def _collective(self, op: Op, entry: OpDef, piece: Piece) -> Piece:
        devices = op.results[0].placed.devices
        if entry.semantics.moved is None:
            raise Mismatch("what it moves depends on data")
        axis = self.mesh.axes.index(str(op.attrs["axis"]))
        pending, reduction = piece.pending, op.attrs.get("op")
        groups = self.layouts.groups_of(devices)
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
            piece = self.sums.as_shares(piece, axis, groups)
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
                parts = [self.elements.positions_of(piece.term, at, False) for at in rows]
                made[key] = self.elements.apply(entry, parts, attrs, own)
            for position, positions in zip(group, made[key], strict=True):
                result[position] = positions
        if zeros and not any(pending):
            raise Mismatch("it reduces nothing")
        # The sum of terms of padding is no such number again, but for zeros.
        fills = tuple(fill if reduction != "sum" or fill == 0.0 else None for fill in piece.fills)
        moved = self.elements.piece(result, piece.term, pending, fills, op.results[0].placed)
        return self.elements.still_routed([piece], replace(moved, zeros=frozenset(zeros)))

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
            wanted = self.layouts.layout(expected.value.dtensor, devices, number).of(number)
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
