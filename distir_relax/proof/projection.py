"""Check that ranks' programs are the parts of the ranks in one schedule.

The schedule, the distributed stage, has the ops of all devices in one order. The program of a rank is its part if

- it takes part in the same communications as the rank does in the schedule, in the same order, with the same peers;
- the operands of these, and its outputs, are the same expressions of its inputs (`Expressions`).

Then the programs do what the schedule says, and cannot deadlock: all follow one order. The check shares no code with
the passes that project and fuse; of the op table it reads the traits of ops, and the patterns of fused ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.errors import VerificationError
from distir_relax.ir import Attribute, Function, Module, Op, Value, gc_disabled, inline, print_op
from distir_relax.ops import Trait, entries, lookup
from distir_relax.ops.table.spmd_inference import local_attrs, numbers_by_device
from distir_relax.proof.expressions import Expressions

_HINT = "compile the model again: ranked.txt is not the projection of distir.txt"
_OF_SCHEDULE = frozenset({"stream", "task", "copy", "step"})
"""Attributes of when and how a communication runs, on which its result does not depend."""


def check_projection(distributed: Module, ranked: Module) -> int:
    """Check the programs of a ranked module against their schedule; return the number of ops that were compared.

    Both are verified. Raises `VerificationError` that names the rank, and the first op that is not the schedule's.
    """
    with gc_disabled():
        return _check(inline(distributed).main, ranked)


def _check(schedule: Function, ranked: Module) -> int:
    programs = {function.name: function for function in inline(ranked).functions}
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(ranked.ranks):
        ranks_of.setdefault(name, []).append(rank)
    started = {entry.semantics.started: entry.name for entry in entries() if entry.semantics.started}
    columns = _columns(schedule)
    ops = _by_devices(schedule)
    for name, ranks in ranks_of.items():
        _check_alike(columns, ranks, name)
        _Part(schedule, ops, ranks[0], started).check(programs[name])
    return sum(len(programs[name].ops) for name in ranks_of)


Columns = dict[tuple[tuple[int, ...], tuple[int, ...]], Op | Value]
"""Numbers that differ by device: the devices and their numbers, and where they are first in the schedule."""


def _columns(schedule: Function) -> Columns:
    """Return all numbers of a schedule in which ranks may differ; devices that take part are numbered 0."""
    columns: Columns = {}

    def add(where: Op | Value, values: Sequence[Value]) -> None:
        for value in values:
            columns.setdefault((value.placed.devices, ()), where)
            for size in value.placed.shape:
                for numbers in numbers_by_device(size):
                    columns.setdefault((value.placed.devices, numbers.values), where)

    for item in schedule.inputs:
        add(item.value, [item.value])
    for op in schedule.ops:
        add(op, op.results)
        devices = op.results[0].placed.devices
        for attribute in op.attrs.values():
            for numbers in numbers_by_device(attribute):
                columns.setdefault((devices, numbers.values), op)
        if Trait.TRANSFER in lookup(op.name, op.location).traits:
            senders = op.operands[0].placed.devices
            distances = tuple(after - before for before, after in zip(senders, devices, strict=True))
            columns.setdefault((senders, distances), op)
            columns.setdefault((devices, distances), op)
    return columns


def _by_devices(schedule: Function) -> dict[tuple[int, ...], list[int]]:
    """Return the numbers of the ops in which devices take part, by these devices."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, op in enumerate(schedule.ops):
        found.setdefault(op.results[0].placed.devices, []).append(number)
        if Trait.TRANSFER in lookup(op.name, op.location).traits:
            found.setdefault(op.operands[0].placed.devices, []).append(number)
    return found


def _check_alike(columns: Columns, ranks: Sequence[int], name: str) -> None:
    """Raise `VerificationError` unless ranks that share a program have the same part in the schedule."""
    if len(ranks) == 1:
        return
    places: dict[tuple[int, ...], list[int]] = {}
    for (devices, numbers), where in columns.items():
        if devices not in places:
            index = {device: position for position, device in enumerate(devices)}
            places[devices] = [index[rank] for rank in ranks if rank in index]
        held = places[devices]
        if len(held) not in (0, len(ranks)) or (numbers and len({numbers[position] for position in held}) > 1):
            shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
            what = print_op(where) if isinstance(where, Op) else f"their inputs: {where}: {where.type}"
            location = where.location if isinstance(where, Op) else ""
            raise VerificationError(f"ranks {shown} share the program @{name}, but differ in {what}", location, _HINT)


@dataclass(frozen=True, slots=True)
class _Event:
    """A communication of a rank: its op, its operands' numbers, its name and attributes, and its result's number.

    A transfer has no name: one with an operand sends, one with a shape receives.
    """

    op: Op
    operands: tuple[int, ...]
    does: tuple[str, tuple[tuple[str, Attribute], ...]]
    result: int


