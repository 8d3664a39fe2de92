"""Rows that a model sorts, works on and puts back: worked on as they stand, where their order is a means alone.

A mixture of experts sorts its tokens by expert, so that each expert's stand one behind the other::

    p = argsort(ids)       x[p] -> product of groups -> row by row -> product of groups -> y      y[inverse of p]

What is row by row does the same in any order, and a product of groups needs but to know each row's group: the same is
computed of `x`, without `p` (`routed_matmul` for `grouped_matmul`). Then tokens of different devices, or microbatches,
no longer meet in a sort, and each device may send its rows to the devices that have their experts.

No op is known by name. Row by row is what has a parallel factor there (`tallies.is_rowwise`); what sorts, looks up and
writes by position an entry says in its `Order`; and that bounds of groups are those of the sorted `ids` is proved, by
trying all there is (`tallies`). Where anything else is done with a sorted value, the program stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distir_relax.frontends.group_counts import Tallies, is_rowwise, rule_of, run
from distir_relax.frontends.imported_model import Imported, live
from distir_relax.ir import Attribute, Function, Op, TensorType, Value, fresh_name, value_names
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table import Order

if TYPE_CHECKING:
    import torch


def unsorted(imported: Imported) -> Imported:
    """The model without the sorts whose order is a means alone."""
    main, scopes = imported.module.main, dict(imported.scopes)
    for name in [op.results[0].name for op in main.ops if _sorts(op)]:
        sort = next(op for op in main.ops if op.results[0].name == name)
        attempt = _Attempt(main, sort, imported.tensors)
        found = attempt.run()
        if found is not None:
            main = found
            scopes |= {name: scopes[like] for name, like in attempt.like.items() if like in scopes}
    if main is imported.module.main:
        return imported
    main = live(main)
    kept = {item.value.name for item in main.inputs}
    tensors = {name: tensor for name, tensor in imported.tensors.items() if name in kept}
    return replace(imported, module=replace(imported.module, functions=(main,)), tensors=tensors, scopes=scopes)


class _NeededSorted(Exception):
    """Something is done with a sorted value that depends on the order."""


@dataclass(slots=True)
class _Rows:
    """What a sorted value is before it is sorted: `plain`, or between products of groups `routed`, or `known`."""

    plain: Value | None = None
    routed: Value | None = None
    known: torch.Tensor | None = None


@dataclass(slots=True)
class _Attempt:
    """Writes the program without one sort."""

    main: Function
    sort: Op
    constants: Mapping[str, torch.Tensor]
    ops: list[Op] = field(default_factory=list)
    made: dict[str, Op] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    like: dict[str, str] = field(default_factory=dict)
    """For new values, the value of the model where they stand."""
    now: dict[str, Value] = field(default_factory=dict)
    """The value that stands for one that has been put back, or depends on no order."""
    rows: dict[str, _Rows] = field(default_factory=dict)
    """The sorted values: ``v = rows[v][p]``."""
    back: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values made of the inverse of p: ``v = back[v][inverse of p]``."""
    groups: Value | None = None
    tallies: Tallies = field(init=False)

    def run(self) -> Function | None:
        """The function without the sort; None where something needs it."""
        import torch

        count = _groups_of(self.main, self.sort.operands[0])
        kind = self.sort.operands[0].tensor
        if count is None or kind.dtype != "int64":
            return None
        self.names = value_names(self.main)
        constants = {i.value.name for i in self.main.inputs if i.role == "constant"}
        known = {name: tensor for name, tensor in self.constants.items() if name in constants}
        self.tallies = Tallies(self.made, known, self.sort.operands[0].name, count, kind.elements)
        try:
            for op in self.main.ops:
                if op is self.sort:
                    self.rows[op.results[0].name] = _Rows(known=torch.arange(kind.elements))
                else:
                    self._op(op)
            if any(o.value.name in self.rows or o.value.name in self.back for o in self.main.outputs):
                return None
        except _NeededSorted:
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
        elif order.looks_up and at_front and inside == [1] and self.rows[op.operands[1].name].known is not None:
            self._look_up(op)
        elif order.by_number and inside == [0]:
            self._product(op, order.by_number)
        elif is_rowwise(op, inside):
            self._row_by_row(op, inside)
        else:
            self._sum(op, inside)

    def _through_back(self, op: Op, inside: list[int], back: list[int], looks_up: bool) -> None:
        """What is looked up at the inverse of p is put back; all else that is made of it, row by row, is known."""
        import torch

        if looks_up and inside == [0] and back == [1]:
            places = self.back[op.operands[1].name]
            if not torch.equal(places, torch.arange(len(places))):
                raise _NeededSorted
            self.now[op.results[0].name] = self._plain(op.operands[0].name, op)
            return
        given = [self.back.get(v.name, self.tallies.numbers(self._current(v).name)) for v in op.operands]
        if inside or len(op.results) > 1 or any(x is None for x in given) or not is_rowwise(op, back):
            raise _NeededSorted
        found = run(op, [x for x in given if x is not None])
        if found is None:
            raise _NeededSorted
        self.back[op.results[0].name] = found

    def _invert(self, op: Op) -> None:
        """Numbers written to the places that p says: what is known stands there by the inverse of p."""
        import torch

        places, data = self.rows[op.operands[1].name].known, op.operands[0].tensor
        written = self.tallies.numbers(self._current(op.operands[2]).name)
        if places is None or written is None or data.shape != written.shape or data.shape != places.shape:
            raise _NeededSorted
        if not torch.equal(places, torch.arange(len(places))):
            raise _NeededSorted
        self.back[op.results[0].name] = written

    def _look_up(self, op: Op) -> None:
        """Rows looked up one behind the other, each once or several times over."""
        import torch

        source, places = self._current(op.operands[0]), self.rows[op.operands[1].name].known
        size, name = source.tensor.shape[0], op.results[0].name
        if places is None or not size or len(places) % size or places.dim() != 1 or op.attrs.keys() != {"axis"}:
            raise _NeededSorted
        times = len(places) // size
        if not torch.equal(places, torch.arange(len(places)) // times):
            raise _NeededSorted
        if times == 1:
            self.rows[name] = _Rows(plain=source, known=self.tallies.numbers(source.name))
            return
        rest = source.tensor.shape[1:]
        one = self._emit(op, "reshape", (source,), (size, 1, *rest), {"shape": (size, 1, *rest)})
        many = self._emit(op, "broadcast_to", (one,), (size, times, *rest), {"shape": (size, times, *rest)})
        flat = self._emit(op, "reshape", (many,), (size * times, *rest), {"shape": (size * times, *rest)})
        self.rows[name] = _Rows(plain=flat)

    def _product(self, op: Op, by_number: str) -> None:
        """A product of groups, whose bounds are those of the sorted rows."""
        import torch

        count = self.tallies.count
        starts, ends = (self.tallies.tally(self._current(v).name) for v in op.operands[-2:])
        below = torch.ones((count, count)).triu()
        if starts is None or ends is None or starts.shape != below.shape or ends.shape != below.shape:
            raise _NeededSorted
        if not torch.equal(ends.to(below.dtype), below) or not torch.equal(starts.to(below.dtype), below.triu(1)):
            raise _NeededSorted
        x, others = self._routed(op.operands[0].name, op), map(self._current, op.operands[1:-2])
        operands = (x, *others, self._ids(), self._groups(op))
        kind = op.results[0].tensor
        found = self._emit(op, by_number, operands, kind.shape, {"count": count}, op.results[0].name)
        self.rows[op.results[0].name] = _Rows(routed=found)

    def _row_by_row(self, op: Op, inside: list[int]) -> None:
        mine = [self.rows[op.operands[i].name] for i in inside]
        if all(rows.known is not None for rows in mine) and len(op.results) == 1:
            known = [self.rows[v.name].known if i in inside else self._numbers(v) for i, v in enumerate(op.operands)]
            found = run(op, [x for x in known if x is not None]) if all(x is not None for x in known) else None
            if found is not None:
                self.rows[op.results[0].name] = _Rows(known=found)
                return
        others = [v for i, v in enumerate(op.operands) if i not in inside]
        # Beside rows there are numbers alone: so no gradient is a sum over rows, of which a device has its own.
        routed = all(rows.routed is not None for rows in mine) and not any(v.tensor.shape for v in others)
        routed = routed and any(rows.plain is None for rows in mine)
        bring = self._routed if routed else self._plain
        operands = tuple(bring(v.name, op) if i in inside else self._current(v) for i, v in enumerate(op.operands))
        self._keep(replace(op, operands=operands))
        for value in op.results:
            self.rows[value.name] = _Rows(routed=value) if routed else _Rows(plain=value)

    def _sum(self, op: Op, inside: list[int]) -> None:
        """A sum over all rows is the same in any order."""
        rule = rule_of(op)
        rows = {rule.operands[i][0] for i in inside}
        if len(rows) != 1 or len(row := next(iter(rows))) != 1:
            raise _NeededSorted
        if rule.factors[row[0]].kind not in ("sum", "max", "min"):
            raise _NeededSorted
        for i, dims in enumerate(rule.operands):
            if i not in inside and any(row[0] in dim for dim in dims):
                raise _NeededSorted
        operands = (self._plain(v.name, op) if i in inside else self._current(v) for i, v in enumerate(op.operands))
        self._keep(replace(op, operands=tuple(operands)))

    def _current(self, value: Value) -> Value:
        return self.now.get(value.name, value)

    def _numbers(self, value: Value) -> torch.Tensor | None:
        return self.tallies.numbers(self._current(value).name)

    def _ids(self) -> Value:
        return self._current(self.sort.operands[0])

    def _groups(self, op: Op) -> Value:
        if self.groups is None:
            count = self.tallies.count
            self.groups = self._emit(op, "group_numbers", (), (count,), {"count": count}, dtype="int64")
        return self.groups

    def _plain(self, name: str, op: Op) -> Value:
        """A sorted value as it stands before."""
        rows = self.rows[name]
        if rows.plain is None:
            if rows.routed is None:
                raise _NeededSorted
            rows.plain = self._sent("combine_rows", rows.routed, op)
        return rows.plain

    def _routed(self, name: str, op: Op) -> Value:
        """A sorted value where the groups are."""
        rows = self.rows[name]
        if rows.routed is None:
            rows.routed = self._sent("dispatch_rows", self._plain(name, op), op)
        return rows.routed

    def _sent(self, how: str, value: Value, op: Op) -> Value:
        operands = (value, self._ids(), self._groups(op))
        return self._emit(op, how, operands, value.tensor.shape, {}, dtype=value.tensor.dtype)

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
        """An op at the place of `op`."""
        found = result or fresh_name(f"{op.results[0].name}.{name.partition('_')[0]}", self.names)
        value = Value(found, TensorType(shape, dtype or op.results[0].tensor.dtype))
        self.like[found] = op.results[0].name
        self._keep(Op(name, tuple(operands), (value,), attrs, op.location))
        return value

    def _keep(self, op: Op) -> None:
        self.ops.append(op)
        self.made.update((v.name, op) for v in op.results)


def _sorts(op: Op) -> bool:
    order = lookup(op.name, op.location).split.order
    return bool(order and order.sorts and order.sorts(op.attrs)) and len(op.operands[0].tensor.shape) == 1


def _groups_of(main: Function, ids: Value) -> int | None:
    """How many numbers `ids` may have: they are positions in a dim of so many elements. None where they are others."""
    made = {v.name: (op, i) for op in main.ops for i, v in enumerate(op.results)}
    name = ids.name
    while name in made:
        op, number = made[name]
        entry = lookup(op.name, op.location)
        axis = op.attrs.get("axis")
        if entry.split.order and entry.split.order.positions == number and isinstance(axis, int):
            return op.operands[0].tensor.shape[axis]
        if Trait.VIEW not in entry.traits or len(op.operands) != 1:
            return None
        name = op.operands[0].name
    return None
