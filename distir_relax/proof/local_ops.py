"""What an op of the sharded program gives when devices run it on pieces of its operands, by its factor rule.

Factors that both operands have must be cut alike. A factor that is parallel cuts the results; the parts of one that is
reduced make the results terms of a pending reduction. Terms may pass through operands in which the op is linear.
Padding may not change results: it must be neutral to a reduction over it. On a device without results, an op does
nothing, and any parts of its operands are right; one that has nothing of a sum adds zeros, to any elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

import numpy as np

from distir_relax.errors import DistIRError
from distir_relax.ir import Attribute, Op, TensorType, at_rank
from distir_relax.ops import Trait, evaluate, lookup, number_range
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.positions import Vector
from distir_relax.ops.table.rule import BLOCKED, PARALLEL, Dims, Factor, Rule
from distir_relax.ops.table.spmd_inference import local_attrs, numbers_by_device
from distir_relax.ops.table.windows import Window
from distir_relax.proof.binding import Binding, Dim, bindings, options, product_of
from distir_relax.proof.pieces import Equalities, Groups, Layout, Mismatch, Routed, Tables, digits

NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True, slots=True)
class Instance:
    """An op of the sharded program: its types are global. `equalities` are those of the dims of each operand."""

    op: Op
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    equalities: tuple[Equalities, ...]

    @property
    def entry(self) -> OpDef:
        """The op's entry in the table."""
        return lookup(self.op.name, self.op.location)

    @property
    def rule(self) -> Rule:
        """The op's factor rule."""
        return self.entry.rule_for(self.operands, self.op.attrs, self.results)

    def is_ordered(self, factor: Factor) -> bool:
        """Whether results depend on the places of elements along a factor, so that equal ones may give others."""
        return factor.kind == BLOCKED or factor.name in self.entry.split.positional

    def equalities_of_results(self, tables: Tables) -> list[Equalities]:
        """Return the equalities of the dims of each result: of factors that no operand has, all elements are equal."""
        rule = self.rule
        of_factors = _equalities_of_factors(tables, self, rule)
        known: dict[int, int | None] = {}
        for dims, equalities in zip(rule.operands, of_factors, strict=True):
            for i, equality in zip(chain(*dims), chain(*equalities), strict=True):
                known[i] = tables.both(known[i], equality) if i in known else equality
        for i, factor in enumerate(rule.factors):
            if self.is_ordered(factor):
                known[i] = None
            known.setdefault(i, tables.equal(factor.size))
        results = []
        for dims in rule.results:
            wholes = [[tables.whole(rule.factors[i].size, known[i]) for i in factors] for factors in dims]
            sizes = [[rule.factors[i].size for i in factors] for factors in dims]
            rows = [
                tables.rows[product_of(tables, *pair)] if pair[0] else None for pair in zip(wholes, sizes, strict=True)
            ]
            results.append(tuple(None if row is None else tables.equality(row) for row in rows))
        return results


def _equalities_of_factors(tables: Tables, instance: Instance, rule: Rule) -> list[list[tuple[int | None, ...]]]:
    """Return the equality of each factor of each dim of each operand."""
    result = []
    for dims, own in zip(rule.operands, instance.equalities, strict=True):
        result.append([_divided(tables, rule, factors, equality) for factors, equality in zip(dims, own, strict=True)])
    return result


def _divided(tables: Tables, rule: Rule, factors: Sequence[int], equality: int | None) -> tuple[int | None, ...]:
    """Return the equality of each factor of a dim; of none if the dim's is no product of them."""
    if equality is None or len(factors) < 2:
        return (equality,) * len(factors)
    sizes = [rule.factors[i].size for i in factors]
    rows = next(digits(tables.rows[equality], sizes, sizes), None)
    return (None,) * len(sizes) if rows is None else tuple(map(tables.equality, rows))