class _Part:
    """The part of a rank in a schedule: numbers of its values by name, and its communications in order."""

    def __init__(
        self, schedule: Function, ops: Mapping[tuple[int, ...], Sequence[int]], rank: int, started: Mapping[str, str]
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.started = started
        """The collective that each op starts."""
        self.expressions = Expressions()
        self.numbers: dict[str, int] = {}
        self.positions: dict[tuple[int, ...], int] = {}
        """The position of the rank among devices, -1 if it is none of them."""
        self.events: deque[_Event] = deque()
        for item in schedule.inputs:
            if self._has(item.value):
                (self.numbers[item.value.name],) = self.expressions.new()
        for number in sorted({n for devices, numbers in ops.items() if rank in devices for n in numbers}):
            self._add(schedule.ops[number])

    def _has(self, value: Value) -> bool:
        return self._position(value.placed.devices) >= 0

    def _position(self, devices: tuple[int, ...]) -> int:
        found = self.positions.get(devices)
        if found is None:
            found = self.positions[devices] = devices.index(self.rank) if self.rank in devices else -1
        return found

    def _add(self, op: Op) -> None:
        entry = lookup(op.name, op.location)
        if Trait.TRANSFER in entry.traits:
            self._add_transfer(op)
            return
        if not self._has(op.results[0]):
            return
        held = [value for value in op.operands if self._has(value)]
        operands = tuple(self.numbers[value.name] for value in held)
        locals_ = [self._local(value) for value in (*held, *op.results)]
        if entry.is_identity(locals_[: len(held)], locals_[len(held) :]):
            self.numbers[op.results[0].name] = operands[0]
            return
        position = self._position(op.results[0].placed.devices)
        attrs = {key: value for key, value in local_attrs(op.attrs, position).items() if key not in _OF_SCHEDULE}
        if Trait.COMMUNICATES in entry.traits:
            (result,) = self.expressions.new()
            self.events.append(_Event(op, operands, _does(op.name, attrs), result))
            self.numbers[op.results[0].name] = result
            return
        for value, number in zip(op.results, self.expressions.add(op, operands, attrs), strict=True):
            self.numbers[value.name] = number

    def _add_transfer(self, op: Op) -> None:
        ((value,), (received,)) = op.operands, op.results
        sends, receives = self._position(value.placed.devices), self._position(received.placed.devices)
        if sends >= 0:
            does = _does("", {"distance": received.placed.devices[sends] - self.rank})
            self.events.append(_Event(op, (self.numbers[value.name],), does, -1))
        if receives >= 0:
            (result,) = self.expressions.new()
            kind = self._local(received).tensor
            distance = value.placed.devices[receives] - self.rank
            does = _does("", {"distance": distance, "shape": kind.shape, "dtype": kind.dtype})
            self.events.append(_Event(op, (), does, result))
            self.numbers[received.name] = result

    def _local(self, value: Value) -> Value:
        return Value(value.name, value.placed.local(self._position(value.placed.devices)))

    def check(self, program: Function) -> None:
        """Raise `VerificationError` unless a program is this part."""
        numbers = self._inputs(program)
        started: dict[int, int] = {}
        for op in program.ops:
            operands = tuple(numbers[value.name] for value in op.operands)
            traits = lookup(op.name, op.location).traits
            found: Sequence[int] | None
            if Trait.FINISHES in traits:
                found = [started[operands[0]]] if operands[0] in started else None
            elif Trait.STARTS in traits:
                # Until it is finished, its result is nothing that the schedule has.
                found = self.expressions.new()
                started[found[0]] = self._next(op, operands)
            elif Trait.COMMUNICATES in traits:
                found = [self._next(op, operands)]
            else:
                found = self.expressions.find(op, operands)
            if found is None:
                raise VerificationError(
                    f"rank {self.rank} does {print_op(op)}, which it does not in the schedule", op.location, _HINT
                )
            numbers.update((value.name, number) for value, number in zip(op.results, found, strict=True))
        if self.events:
            missing = self.events[0].op
            raise VerificationError(
                f"rank {self.rank} leaves out a communication of the schedule: {print_op(missing)}",
                missing.location,
                _HINT,
            )
        expected = [(o.name, self.numbers[o.value.name]) for o in self.schedule.outputs if self._has(o.value)]
        actual = [(o.name, numbers[o.value.name]) for o in program.outputs]
        for (name, number), (other, its_number) in zip(expected, actual, strict=False):
            if (name, number) != (other, its_number):
                raise VerificationError(
                    f"rank {self.rank} gives another value than the schedule does", f"output {other!r}", _HINT
                )
        if len(expected) != len(actual):
            raise VerificationError(
                f"rank {self.rank} gives {len(actual)} outputs, the schedule {len(expected)}", "", _HINT
            )

    def _inputs(self, program: Function) -> dict[str, int]:
        """Return the numbers of a program's inputs."""
        own = [(i.value.name, i.role, self._local(i.value).type) for i in self.schedule.inputs if self._has(i.value)]
        given = [(i.value.name, i.role, i.value.type) for i in program.inputs]
        if own != given:
            one, other = next((pair for pair in zip(own, given, strict=False) if pair[0] != pair[1]), (own, given))
            raise VerificationError(f"rank {self.rank} takes {_shown(other)}, in the schedule {_shown(one)}", "", _HINT)
        return {name: self.numbers[name] for name, _, _ in own}

    def _next(self, op: Op, operands: tuple[int, ...]) -> int:
        """Return the number of the result of a communication, which must be the next one of the schedule."""
        name = "" if "distance" in op.attrs else self.started.get(op.name, op.name)
        attrs = {key: value for key, value in op.attrs.items() if key not in _OF_SCHEDULE}
        event = self.events.popleft() if self.events else None
        if event is None or (event.operands, event.does) != (operands, _does(name, attrs)):
            expected = "no further communication" if event is None else print_op(event.op)
            raise VerificationError(
                f"rank {self.rank} does {print_op(op)} where the schedule has {expected}", op.location, _HINT
            )
        return event.result


def _does(name: str, attrs: Mapping[str, Attribute]) -> tuple[str, tuple[tuple[str, Attribute], ...]]:
    return name, tuple(sorted(attrs.items()))


def _shown(item: object) -> str:
    if isinstance(item, tuple):
        name, role, kind = item
        return f"{role} %{name}: {kind}"
    return f"{len(item)} inputs" if isinstance(item, Sequence) else str(item)
