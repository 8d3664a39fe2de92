"""Order of several updates in a step: which ops see the parameters before an update, and which after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op, Value, fresh_name, producers, value_names
from distir_relax.ops import Builder, lookup
from distir_relax.optimizers.optimizer import Update

AFTER = "after"
"""The attribute of an op whose result is a parameter after an update: its number."""


@dataclass(frozen=True, slots=True)
class OrderUpdates:
    """Pass: global stage in and out. Ops after a loss use the parameters that the update by this loss changes.

    It runs before `Differentiate`, and `Optimize` replaces the values that it inserts by the new parameters.
    Values of parameters alone, such as casts of them, are computed again. `updates` are those of a step, each
    with the name of its loss, followed by those of its parameters.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    updates: tuple[tuple[str, ...], ...]

    def run(self, module: Module) -> Module:
        """Return the module with parameters after updates."""
        main = module.main
        producer_of = producers(main)
        places = {op.results[0].name: place for place, op in enumerate(main.ops) if op.results}
        losses = {output.name: output.value.name for output in main.outputs}
        ends = []
        for loss, *_ in self.updates:
            op = producer_of.get(losses.get(loss, ""))
            if op is None:
                found = ", ".join(losses) or "none"
                raise DistIRError(f"expected a loss called {loss!r}, found {found}", "the updates")
            ends.append(places[op.results[0].name])
            if ends[-1] < max(ends):
                raise DistIRError(
                    f"expected the loss {loss!r} after those of the updates before it", "the updates",
                    "compute losses in the order of their updates",
                )  # fmt: skip
        of = {name: number for number, (_, *names) in enumerate(self.updates) for name in names}
        later = _Later(producer_of, ends, of, value_names(main))
        ops: list[Op] = []
        for place, op in enumerate(main.ops):
            new = tuple(later.at(place, value, ops) for value in op.operands)
            later.add(place, op)
            ops.append(op if new == op.operands else replace(op, operands=new))
        return replace(module, functions=(replace(main, ops=tuple(ops)), *module.functions[1:]))


class _Later:
    """Values of parameters alone, before and after updates.

    `ends` are the places of the losses among the ops, `of` is the number of the update of each parameter.
    """

    def __init__(
        self, producer_of: Mapping[str, Op], ends: Sequence[int], of: Mapping[str, int], names: set[str]
    ) -> None:
        self._producer_of, self._ends, self._names = producer_of, ends, names
        self._updates = {name: frozenset([number]) for name, number in of.items()}
        self._defined = dict.fromkeys(of, -1)
        self._made: dict[tuple[str, tuple[int, ...]], Value] = {}

    def add(self, place: int, op: Op) -> None:
        """Take note of an op: whether it computes something of parameters alone."""
        if op.operands and all(v.name in self._updates or self._is_constant(v) for v in op.operands):
            updates = frozenset[int]().union(*(self._updates.get(v.name, frozenset()) for v in op.operands))
            for value in op.results:
                self._updates[value.name], self._defined[value.name] = updates, place

    def at(self, place: int, value: Value, ops: list[Op]) -> Value:
        """Return what an op at a place uses for a value; what that needs is appended to `ops`."""
        done = tuple(
            number
            for number in sorted(self._updates.get(value.name, ()))
            if self._defined[value.name] <= self._ends[number] < place
        )
        if not done:
            return value
        key = value.name, done
        if key not in self._made:
            source = self._producer_of.get(value.name)
            if source is None:
                op = Op("stop_gradient", (value,), (self._fresh(value),), {AFTER: done[-1]})
            else:
                operands = tuple(self.at(place, v, ops) for v in source.operands)
                op = replace(source, operands=operands, results=tuple(map(self._fresh, source.results)))
            ops.append(op)
            for old, new in zip((value,) if source is None else source.results, op.results, strict=True):
                self._made[old.name, done] = new
        return self._made[key]

    def _is_constant(self, value: Value) -> bool:
        op = self._producer_of.get(value.name)
        return op is not None and not op.operands and not op.callee

    def _fresh(self, value: Value) -> Value:
        name = fresh_name(f"{value.name}.updated", self._names)
        return Value(name, value.type)


class OpsBetweenUpdates:
    """The ops of a program of several updates, emitted with `g` where they can be: before and after each of them."""

    def __init__(self, g: Builder, ops: Iterable[Op]) -> None:
        self._g = g
        self._left = list(ops)
        self._values: dict[str, Value] = {}
        self._views: dict[str, str] = {}
        """The parameters whose memory values share, by the names of these."""
        self._old: dict[str, Update] = {}

    def emit_before(self, number: int | None) -> None:
        """Emit the ops that do not depend on updates from a number on; all that are left for None.

        Raises `DistIRError` for one that needs a parameter as it was before an update.
        """
        blocked: set[str] = set()
        left: list[Op] = []
        for op in self._left:
            is_later = number is not None and _update_before(op) >= number
            if is_later or any(v.name in blocked for v in op.operands):
                blocked.update(v.name for v in op.results)
                left.append(op)
                continue
            self._check(op)
            operands = tuple(self._values.get(v.name, v) for v in op.operands)
            self._g.ops.append(op if operands == op.operands else replace(op, operands=operands))
        self._left = left

    def _check(self, op: Op) -> None:
        for value in op.operands:
            name = self._views.get(value.name, value.name)
            if name in self._old:
                raise DistIRError(
                    f"the gradients of a later loss need {name!r} as it was before the update by the loss "
                    f"{self._old[name].loss!r}, which changes it in place", op.location,
                    "call the modules of the later loss after the earlier one, or compute it of detached values",
                )  # fmt: skip
        if op.operands and not op.callee:
            entry, first = lookup(op.name, op.location), op.operands[0].name
            if entry.shares_storage or entry.keeps_value or entry.is_identity(op.operands, op.results):
                self._views.update((value.name, self._views.get(first, first)) for value in op.results)

    def updated(self, number: int, update: Update, new: Mapping[str, Value]) -> None:
        """Replace the parameters after an update, by name, by their new values."""
        for op in self._left:
            if _update_before(op) == number and op.operands[0].name in new:
                self._values[op.results[0].name] = new[op.operands[0].name]
        self._left = [op for op in self._left if op.results[0].name not in self._values]
        self._old.update(dict.fromkeys(new, update))


def _update_before(op: Op) -> int:
    """Return the number of the update whose new parameter an op stands for; -1 for others."""
    number = op.attrs.get(AFTER)
    return number if isinstance(number, int) else -1