def layouts_of_results(
    tables: Tables,
    instance: Instance,
    local: Op | None,
    operands: Sequence[Layout],
    groups: Groups,
    claimed: Sequence[Layout | None],
    numbers: Sequence[float | None],
) -> list[Layout]:
    """Return the layouts of the results if devices run an op on operands with these layouts.

    `local` is the op of the schedule; None for the ops that the entry gives instead for a cut factor (`Split.expand`).
    `claimed` has layouts of the results, for dims that do not follow from operands; `numbers` the values of operands
    that are scalar constants. Raises `Mismatch` if what devices compute is no part of the op's results.
    """
    return _Application(tables, instance, local, operands, groups, claimed, numbers).layouts()


def expanded_layouts(
    tables: Tables, instance: Instance, operands: Sequence[Layout], groups: Groups, claimed: Sequence[Layout]
) -> list[Layout]:
    """Return the layouts of the results of the ops that an entry gives for a cut factor; see `layouts_of_results`."""
    return _Application(tables, instance, None, operands, groups, claimed, (None,) * len(operands)).layouts()


@dataclass(slots=True)
class _Application:
    tables: Tables
    instance: Instance
    local: Op | None
    operands: Sequence[Layout]
    groups: Groups
    claimed: Sequence[Layout | None]
    numbers: Sequence[float | None]
    windows: set[Window] = field(default_factory=set)
    """The windows of dims that are cut on some device."""
    cut_factors: set[int] = field(default_factory=set)
    """The factors that are cut of dims with several."""
    overlaid: set[int] = field(default_factory=set)
    """The factors of which an operand has elements on a device where another has padding."""
    useless: set[int] = field(default_factory=set)
    """The devices that have nothing of any result."""
    rule: Rule = field(init=False)
    equalities: list[list[tuple[int | None, ...]]] = field(init=False)
    """Those of the factors of each dim of each operand."""
    of_factors: list[int | None] = field(init=False)
    """The equality of each factor: of elements that are equal in all operands."""

    def __post_init__(self) -> None:
        self.rule = self.instance.rule
        self.equalities = _equalities_of_factors(self.tables, self.instance, self.rule)
        known: dict[int, int | None] = {}
        for dims, equalities in zip(self.rule.operands, self.equalities, strict=True):
            for i, equality in zip(chain(*dims), chain(*equalities), strict=True):
                known[i] = self.tables.both(known[i], equality) if i in known else equality
        self.of_factors = [
            known[i] if i in known else None if self.instance.is_ordered(factor) else self.tables.equal(factor.size)
            for i, factor in enumerate(self.rule.factors)
        ]

    def layouts(self) -> list[Layout]:
        instance, rule = self.instance, self.rule
        if self.local is not None and [len(v.placed.shape) for v in self.local.results] != [
            len(kind.shape) for kind in instance.results
        ]:
            raise Mismatch("its results have other numbers of dims")
        tables = [table for layout in self.operands for table in layout.dims]
        tables += [table for layout in self.claimed if layout for table in layout.dims]
        sizes = self._local_sizes()
        columns = [s.values for s in sizes if not isinstance(s, int)]
        if self.local is not None:
            columns += _per_device(self.local.attrs)
        count = len(self.groups.devices)
        rows_by_device = list(zip(*(self.tables.tables[table] for table in tables), strict=True)) or [()] * count
        self._find_cut_factors(rows_by_device)
        self.windows = {window for window in rule.windows if self._is_cut(window)}
        bound: dict[object, tuple[dict[int, int] | None, list[int]]] = {}
        per_device = []
        has_zeros = any(layout.zeros for layout in self.operands)
        for position, rows in enumerate(rows_by_device):
            is_zero = tuple([position in layout.zeros for layout in self.operands]) if has_zeros else ()
            key = (rows, is_zero, tuple(column[position] for column in columns))
            if key not in bound:
                bound[key] = self._bind(rows, position)
            per_device.append(bound[key])
        factors = [[None if held is None else held.get(i) for held, _ in per_device] for i in range(len(rule.factors))]
        results = [[item[1][i] for item in per_device] for i in range(sum(len(t.shape) for t in instance.results))]
        self._check_expansions(factors)
        nothing = {id(item) for item in bound.values() if self._is_nothing(item[1], self.tables.has_elements)}
        self.useless = {i for i, item in enumerate(per_device) if id(item) in nothing}
        before = -1
        while before < len(self.useless):
            before = len(self.useless)
            of_useful = [[None if i in self.useless else row for i, row in enumerate(rows)] for rows in factors]
            pending = self._pending(of_useful)
        flat = iter(self.tables.table(rows) for rows in results)
        layouts = []
        for kind, dims, terms in zip(instance.results, rule.results, pending, strict=True):
            tables_of_dims = tuple(next(flat) for _ in kind.shape)
            fills = tuple(self._fill(factors, dim) for dim in dims)
            zeros = self._zeros(factors, dims, terms)
            layouts.append(Layout(tables_of_dims, terms, fills, zeros, self._routed(dims)))
        return layouts

    def _local_sizes(self) -> list[Any]:
        return [] if self.local is None else [size for v in self.local.results for size in v.placed.shape]

    def _find_cut_factors(self, rows_by_device: Sequence[Sequence[int]]) -> None:
        """Find the factors that are cut, by the devices that have elements of them."""
        where = [(f, size) for dims, kind in zip(self.rule.operands, self.instance.operands, strict=True)
                 for f, size in zip(dims, kind.shape, strict=True)]  # fmt: skip
        if not any(len(factors) > 1 for factors, _ in where):
            return
        for position, rows in enumerate(rows_by_device):
            binding = self._unbound(rows, position)
            for (factors, _), row, equalities in zip(where, rows, chain(*self.equalities), strict=False):
                if len(factors) > 1 and self.tables.has_elements(row):
                    for option in options(binding, Dim(factors, row, equalities, ""), ()):
                        wholes = [
                            self.tables.whole(self.rule.factors[i].size, equality)
                            for i, equality in zip(factors, equalities, strict=True)
                        ]
                        self.cut_factors.update(
                            i for i, whole in zip(factors, wholes, strict=True) if option[i] != whole
                        )
                        break

    # One device

    def _shapes(self, position: int) -> list[tuple[int, ...] | None]:
        """Return the shapes of the results on one device; None if there is no op of the schedule."""
        if self.local is None:
            return [None] * len(self.instance.results)
        return [v.placed.local(position).shape for v in self.local.results]

    def _unbound(self, rows: Sequence[int], position: int) -> Binding:
        """Return a binding of no factor on one device."""
        lengths: dict[int, int] = {}
        remaining = iter(rows)
        for dims in self.rule.operands:
            for factors in dims:
                length = len(self.tables.rows[next(remaining)])
                if len(factors) == 1:
                    lengths[factors[0]] = length
        for shape, dims in zip(self._shapes(position), self.rule.results, strict=True):
            for length, factors in zip(shape or (), dims, strict=shape is not None):
                if len(factors) == 1:
                    lengths[factors[0]] = length
        return Binding(self.tables, self.rule, lengths, {}, {}, {}, set())

    def _bind(self, rows: Sequence[int], position: int) -> tuple[dict[int, int] | None, list[int]]:
        """Return the row of each factor, and of each dim of the results, on one device.

        There are no rows of factors on a device whose results are empty: it computes nothing.
        """
        shapes = self._shapes(position)
        remaining = iter(rows)
        operands = [[next(remaining) for _ in kind.shape] for kind in self.instance.operands]
        claims = [[next(remaining) for _ in layout.dims] if layout else None for layout in self.claimed]
        of_operands = list(chain(*self.rule.operands))
        if shapes and all(shape is not None and 0 in shape for shape in shapes):
            return None, [
                row
                for number, own in enumerate(claims)
                for row in self._any_rows(number, shapes[number] or (), own, dict(zip(of_operands, rows, strict=False)))
            ]
        parts, of_windows = self._windows(operands, claims, position)
        dims, without = self._dims(operands, position)
        start = self._unbound(rows, position)
        for own, dims_of_result in zip(claims, self.rule.results, strict=True):
            for row, factors in zip(own or (), dims_of_result, strict=own is not None):
                if len(factors) == 1:
                    start.claims[factors[0]] = row
        empty = [i for i, row in start.claims.items() if not len(self.tables.rows[row])]
        reason = None
        for binding in bindings(start, dims, [*empty, *self.cut_factors]):
            try:
                self._place_equal_elements(binding, claims)
                result_rows = self._result_rows(binding, without, of_windows, claims, shapes)
                self._leave_empty(binding, without)
            except Mismatch as mismatch:
                reason = reason or mismatch
                continue
            for item in without:
                if len(item.factors) == 1 and not binding.is_known(item.factors[0]):
                    binding.unify(item.factors[0], item.row, item.equalities[0], item.where)
            self._check_attrs(parts, position)
            self.overlaid |= binding.overlaid
            is_empty = self._is_nothing(result_rows, lambda row: len(self.tables.rows[row]) > 0)
            return None if is_empty else binding.rows, result_rows
        assert reason is not None
        raise reason

    def _windows(
        self, operands: Sequence[Sequence[int]], claims: Sequence[list[int] | None], position: int
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
        """Return the part of each window on one device, and the row of the dim of the result of each."""
        parts: dict[int, tuple[int, ...]] = {}
        rows: dict[int, int] = {}
        for window in self.rule.windows:
            is_zero = position in self.operands[window.operand].zeros
            row = None if is_zero else operands[window.operand][window.operand_dim]
            result = rows[window.result_dim] = self._window_row(window, row, claims[0], position)
            vector = self.tables.rows[result]
            first = int(vector[0]) if len(vector) else 0
            parts[window.index] = window.part(first, first + len(vector))
        return parts, rows

    def _dims(self, operands: Sequence[Sequence[int]], position: int) -> tuple[list[Dim], list[Dim]]:
        """Return the dims of operands on one device: those that say which elements of factors it has, and others.

        The others are of operands of which it has nothing, or zeros only.
        """
        dims: list[Dim] = []
        without: list[Dim] = []
        windows = {(w.operand, w.operand_dim) for w in self.rule.windows}
        for number, (kind, own) in enumerate(zip(self.instance.operands, operands, strict=True)):
            is_zero = position in self.operands[number].zeros
            is_empty = is_zero or (any(not len(self.tables.rows[row]) for row in own) and 0 not in kind.shape)
            for dim, (size, row) in enumerate(zip(kind.shape, own, strict=True)):
                factors, equality = self.rule.operands[number][dim], self.instance.equalities[number][dim]
                where = f"dim {dim} of operand {number}"
                if (number, dim) not in windows and factors:
                    equalities = self.equalities[number][dim]
                    is_product = len(factors) < 2 or any(e is not None for e in equalities)
                    item = Dim(factors, row, equalities, where, None if is_product else equality)
                    is_own = not is_empty or (len(factors) == 1 and not len(self.tables.rows[row]))
                    (dims if is_own else without).append(item)
                elif (number, dim) not in windows and not is_empty and row != self.tables.whole(size, equality):
                    raise Mismatch(f"{where} is cut")
        return dims, without

    def _is_nothing(self, rows: Sequence[int], has: Callable[[int], bool]) -> bool:
        """Whether a device has nothing of any result, by their rows and whether it has something of a row."""
        remaining = iter(rows)
        parts = [[has(next(remaining)) for _ in kind.shape] for kind in self.instance.results]
        return bool(parts) and not any(map(all, parts))

    def _any_rows(
        self, number: int, shape: Sequence[int], claims: Sequence[int] | None, known: Mapping[tuple[int, ...], int]
    ) -> list[int]:
        """Return rows of a result of which a device has nothing: those claimed, or `known` by their factors."""
        if claims is not None and [len(self.tables.rows[row]) for row in claims] == list(shape):
            return list(claims)
        rows = [known.get(factors) for factors in self.rule.results[number]]
        return [
            row if row is not None and len(self.tables.rows[row]) == size else self.tables.range(size)
            for row, size in zip(rows, shape, strict=True)
        ]

    def _leave_empty(self, binding: Binding, without: Sequence[Dim]) -> None:
        """Bind a factor of each dim of several factors that is empty to nothing."""
        for dim in without:
            if len(dim.factors) > 1 and not len(self.tables.rows[dim.row]):
                known = [len(self.tables.rows[binding.rows[i]]) for i in dim.factors if binding.is_known(i)]
                if 0 in known:
                    continue
                if len(known) == len(dim.factors):
                    raise Mismatch(f"{dim.where} has no elements")
                free = [i for i in dim.factors if not binding.is_known(i)]
                binding.unify(free[0], self.tables.range(0), None, dim.where)

    def _window_row(self, window: Window, row: int | None, claims: list[int] | None, position: int) -> int:
        """Return the row of the result dim of a window; that of the operand dim is None if it does not matter."""
        size = self.instance.results[0].shape[window.result_dim]
        whole = self.instance.operands[window.operand].shape[window.operand_dim]
        equality = self.instance.equalities[window.operand][window.operand_dim]
        if row == self.tables.whole(whole, equality) and self._local_size(0, window.result_dim, position) == size:
            return self.tables.range(size)
        if claims is None:
            raise Mismatch("the part of a windowed dim is not known")
        result = claims[window.result_dim]
        vector = self.tables.rows[result]
        first, last = window.reads(int(vector[0]), int(vector[-1]) + 1) if len(vector) else (0, 0)
        if row not in (None, self.tables.first(self.tables.row(np.arange(first, last)), equality)):
            raise Mismatch(
                f"operand {window.operand} has other elements than {first} to {last} of dim {window.operand_dim}"
            )
        return result

    def _local_size(self, result: int, dim: int, position: int) -> int | None:
        return None if self.local is None else at_rank(self.local.results[result].placed.shape[dim], position)

    def _place_equal_elements(self, binding: Binding, claims: Sequence[list[int] | None]) -> None:
        """Bind factors of equal elements to their places, all or those that are claimed, where results depend on them.

        The ops that are given for a cut factor have their places as attributes.
        """
        for i, row in list(binding.rows.items()):
            factor, equality = self.rule.factors[i], binding.equalities[i]
            if equality is None or not self.instance.is_ordered(factor):
                continue
            rows = [self.tables.range(factor.size)] if row == self.tables.whole(factor.size, equality) else [
                claimed[d]
                for claimed, dims in zip(claims, self.rule.results, strict=True)
                for d, own in enumerate(dims) if own == (i,) and claimed is not None
            ]  # fmt: skip
            if rows:
                binding.unify(i, rows[0], None, factor.name)
            elif self.local is not None:
                raise Mismatch(f"the part of {factor.name} is not known")

    def _result_rows(
        self,
        binding: Binding,
        without: Sequence[Dim],
        of_windows: Mapping[int, int],
        claims: Sequence[list[int] | None],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> list[int]:
        rows = []
        for number, (kind, dims, shape) in enumerate(
            zip(self.instance.results, self.rule.results, shapes, strict=True)
        ):
            if shape is not None and 0 in shape:
                rows += self._any_rows(number, shape, claims[number], {(i,): row for i, row in binding.rows.items()})
                continue
            for dim, (size, factors) in enumerate(zip(kind.shape, dims, strict=True)):
                claim = claims[number]
                length = None if shape is None else shape[dim]
                if number == 0 and dim in of_windows:
                    row = of_windows[dim]
                elif not factors:
                    row = self.tables.range(size)
                else:
                    where = f"dim {dim} of result {number}"
                    self._bind_free(binding, without, factors, length, None if claim is None else claim[dim], where)
                    row = binding.composed(factors)
                if length not in (None, len(self.tables.rows[row])):
                    raise Mismatch(f"dim {dim} of result {number} has {length} elements")
                rows.append(row)
        return rows

    def _bind_free(
        self,
        binding: Binding,
        without: Sequence[Dim],
        factors: tuple[int, ...],
        length: int | None,
        claim: int | None,
        where: str,
    ) -> None:
        """Bind the factors of a result's dim that no operand has, or only empty ones: these add nothing to any.

        It has `length` elements, or as many as are claimed.
        """
        free = [i for i in factors if not binding.is_known(i)]
        if not free:
            return
        if length is None and claim is not None:
            length = len(self.tables.rows[claim])
        factors_of_operands = set(chain(*chain(*self.rule.operands)))
        lengths = {i: self.rule.factors[i].size for i in free}
        equalities = [None if self.instance.is_ordered(self.rule.factors[i]) else self.of_factors[i] for i in factors]
        others = binding.count(factors)
        is_repeated = len(free) == 1 and free[0] not in factors_of_operands and self.of_factors[free[0]] is not None
        if is_repeated and length is not None and length % others == 0:
            lengths = {free[0]: length // others}
        if length == others * math.prod(lengths.values()):
            for i, equality in zip(factors, equalities, strict=True):
                if i in lengths:
                    row = self.tables.whole(self.rule.factors[i].size, equality)
                    binding.unify(i, self.tables.equal(lengths[i]) if is_repeated else row, equality, where)
            return
        dims = [item for item in without if len(item.factors) == 1]
        if claim is not None and len(self.tables.rows[claim]) == length:
            item = Dim(factors, claim, tuple(equalities), where)
            # There may be padding in place of claimed rows: only a local op tells their number.
            dims = [*dims, item] if self.local is None else [item, *dims]
        for item in dims:
            with suppress(Mismatch):
                made = next(bindings(binding, [item], ()))
                binding.rows.update(made.rows)
                binding.equalities.update(made.equalities)
        if not all(binding.is_known(i) for i in factors):
            raise Mismatch(f"the part of {where} is not known")

    def _check_attrs(self, parts: Mapping[int, tuple[int, ...]], position: int) -> None:
        """Raise `Mismatch` unless the attributes of the op on one device are those of its part, if it has one."""
        if self.local is None or any(0 in v.placed.local(position).shape for v in self.local.results):
            return
        split, actual = self.instance.entry.split, local_attrs(self.local.attrs, position)
        expected = []
        # The whole of a dim is a part of it, too.
        others = [window for window in self.rule.windows if window not in self.windows]
        for also in chain.from_iterable(combinations(others, count) for count in range(len(others) + 1)):
            windows = self.windows.union(also)
            attrs: Mapping[str, Attribute] = self.instance.op.attrs
            if split.windowed is not None and windows:
                attrs = split.windowed(attrs, {window.index: parts[window.index] for window in windows})
            if split.localize is not None:
                types = [v.placed.local(position) for v in self.local.operands]
                attrs = split.localize(attrs, types, [v.placed.local(position) for v in self.local.results])
            expected.append(attrs)
        if not any(same_attrs(attrs, actual) for attrs in expected):
            raise Mismatch(f"its attributes are {dict(actual)}, expected {dict(expected[0])}")

    def _is_cut(self, window: Window) -> bool:
        """Whether some device has only a part of the dim of a window, or computes only a part of it."""
        size = self.instance.operands[window.operand].shape[window.operand_dim]
        equality = self.instance.equalities[window.operand][window.operand_dim]
        rows = self.tables.tables[self.operands[window.operand].dims[window.operand_dim]]
        result = self.instance.results[0].shape[window.result_dim]
        sizes = {self._local_size(0, window.result_dim, position) for position in range(len(rows))}
        return any(row != self.tables.whole(size, equality) for row in rows) or sizes != {result}

    # All devices

    def _is_whole(self, i: int, rows: Sequence[int | None]) -> bool:
        """Whether all devices that compute have all of a factor."""
        whole = self.tables.whole(self.rule.factors[i].size, self.of_factors[i])
        return all(row is None or self.tables.first(row, self.of_factors[i]) == whole for row in rows)

    def _check_expansions(self, factors: Sequence[Sequence[int | None]]) -> None:
        """Raise `Mismatch` for a cut factor for which the entry gives other ops."""
        expand = self.instance.entry.split.expand
        if self.local is None or not expand:
            return
        for i, (factor, rows) in enumerate(zip(self.rule.factors, factors, strict=True)):
            is_reduced = factor.kind not in (PARALLEL, BLOCKED)
            if (factor.name in expand or (is_reduced and "*" in expand)) and not self._is_whole(i, rows):
                raise Mismatch(f"{factor.name} is cut, which takes other ops")

    def _pending(self, factors: Sequence[Sequence[int | None]]) -> list[tuple[str, ...]]:
        """Return the pending reductions of each result."""
        pending = [list(self._passed()) for _ in self.instance.results]
        for number, (factor, rows) in enumerate(zip(self.rule.factors, factors, strict=True)):
            if factor.kind in (PARALLEL, BLOCKED) or self._is_whole(number, rows):
                continue
            axes = self._reduced_axes(factor, number, rows)
            for dims, terms in zip(self.rule.results, pending, strict=True):
                if any(number in dim for dim in dims):
                    continue
                for axis in axes:
                    if terms[axis]:
                        raise Mismatch(f"terms of a pending reduction are multiplied by parts of {factor.name}")
                    terms[axis] = factor.kind
        return [tuple(terms) for terms in pending]

    def _passed(self) -> tuple[str, ...]:
        """Return the pending reductions of operands that pass through the op."""
        result = []
        for axis in range(len(self.groups.mesh.shape)):
            terms = {number: o.pending[axis] for number, o in enumerate(self.operands) if o.pending[axis]}
            kinds = set(terms.values())
            if not terms:
                result.append("")
                continue
            linear = self.instance.entry.linear_sets(len(self.operands), self.instance.op.attrs)
            is_reshape = Trait.MOVES in self.instance.entry.traits and len(terms) == len(self.operands)
            passes = kinds <= {"sum", "mean"} and frozenset(terms) in linear
            if len(kinds) > 1 or not (passes or is_reshape):
                raise Mismatch(
                    f"operand {min(terms)} is a term of a pending {min(kinds)} along axis "
                    f"{self.groups.mesh.axes[axis]}, which is not reduced before"
                )
            result.append(kinds.pop())
        return tuple(result)

    def _routed(self, dims: Dims) -> Routed | None:
        """Return which rows of a result devices have by data: an op must act on each of them alone."""
        routed = {
            (own[layout.routed.dim], layout.routed.ids, layout.routed.groups)
            for layout, own in zip(self.operands, self.rule.operands, strict=True)
            if layout.routed is not None
        }
        if not routed:
            return None
        split = self.instance.entry.split
        ((factors, ids, groups), *others) = routed
        place = dims.index(factors) if len(factors) == 1 and factors in dims else None
        if others or place is None or self.rule.windows:
            raise Mismatch("it needs all rows, of which devices have some by data")
        factor = self.rule.factors[factors[0]]
        if factor.kind != PARALLEL or factor.name in split.positional or factor.name in split.expand:
            raise Mismatch("it needs all rows, of which devices have some by data")
        return Routed(place, ids, groups)

    def _zeros(self, factors: Sequence[Sequence[int | None]], dims: Dims, pending: Sequence[str]) -> frozenset[int]:
        """Return the devices of which all elements of a result are zeros: they have nothing of a sum."""
        if "sum" not in pending:
            return frozenset()
        result = {
            position
            for number, (factor, rows) in enumerate(zip(self.rule.factors, factors, strict=True))
            if factor.kind == "sum" and not any(number in own for own in dims)
            for position, row in enumerate(rows)
            if row is not None and not self.tables.has_elements(row)
        }
        terms = [layout.zeros for layout in self.operands if any(layout.pending)]
        return frozenset(result.union(frozenset.intersection(*terms) if terms else ()))

    def _reduced_axes(self, factor: Factor, number: int, rows: Sequence[int | None]) -> tuple[int, ...]:
        """Return the axes along which devices have different parts of a reduced factor, together all of it."""
        equality = self.of_factors[number]
        firsts = [None if row is None else self.tables.first(row, equality) for row in rows]
        varying = self.groups.varies(firsts)
        kinds = zip(self.instance.operands, self.rule.operands, strict=True)
        if any(0 in kind.shape and any(number in dim for dim in dims) for kind, dims in kinds):
            # The reduction of nothing is the same on all devices, so that it may be any term.
            return next(self._sets_of_axes(factor), varying)
        candidates = [varying] if equality is None else [varying, *self._sets_of_axes(factor)]
        expected = self.tables.rows[self.tables.whole(factor.size, equality)]
        if equality is not None and (expected[1:] < expected[:-1]).any():
            expected = np.sort(expected)
        axes = next((axes for axes in candidates if self._is_divided(firsts, axes, expected)), None)
        if axes is None:
            raise Mismatch(f"devices do not have each element of {factor.name} once")
        if any(row is not None and self.tables.is_padded(row) for row in set(rows)):
            if number in self.overlaid:
                raise Mismatch("padding is reduced that contains elements")
            for operand, dims, kind in zip(self.operands, self.rule.operands, self.instance.operands, strict=True):
                low, high = number_range(kind.dtype)
                neutral = min(max(NEUTRAL[factor.kind], low), high)
                for fill, dim in zip(operand.fills, dims, strict=True):
                    if number in dim and fill != neutral:
                        raise Mismatch(f"padding is reduced that is not known to be {neutral}")
        return axes

    def _sets_of_axes(self, factor: Factor) -> Iterator[tuple[int, ...]]:
        """Iterate over the axes along which elements that are equal may be divided, claimed ones first."""
        count = len(self.groups.mesh.shape)
        for layout in self.claimed:
            if layout is not None:
                yield tuple(axis for axis, reduction in enumerate(layout.pending) if reduction == factor.kind)
        for length in range(1, count + 1):
            yield from combinations(range(count), length)

    def _is_divided(self, rows: Sequence[int | None], axes: Sequence[int], expected: Vector) -> bool:
        """Whether devices along axes have each element once together; those without results need none."""
        seen: set[tuple[int | None, ...]] = set()
        for group in self.groups.along(axes):
            of_group = tuple(rows[position] for position in group)
            if of_group in seen and self.useless.isdisjoint(group):
                continue
            seen.add(of_group)
            held = [row for row in of_group if row is not None]
            parts = np.concatenate([self.tables.rows[row] for row in held]) if held else expected
            if not self.useless.isdisjoint(group) and not (parts >= 0).any():
                # What adds nothing to results that no device has may be any of them.
                self.useless.update(group)
                continue
            elements = parts[parts >= 0]
            if not np.array_equal(elements, expected) and not np.array_equal(np.sort(elements), expected):
                return False
        return True

    def _fill(self, factors: Sequence[Sequence[int | None]], dim: tuple[int, ...]) -> float | None:
        """Return the number in the padding of a result's dim; None if it is not known."""
        padded = [i for i in dim if any(row is not None and self.tables.is_padded(row) for row in set(factors[i]))]
        fills = {None if i in self.overlaid else self._fill_along(i) for i in padded}
        return fills.pop() if len(fills) == 1 else None

    def _fill_along(self, i: int) -> float | None:
        """Return the number in the padding of a factor in the results; None if it is not known."""
        values: list[float | None] = []
        has = []
        for layout, dims, number in zip(self.operands, self.rule.operands, self.numbers, strict=True):
            own = next((f for f, d in zip(layout.fills, dims, strict=True) if i in d), None)
            has.append(any(i in d for d in dims))
            values.append(own if has[-1] else number)
        entry, op = self.instance.entry, self.instance.op
        if Trait.POINTWISE in entry.traits and values and None not in values:
            return _applied(op, [v for v in values if v is not None])
        finite = [not cut or (v is not None and math.isfinite(v)) for cut, v in zip(has, values, strict=True)]
        for group in entry.linear_sets(len(self.operands), op.attrs):
            if all(has[n] and values[n] == 0.0 for n in group) and all(finite):
                return 0.0
        return None


def same_attrs(first: Mapping[str, Attribute], second: Mapping[str, Attribute]) -> bool:
    """Whether attributes are equal, numbers of the same kind."""
    return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _per_device(attrs: Mapping[str, Attribute]) -> Iterator[tuple[int, ...]]:
    for value in attrs.values():
        for number in numbers_by_device(value):
            yield number.values


def _applied(op: Op, numbers: Sequence[float]) -> float | None:
    """Return the result of a pointwise op on numbers; None if it is not a number."""
    import torch

    types = [v.dtensor.dtype for v in op.operands]
    tensors = [torch.tensor(n, dtype=getattr(torch, d)) for n, d in zip(numbers, types, strict=True)]
    try:
        result = float(evaluate(op, tensors)[0])
    except DistIRError:
        return None
    return None if math.isnan(result) else result
