"""Elimination of the token sort of mixture-of-experts models.

A mixture of experts sorts its tokens by expert, so that the tokens of each expert are contiguous::

    p = argsort(ids)       x[p] -> grouped product -> row-wise ops -> grouped product -> y      y[inverse of p]

Row-wise ops commute with the permutation, and a grouped product only needs the group of each row: the same result is
computed from `x`, without `p` (`routed_matmul` for `grouped_matmul`). Then tokens of different devices, or
microbatches, do not meet in a sort, and each device may send its rows to the devices that have their experts.

No op is matched by name. Row-wise ops have a parallel factor (`group_counts.is_rowwise`); an entry declares sorts,
lookups and writes by position in its `Order`; and `group_counts` proves by enumeration that group bounds are those of
the sorted `ids`. If a sorted value has any other use, the program is unchanged.

Symbolic sizes have numbers in that proof. The program is rewritten once for each of several choices of them, and
unchanged unless the rewritten programs are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distir_relax.frontends.group_counts import EXACT_COUNTS, GroupCounts, is_rowwise, rule_of, run
from distir_relax.frontends.imported_model import Imported, eliminate_dead_ops
from distir_relax.ir import Attribute, Function, Op, TensorType, Value, fresh_name, value_names
from distir_relax.ir.symbols import module_symbols, specialize_op
from distir_relax.layout import Symbol, evaluate_size
from distir_relax.layout.symbolic_size import bounds
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table import Order

if TYPE_CHECKING:
    import torch


def eliminate_moe_sorts(imported: Imported) -> Imported:
    """Return the model without sorts whose order does not affect the results."""
    main, scopes = imported.module.main, dict(imported.scopes)
    if not (names := [op.results[0].name for op in main.ops if _sorts(op)]):
        return imported
    choices = _choices_of_sizes(module_symbols(imported.module))
    for name in names:
        sort = next(op for op in main.ops if op.results[0].name == name)
        eliminations = [_SortElimination(main, sort, imported.tensors, sizes) for sizes in choices]
        rewritten, *others = [elimination.run() for elimination in eliminations]
        if rewritten is not None and all(other == rewritten for other in others):
            main = rewritten
            scopes |= {name: scopes[like] for name, like in eliminations[0].like.items() if like in scopes}
    if main is imported.module.main:
        return imported
    main = eliminate_dead_ops(main)
    inputs = {item.value.name for item in main.inputs}
    tensors = {name: tensor for name, tensor in imported.tensors.items() if name in inputs}
    return replace(imported, module=replace(imported.module, functions=(main,)), tensors=tensors, scopes=scopes)


_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79)


class _OrderMatters(Exception):
    """A use of a sorted value depends on the order."""


@dataclass(slots=True)
class _SortedValue:
    """A sorted value before the sort: `plain`, `routed` (between grouped products), or its constant `data`."""

    plain: Value | None = None
    routed: Value | None = None
    data: torch.Tensor | None = None


@dataclass(slots=True)
class _SortElimination:
    """Rewriting of the program without one sort; `sizes` are values of its symbols."""

    main: Function
    sort: Op
    constants: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]
    ops: list[Op] = field(default_factory=list)
    producers: dict[str, Op] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    like: dict[str, str] = field(default_factory=dict)
    """The model's value at the position of each new value."""
    now: dict[str, Value] = field(default_factory=dict)
    """Replacements of values that are unsorted again, or do not depend on the order."""
    rows: dict[str, _SortedValue] = field(default_factory=dict)
    """The sorted values: ``v = rows[v][p]``."""
    back: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values computed from the inverse of p: ``v = back[v][inverse of p]``."""
    groups: Value | None = None
    group_counts: GroupCounts = field(init=False)

    def run(self) -> Function | None:
        """Return the function without the sort; None if the order matters."""
        import torch

        count = _groups_of(self.main, self.sort.operands[0])
        kind = self.sort.operands[0].tensor
        if count is None or kind.dtype != "int64":
            return None
        self.names = value_names(self.main)
        constants = {i.value.name for i in self.main.inputs if i.role == "constant"}
        constant_data = {name: tensor for name, tensor in self.constants.items() if name in constants}
        rows, most = self._at(self.sort).operands[0].tensor.elements, bounds(kind.elements)[1]
        most_rows = EXACT_COUNTS if most is None else most
        self.group_counts = GroupCounts(self.producers, constant_data, self.sort.operands[0].name, count, most_rows)
        try:
            for op in self.main.ops:
                if op is self.sort:
                    self.rows[op.results[0].name] = _SortedValue(data=torch.arange(rows))
                else:
                    self._op(op)
            if any(o.value.name in self.rows or o.value.name in self.back for o in self.main.outputs):
                return None
        except _OrderMatters:
            return None
        outputs = tuple(replace(o, value=self.now.get(o.value.name, o.value)) for o in self.main.outputs)
        return replace(self.main, ops=tuple(self.ops), outputs=outputs)

    def _op(self, op: Op) -> None:
        inside = [i for i, v in enumerate(op.operands) if v.name in self.rows]
        back = [i for i, v in enumerate(op.operands) if v.name in self.back]
        if not inside and not back:
            changed = any(v.name in self.now for v in op.operands)
            self._keep(replace(op, operands=tuple(map(self._current, op.operands))) if changed else op)
            return
        order = lookup(op.name, op.location).split.order or Order()
        at_front = op.attrs.get("axis") == 0
        if back:
            self._through_back(op, inside, back, order.looks_up and at_front)
        elif order.writes and order.writes(op.attrs) and at_front and inside == [1]:
            self._invert(op)
        elif order.looks_up and at_front and inside == [1] and self.rows[op.operands[1].name].data is not None:
            self._look_up(op)
        elif order.by_number and inside == [0]:
            self._product(op, order.by_number)
        elif is_rowwise(op, inside):
            self._row_by_row(op, inside)
        else:
            self._sum(op, inside)

    def _through_back(self, op: Op, inside: list[int], back: list[int], looks_up: bool) -> None:
        """Unsort a lookup at the inverse of p; compute other row-wise results of the inverse."""
        import torch

        if looks_up and inside == [0] and back == [1]:
            places = self.back[op.operands[1].name]
            if not torch.equal(places, torch.arange(len(places))):
                raise _OrderMatters
            self.now[op.results[0].name] = self._plain(op.operands[0].name, op)
            return
        operands = [self.back.get(v.name, self.group_counts.numbers(self._current(v).name)) for v in op.operands]
        if inside or len(op.results) > 1 or any(x is None for x in operands) or not is_rowwise(op, back):
            raise _OrderMatters
        result = run(self._at(op), [x for x in operands if x is not None])
        if result is None:
            raise _OrderMatters
        self.back[op.results[0].name] = result

    def _invert(self, op: Op) -> None:
        """Write constant data to the positions p: the result is the data at the inverse of p."""
        import torch

        places, data = self.rows[op.operands[1].name].data, self._at(op).operands[0].tensor
        values = self.group_counts.numbers(self._current(op.operands[2]).name)
        if places is None or values is None or not data.shape == values.shape == places.shape:
            raise _OrderMatters
        if not torch.equal(places, torch.arange(len(places))):
            raise _OrderMatters
        self.back[op.results[0].name] = values

    def _look_up(self, op: Op) -> None:
        """Look up consecutive rows, each once or several times."""
        import torch

        source, places = self._current(op.operands[0]), self.rows[op.operands[1].name].data
        size, name = source.tensor.shape[0], op.results[0].name
        count = evaluate_size(size, self.sizes)
        if places is None or not count or len(places) % count or places.dim() != 1 or op.attrs.keys() != {"axis"}:
            raise _OrderMatters
        times = len(places) // count
        if not torch.equal(places, torch.arange(len(places)) // times):
            raise _OrderMatters
        if times == 1:
            self.rows[name] = _SortedValue(plain=source, data=self.group_counts.numbers(source.name))
            return
        rest = source.tensor.shape[1:]
        one = self._emit(op, "reshape", (source,), (size, 1, *rest), {"shape": (size, 1, *rest)})
        many = self._emit(op, "broadcast_to", (one,), (size, times, *rest), {"shape": (size, times, *rest)})
        flat = self._emit(op, "reshape", (many,), (size * times, *rest), {"shape": (size * times, *rest)})
        self.rows[name] = _SortedValue(plain=flat)

    def _product(self, op: Op, by_number: str) -> None:
        """Rewrite a grouped product whose bounds are those of the sorted rows."""
        import torch

        count = self.group_counts.count
        starts, ends = (self.group_counts.tally(self._current(v).name) for v in op.operands[-2:])
        prefix = torch.ones((count, count), dtype=torch.float32).triu()
        if starts is None or ends is None or starts.shape != prefix.shape or ends.shape != prefix.shape:
            raise _OrderMatters
        if not torch.equal(ends.to(prefix.dtype), prefix) or not torch.equal(starts.to(prefix.dtype), prefix.triu(1)):
            raise _OrderMatters
        x, others = self._routed(op.operands[0].name, op), map(self._current, op.operands[1:-2])
        operands = (x, *others, self._ids(), self._groups(op))
        kind = op.results[0].tensor
        routed = self._emit(op, by_number, operands, kind.shape, {"count": count}, op.results[0].name)
        self.rows[op.results[0].name] = _SortedValue(routed=routed)

    def _row_by_row(self, op: Op, inside: list[int]) -> None:
        sorted_values = [self.rows[op.operands[i].name] for i in inside]
        if all(rows.data is not None for rows in sorted_values) and len(op.results) == 1:
            arrays = [self.rows[v.name].data if i in inside else self._numbers(v) for i, v in enumerate(op.operands)]
            given = [x for x in arrays if x is not None]
            result = run(self._at(op), given) if len(given) == len(arrays) else None
            if result is not None:
                self.rows[op.results[0].name] = _SortedValue(data=result)
                return
        others = [v for i, v in enumerate(op.operands) if i not in inside]
        # Only scalars besides rows, so that no gradient is a sum over rows, which are distributed over devices.
        routed = all(rows.routed is not None for rows in sorted_values) and not any(v.tensor.shape for v in others)
        routed = routed and any(rows.plain is None for rows in sorted_values)
        unsort = self._routed if routed else self._plain
        operands = tuple(unsort(v.name, op) if i in inside else self._current(v) for i, v in enumerate(op.operands))
        self._keep(replace(op, operands=operands))
        for value in op.results:
            self.rows[value.name] = _SortedValue(routed=value) if routed else _SortedValue(plain=value)

    def _sum(self, op: Op, inside: list[int]) -> None:
        """Rewrite a sum over all rows, which does not depend on their order."""
        rule = rule_of(op)
        rows = {rule.operands[i][0] for i in inside}
        if len(rows) != 1 or len(row := next(iter(rows))) != 1:
            raise _OrderMatters
        if rule.factors[row[0]].kind not in ("sum", "max", "min"):
            raise _OrderMatters
        for i, dims in enumerate(rule.operands):
            if i not in inside and any(row[0] in dim for dim in dims):
                raise _OrderMatters
        operands = (self._plain(v.name, op) if i in inside else self._current(v) for i, v in enumerate(op.operands))
        self._keep(replace(op, operands=tuple(operands)))

    def _at(self, op: Op) -> Op:
        return specialize_op(op, self.sizes)

    def _current(self, value: Value) -> Value:
        return self.now.get(value.name, value)

    def _numbers(self, value: Value) -> torch.Tensor | None:
        return self.group_counts.numbers(self._current(value).name)

    def _ids(self) -> Value:
        return self._current(self.sort.operands[0])

    def _groups(self, op: Op) -> Value:
        if self.groups is None:
            count = self.group_counts.count
            self.groups = self._emit(op, "group_numbers", (), (count,), {"count": count}, dtype="int64")
        return self.groups

    def _plain(self, name: str, op: Op) -> Value:
        """Return a sorted value in the original order."""
        rows = self.rows[name]
        if rows.plain is None:
            if rows.routed is None:
                raise _OrderMatters
            rows.plain = self._dispatch("combine_rows", rows.routed, op)
        return rows.plain

    def _routed(self, name: str, op: Op) -> Value:
        """Return a sorted value dispatched to the groups."""
        rows = self.rows[name]
        if rows.routed is None:
            rows.routed = self._dispatch("dispatch_rows", self._plain(name, op), op)
        return rows.routed

    def _dispatch(self, name: str, value: Value, op: Op) -> Value:
        operands = (value, self._ids(), self._groups(op))
        return self._emit(op, name, operands, value.tensor.shape, {}, dtype=value.tensor.dtype)

    def _emit(
        self,
        op: Op,
        name: str,
        operands: Sequence[Value],
        shape: tuple[int, ...],
        attrs: dict[str, Attribute],
        result: str = "",
        dtype: str = "",
    ) -> Value:
        """Emit an op with the location of `op`."""
        label = result or fresh_name(f"{op.results[0].name}.{name.partition('_')[0]}", self.names)
        value = Value(label, TensorType(shape, dtype or op.results[0].tensor.dtype))
        self.like[label] = op.results[0].name
        self._keep(Op(name, tuple(operands), (value,), attrs, op.location))
        return value

    def _keep(self, op: Op) -> None:
        self.ops.append(op)
        self.producers.update(dict.fromkeys((v.name for v in op.results), self._at(op)))


def _choices_of_sizes(symbols: Mapping[str, Symbol]) -> list[dict[str, int]]:
    """Return different values of symbols, primes where their bounds allow; a single choice if there are none."""
    starts = (0, 7, 14) if symbols else (0,)
    return [
        {name: s.nearest(_PRIMES[start + i % 7]) for i, (name, s) in enumerate(symbols.items())} for start in starts
    ]


def _sorts(op: Op) -> bool:
    order = lookup(op.name, op.location).split.order
    return bool(order and order.sorts and order.sorts(op.attrs)) and len(op.operands[0].tensor.shape) == 1


def _groups_of(main: Function, ids: Value) -> int | None:
    """Return the number of groups, if `ids` are positions in a dim of that size; otherwise None."""
    producers = {v.name: (op, i) for op in main.ops for i, v in enumerate(op.results)}
    name = ids.name
    while name in producers:
        op, number = producers[name]
        entry = lookup(op.name, op.location)
        axis = op.attrs.get("axis")
        if entry.split.order and entry.split.order.positions == number and isinstance(axis, int):
            return op.operands[0].tensor.shape[axis]
        if Trait.VIEW not in entry.traits or len(op.operands) != 1:
            return None
        name = op.operands[0].name
    return None
