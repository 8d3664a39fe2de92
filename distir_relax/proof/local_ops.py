"""What an op of the sharded program gives when devices run it on pieces of its operands, by its factor rule.

Factors that both operands have must be cut alike. A factor that is parallel cuts the results; the parts of one that is
reduced make the results terms of a pending reduction. Terms may pass through operands in which the op is linear.
Padding may not change results: it must be neutral to a reduction over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from distir_relax.errors import DistIRError
from distir_relax.ir import Attribute, Op, TensorType, at_rank
from distir_relax.ops import Trait, evaluate, lookup, number_range
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.positions import PADDING
from distir_relax.ops.table.rule import BLOCKED, PARALLEL, Factor, Rule
from distir_relax.ops.table.spmd_inference import local_attrs, numbers_by_device
from distir_relax.ops.table.windows import Window
from distir_relax.proof.pieces import SAME, Groups, Layout, Mismatch, Tables, composed, digits

NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True, slots=True)
class Instance:
    """An op of the sharded program: its types are global."""

    op: Op
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    @property
    def entry(self) -> OpDef:
        """The op's entry in the table."""
        return lookup(self.op.name, self.op.location)


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
) -> tuple[list[Layout], Rule]:
    """Return the layouts of the results of the ops that an entry gives for a cut factor; see `layouts_of_results`.

    Also the op's factor rule.
    """
    application = _Application(tables, instance, None, operands, groups, claimed, (None,) * len(operands))
    return application.layouts(), application.rule()


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

    def rule(self) -> Rule:
        instance = self.instance
        return instance.entry.rule_for(instance.operands, instance.op.attrs, instance.results)

    def layouts(self) -> list[Layout]:
        instance, rule = self.instance, self.rule()
        tables = [table for layout in self.operands for table in layout.dims]
        tables += [table for layout in self.claimed if layout for table in layout.dims]
        sizes = self._local_sizes()
        columns = [s.values for s in sizes if not isinstance(s, int)]
        if self.local is not None:
            columns += _per_device(self.local.attrs)
        self._find_cut_factors(rule)
        self.windows = {window for window in rule.windows if self._is_cut(window)}
        bound: dict[object, tuple[list[int], list[int]]] = {}
        per_device = []
        rows_by_device = list(zip(*(self.tables.tables[table] for table in tables), strict=True))
        count = len(self.groups.devices)
        for position in range(count):
            rows = rows_by_device[position] if tables else ()
            key = (rows, tuple(column[position] for column in columns))
            if key not in bound:
                bound[key] = self._bind(rule, rows, position)
            per_device.append(bound[key])
        factors = [[item[0][i] for item in per_device] for i in range(len(rule.factors))]
        results = [[item[1][i] for item in per_device] for i in range(sum(len(t.shape) for t in instance.results))]
        self._check_expansions(rule, factors)
        pending = self._pending(rule, factors)
        flat = iter(self.tables.table(rows) for rows in results)
        layouts = []
        for kind, dims, terms in zip(instance.results, rule.results, pending, strict=True):
            tables_of_dims = tuple(next(flat) for _ in kind.shape)
            fills = tuple(self._fill(rule, factors, dim) for dim in dims)
            layouts.append(Layout(tables_of_dims, terms, fills))
        return layouts

    def _local_sizes(self) -> list[Any]:
        return [] if self.local is None else [size for v in self.local.results for size in v.placed.shape]

    def _find_cut_factors(self, rule: Rule) -> None:
        """Find the factors that are cut, by the devices that have elements of them."""
        for layout, dims in zip(self.operands, rule.operands, strict=True):
            for table, factors in zip(layout.dims, dims, strict=True):
                sizes = [rule.factors[i].size for i in factors]
                for row in set(self.tables.tables[table]) if len(factors) > 1 else ():
                    if row != self.tables.range(math.prod(sizes)) and not self.tables.is_same(row):
                        vector = self.tables.rows[row]
                        vectors = (digits(vector, sizes) if (vector >= 0).any() else None) or ()
                        parts = zip(factors, vectors, sizes, strict=False)
                        self.cut_factors.update(
                            i for i, part, size in parts if not np.array_equal(part, np.arange(size))
                        )

    # One device

    def _bind(self, rule: Rule, rows: Sequence[int], position: int) -> tuple[list[int], list[int]]:
        """Return the row of each factor, and of each dim of the results, on one device."""
        bound: dict[int, int] = {}
        remaining = iter(rows)
        windows = {(w.operand, w.operand_dim): w for w in rule.windows}
        found: list[tuple[Window, int]] = []
        nothing: list[tuple[tuple[int, ...], int]] = []
        for number, (kind, dims) in enumerate(zip(self.instance.operands, rule.operands, strict=True)):
            for dim, (size, factors) in enumerate(zip(kind.shape, dims, strict=True)):
                row = next(remaining)
                if (number, dim) in windows:
                    found.append((windows[number, dim], row))
                elif not factors:
                    is_whole = not size or self.tables.range(size) == row or self.tables.is_same(row)
                    if not is_whole or len(self.tables.rows[row]) != size:
                        raise Mismatch(f"dim {dim} of operand {number} is cut")
                elif len(factors) > 1 and not (self.tables.rows[row] >= 0).any():
                    nothing.append((factors, row))
                else:
                    self._bind_dim(rule, factors, size, row, bound, f"dim {dim} of operand {number}", position)
        for factors, row in nothing:
            self._bind_nothing(rule, factors, row, bound, position)
        claims = [[next(remaining) for _ in layout.dims] if layout else None for layout in self.claimed]
        parts: dict[int, tuple[int, ...]] = {}
        of_windows: dict[int, int] = {}
        for window, row in found:
            result = self._window_row(window, row, claims[0], position)
            of_windows[window.result_dim] = result
            vector = self.tables.rows[result]
            first = int(vector[0]) if len(vector) else 0
            parts[window.index] = window.part(first, first + len(vector))
        result_rows = self._result_rows(rule, bound, of_windows, claims, position)
        self._check_attrs(parts, position)
        return [bound.get(i, -1) for i in range(len(rule.factors))], result_rows

    def _bind_dim(
        self,
        rule: Rule,
        factors: tuple[int, ...],
        size: int,
        row: int,
        bound: dict[int, int],
        where: str,
        position: int,
    ) -> None:
        sizes = [rule.factors[i].size for i in factors]
        if row == self.tables.range(size):
            rows = [self.tables.range(n) for n in sizes]
        elif len(factors) == 1:
            rows = [row]
        elif not (self.tables.rows[row] >= 0).any():
            self._bind_nothing(rule, factors, row, bound, position)
            return
        elif self.tables.is_same(row):
            raise Mismatch(f"{where} is cut, with equal elements")
        else:
            vector = self.tables.rows[row]
            vectors = digits(vector, sizes)
            if vectors is None:
                raise Mismatch(f"{where} is not cut along one of its factors")
            rows = [self.tables.row(vector) for vector in vectors]
        for i, part in zip(factors, rows, strict=True):
            self._unify(rule.factors[i], i, part, bound, where)

    def _bind_nothing(
        self, rule: Rule, factors: tuple[int, ...], row: int, bound: dict[int, int], position: int
    ) -> None:
        """Bind the factors of a dim of which a device has nothing, or padding alone: one that is cut elsewhere."""
        if not any(not (self.tables.rows[bound[i]] >= 0).any() for i in factors if i in bound):
            cut = self._empty_factor(rule, [i for i in factors if i not in bound] or factors, position)
            others = math.prod(rule.factors[i].size for i in factors if i != cut)
            bound[cut] = self.tables.row(np.full(len(self.tables.rows[row]) // others, PADDING))
        for i in factors:
            if i not in self.cut_factors:
                bound.setdefault(i, self.tables.range(rule.factors[i].size))

    def _empty_factor(self, rule: Rule, factors: Sequence[int], position: int) -> int:
        """Return the factor of a dim of which a device has nothing: one that is cut on other devices."""
        cut = [i for i in factors if i in self.cut_factors]
        for number, dims in enumerate(rule.results):
            for dim, own in enumerate(dims):
                if len(own) == 1 and own[0] in cut and self._local_size(number, dim, position) == 0:
                    return own[0]
        return next(iter(cut), factors[0])

    def _unify(self, factor: Factor, i: int, row: int, bound: dict[int, int], where: str) -> None:
        if factor.kind == BLOCKED and row != self.tables.range(factor.size):
            raise Mismatch(f"{where} is cut, all of which {self.instance.op.name} needs")
        known = bound.get(i)
        if (
            known is None
            or known == row
            or (self.tables.is_same(known) and len(self.tables.rows[known]) == len(self.tables.rows[row]))
        ):
            bound[i] = row
        elif not (self.tables.is_same(row) and len(self.tables.rows[known]) == len(self.tables.rows[row])):
            raise Mismatch(f"{where} is cut in another way than an operand before it")

    def _window_row(self, window: Window, row: int, claims: list[int] | None, position: int) -> int:
        """Return the row of the result dim of a window."""
        size = self.instance.results[0].shape[window.result_dim]
        if row == self.tables.range(self.instance.operands[window.operand].shape[window.operand_dim]) and (
            self._local_size(0, window.result_dim, position) == size
        ):
            return self.tables.range(size)
        if claims is None:
            raise Mismatch("the part of a windowed dim is not known")
        result = claims[window.result_dim]
        vector = self.tables.rows[result]
        first, last = window.reads(int(vector[0]), int(vector[-1]) + 1) if len(vector) else (0, 0)
        if row != self.tables.row(np.arange(first, last)):
            raise Mismatch(
                f"operand {window.operand} has other elements than {first} to {last} of dim {window.operand_dim}"
            )
        return result

    def _local_size(self, result: int, dim: int, position: int) -> int | None:
        return None if self.local is None else at_rank(self.local.results[result].placed.shape[dim], position)

    def _result_rows(
        self,
        rule: Rule,
        bound: dict[int, int],
        of_windows: Mapping[int, int],
        claims: Sequence[list[int] | None],
        position: int,
    ) -> list[int]:
        self._place_equal_elements(rule, bound, claims)
        rows = []
        for number, (kind, dims) in enumerate(zip(self.instance.results, rule.results, strict=True)):
            for dim, (size, factors) in enumerate(zip(kind.shape, dims, strict=True)):
                if number == 0 and dim in of_windows:
                    rows.append(of_windows[dim])
                    continue
                if not factors:
                    rows.append(self.tables.range(size))
                    continue
                free = [i for i in factors if i not in bound]
                if free:
                    self._bind_free(rule, factors, free, claims[number], number, dim, size, bound, position)
                rows.append(self._composed(rule, factors, bound))
                expected = self._local_size(number, dim, position)
                if expected not in (None, len(self.tables.rows[rows[-1]])):
                    raise Mismatch(f"dim {dim} of result {number} has {expected} elements")
        return rows

    def _place_equal_elements(self, rule: Rule, bound: dict[int, int], claims: Sequence[list[int] | None]) -> None:
        """Bind factors of equal elements to those that are claimed, where an op tells elements by their positions."""
        positional = self.instance.entry.split.positional
        for i, row in list(bound.items()):
            if rule.factors[i].name in positional and self.tables.is_same(row):
                places = [(n, d) for n, dims in enumerate(rule.results) for d, own in enumerate(dims) if own == (i,)]
                rows = [claimed[d] for n, d in places if (claimed := claims[n]) is not None]
                if not rows or len(self.tables.rows[rows[0]]) != len(self.tables.rows[row]):
                    raise Mismatch(f"the part of {rule.factors[i].name} is not known")
                bound[i] = rows[0]

    def _bind_free(
        self,
        rule: Rule,
        factors: tuple[int, ...],
        free: Sequence[int],
        claims: list[int] | None,
        number: int,
        dim: int,
        size: int,
        bound: dict[int, int],
        position: int,
    ) -> None:
        """Bind the factors of a result's dim that no operand has: its elements along them are equal."""
        length = self._local_size(number, dim, position)
        has_any = all(len(self.tables.rows[bound[i]]) for i in bound)
        if claims is not None and (
            self.local is None or (not has_any and len(self.tables.rows[claims[dim]]) == length)
        ):
            self._bind_dim(rule, factors, size, claims[dim], bound, f"dim {dim} of result {number}", position)
            return
        others = math.prod(len(self.tables.rows[bound[i]]) for i in factors if i in bound)
        sizes = math.prod(rule.factors[i].size for i in free)
        if length is None or length == others * sizes:
            bound.update((i, self.tables.range(rule.factors[i].size)) for i in free)
        elif len(free) == 1 and others and length % others == 0:
            bound[free[0]] = self.tables.same(length // others, rule.factors[free[0]].size)
        elif claims is not None:
            self._bind_dim(rule, factors, size, claims[dim], bound, f"dim {dim} of result {number}", position)
        else:
            raise Mismatch(f"the part of dim {dim} of result {number} is not known")

    def _composed(self, rule: Rule, factors: tuple[int, ...], bound: Mapping[int, int]) -> int:
        if len(factors) == 1:
            return bound[factors[0]]
        if all(bound[i] == self.tables.range(rule.factors[i].size) for i in factors):
            return self.tables.range(math.prod(rule.factors[i].size for i in factors))
        vectors = [self.tables.rows[bound[i]] for i in factors]
        if any(len(v) and v[0] == SAME for v in vectors):
            return self.tables.row(np.full(math.prod(map(len, vectors)), SAME))
        return self.tables.row(composed(vectors, [rule.factors[i].size for i in factors]))

    def _check_attrs(self, parts: Mapping[int, tuple[int, ...]], position: int) -> None:
        """Raise `Mismatch` unless the attributes of the op on one device are those of its part, if it has one."""
        if self.local is None or any(0 in v.placed.local(position).shape for v in self.local.results):
            return
        split = self.instance.entry.split
        attrs: Mapping[str, Attribute] = self.instance.op.attrs
        actual = local_attrs(self.local.attrs, position)
        if split.windowed is not None and self.windows:
            attrs = split.windowed(attrs, {window.index: parts[window.index] for window in self.windows})
        if split.localize is not None:
            types = [v.placed.local(position) for v in self.local.operands]
            attrs = split.localize(attrs, types, [v.placed.local(position) for v in self.local.results])
        if not same_attrs(attrs, actual):
            raise Mismatch(f"its attributes are {dict(actual)}, expected {dict(attrs)}")

    def _is_cut(self, window: Window) -> bool:
        """Whether some device has only a part of the dim of a window, or computes only a part of it."""
        size = self.instance.operands[window.operand].shape[window.operand_dim]
        rows = self.tables.tables[self.operands[window.operand].dims[window.operand_dim]]
        result = self.instance.results[0].shape[window.result_dim]
        sizes = {self._local_size(0, window.result_dim, position) for position in range(len(rows))}
        return any(row != self.tables.range(size) for row in rows) or sizes != {result}

    # All devices

    def _check_expansions(self, rule: Rule, factors: Sequence[Sequence[int]]) -> None:
        """Raise `Mismatch` for a cut factor for which the entry gives other ops."""
        expand = self.instance.entry.split.expand
        if self.local is None or not expand:
            return
        for factor, rows in zip(rule.factors, factors, strict=True):
            is_reduced = factor.kind not in (PARALLEL, BLOCKED)
            is_expanded = factor.name in expand or (is_reduced and "*" in expand)
            if is_expanded and any(row != self.tables.range(factor.size) for row in rows):
                raise Mismatch(f"{factor.name} is cut, which takes other ops")

    def _pending(self, rule: Rule, factors: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        """Return the pending reductions of each result."""
        pending = [list(self._passed()) for _ in self.instance.results]
        for number, (factor, rows) in enumerate(zip(rule.factors, factors, strict=True)):
            if factor.kind in (PARALLEL, BLOCKED) or all(row == self.tables.range(factor.size) for row in rows):
                continue
            axes = self._reduced_axes(factor, number, rule, rows)
            for dims, terms in zip(rule.results, pending, strict=True):
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

    def _reduced_axes(self, factor: Factor, number: int, rule: Rule, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the axes along which devices have different parts of a reduced factor, together all of it."""
        if any(self.tables.is_same(row) for row in rows):
            axes = self._axes_of_equal_elements(factor, rows)
        else:
            axes = self.groups.varies(rows)
            for group in {tuple(rows[position] for position in group) for group in self.groups.along(axes)}:
                parts = np.concatenate([self.tables.rows[row] for row in group])
                elements, expected = parts[parts >= 0], np.arange(factor.size)
                if not np.array_equal(elements, expected) and not np.array_equal(np.sort(elements), expected):
                    raise Mismatch(f"devices do not have each element of {factor.name} once")
        if any(self.tables.is_padded(row) for row in set(rows)):
            for operand, dims, kind in zip(self.operands, rule.operands, self.instance.operands, strict=True):
                low, high = number_range(kind.dtype)
                neutral = min(max(NEUTRAL[factor.kind], low), high)
                for fill, dim in zip(operand.fills, dims, strict=True):
                    if number in dim and fill != neutral:
                        raise Mismatch(f"padding is reduced that is not known to be {neutral}")
        return axes

    def _axes_of_equal_elements(self, factor: Factor, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the axes along which devices have as many elements together as a factor with equal elements."""
        mesh = self.groups.mesh
        lengths = [int((self.tables.rows[row] >= 0).sum()) for row in rows]
        for axes in (c for n in range(len(mesh.shape)) for c in combinations(range(len(mesh.shape)), n + 1)):
            if all(sum(lengths[position] for position in group) == factor.size for group in self.groups.along(axes)):
                return axes
        raise Mismatch(f"devices do not have each element of {factor.name} once")

    def _fill(self, rule: Rule, factors: Sequence[Sequence[int]], dim: tuple[int, ...]) -> float | None:
        """Return the number in the padding of a result's dim; None if it is not known."""
        padded = [i for i in dim if any(self.tables.is_padded(row) for row in set(factors[i]))]
        if len(padded) != 1:
            return None
        values: list[float | None] = []
        has = []
        for layout, dims, number in zip(self.operands, rule.operands, self.numbers, strict=True):
            own = next((f for f, d in zip(layout.fills, dims, strict=True) if padded[0] in d), None)
            has.append(any(padded[0] in d for d in dims))
            values.append(own if has[-1] else number)
        entry, op = self.instance.entry, self.instance.op
        if Trait.POINTWISE in entry.traits and values and None not in values:
            return _applied(op, [v for v in values if v is not None])
        finite = [not cut or (v is not None and math.isfinite(v)) for cut, v in zip(has, values, strict=True)]
        for group in entry.linear_sets(len(self.operands), op.attrs):
            if all(has[i] and values[i] == 0.0 for i in group) and all(finite):
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
