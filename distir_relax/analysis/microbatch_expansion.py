"""Expansion of repeated microbatches, for the simulator.

`Microbatches` emits only the first microbatch, the second, the last, and each of another size, to represent all. Here
the ops of represented microbatches are identified by data flow, and repeated in the program once per microbatch::

    emitted, for 5                              as it is simulated
    %sum.0 = call @g(%x.0)                      %sum.0 = call @g(%x.0)
    %sum.1 = call @g_1(%x.1, %sum.0)            for m in 1, 2, 3:  %sum[m] = call @g_1(%x[m], %sum[m - 1])
    %sum.2 = call @g_1(%x.2, %sum.1)            %sum[4] = call @g_1(%x[4], %sum[3])
    %w.new = update(%w, %sum.2)                 %w.new = update(%w, %sum[4])

Every op belongs to a part, which is an emitted microbatch, or to none. Ops of different parts correspond if they do the
same with corresponding operands (`_Alignment`); operands from the preceding part are not compared. An operand of an
expanded op is then shared by all microbatches, an input or result of its own, or the result of the corresponding op of
the preceding one (`_Expander`). The steps are those of the program with all microbatches emitted, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distir_relax.analysis.interpreter import Steps, list_steps
from distir_relax.analysis.schedule_order import order_ops
from distir_relax.errors import VerificationError
from distir_relax.ir import Function, MicrobatchParts, Module, Op, RepeatedMicrobatches, TaskOrder, Value

Source = tuple[int, int]
"""A value: the number of its producer among the ops of a part, and the index of the result."""


@dataclass(slots=True)
class ExpandedEntry:
    """The steps of a program's entry function, with all microbatches.

    `inputs` are the function inputs that the steps' inputs belong to. `origins` has for each step its op in the
    function, and the microbatch, -1 for the op's own: so it applies to programs that differ only in types too.
    """

    steps: Steps
    inputs: list[int]
    origins: list[tuple[int, int]]

    def ops(self, main: Function) -> list[Op]:
        """Return the steps' ops in an entry function that is the same but for types."""
        return [_with_microbatch(main.ops[number], microbatch) for number, microbatch in self.origins]


def expand_entry(module: Module) -> ExpandedEntry:
    """Expand the entry of a distributed module, in the order of its `TaskOrder` record if it has one.

    Raises `VerificationError` if the emitted microbatches differ in more than sizes.
    """
    repeated = _repeated(module)
    if repeated is None:
        main = module.main
        return ExpandedEntry(list_steps(main), list(range(len(main.inputs))), [(n, -1) for n in range(len(main.ops))])
    ranges = repeated.ranges
    parts = _PartMap(module, repeated)
    entry = _Expander(parts, ranges, None if len(ranges) == repeated.count else _Alignment(parts, len(ranges))).entry()
    order = next((record for record in module.records if isinstance(record, TaskOrder)), None)
    return entry if order is None else _apply_order(entry, order)


def expand_module(module: Module) -> Module:
    """Return a module whose entry has the ops of all microbatches, for counting; expanded values keep the names of the
    emitted ones. Raises as `expand_entry` does."""
    if _repeated(module) is None:
        return module
    ops = tuple(expand_entry(module).steps.ops)
    return replace(module, functions=(replace(module.main, ops=ops), *module.functions[1:]))


def _repeated(module: Module) -> RepeatedMicrobatches | None:
    return next((record for record in module.records if isinstance(record, RepeatedMicrobatches)), None)


def _apply_order(entry: ExpandedEntry, order: TaskOrder) -> ExpandedEntry:
    steps = entry.steps
    numbers = order_ops(steps, order.tasks)

    def sort(items: list[Any]) -> list[Any]:
        return [items[number] for number in numbers]

    steps = replace(steps, ops=sort(steps.ops), operands=sort(steps.operands), results=sort(steps.results))
    return ExpandedEntry(steps, entry.inputs, sort(entry.origins))


def _with_microbatch(op: Op, microbatch: int) -> Op:
    if microbatch < 0:
        return op
    return Op(op.name, op.operands, op.results, {**op.attrs, "microbatch": microbatch}, op.location)


class _PartMap:
    """The part of each value and op: an emitted microbatch, or -1 for none."""

    def __init__(self, module: Module, repeated: RepeatedMicrobatches) -> None:
        self.main: Function = module.main
        self.totals = frozenset(repeated.totals)
        self.families: dict[str, str] = {}
        """The input of which each is a part."""
        for record in module.records:
            if isinstance(record, MicrobatchParts) and record.role == "input":
                self.families.update(dict.fromkeys(record.parts, record.value))
        recorded = repeated.part_of
        self.part_of = {item.value.name: recorded.get(item.value.name, -1) for item in self.main.inputs}
        self.ops: list[int] = []
        for op in self.main.ops:
            if op.task:
                part = int(op.task["microbatch"])  # type: ignore[arg-type]
            else:
                # An op inserted by a pass belongs to the part of its operands.
                emitted = [recorded[v.name] for v in op.results if v.name in recorded]
                part = max(
                    emitted or [self.part_of[v.name] for v in op.operands if v.name not in self.totals], default=-1
                )
            self.ops.append(part)
            self.part_of.update((v.name, part) for v in op.results)
        self._assign_gathers(recorded)

    def _assign_gathers(self, recorded: Mapping[str, int]) -> None:
        """Assign ops that passes inserted for one microbatch only to it: gathers of parameters for a task."""
        users: dict[str, set[int]] = defaultdict(set)
        for output in self.main.outputs:
            users[output.value.name].add(-1)
        for number in range(len(self.ops) - 1, -1, -1):
            op = self.main.ops[number]
            if self.ops[number] < 0 and not any(v.name in recorded or v.name in self.totals for v in op.operands):
                parts = set().union(*(users[v.name] for v in op.results))
                if len(parts) == 1:
                    self.ops[number] = parts.pop()
                    self.part_of.update((v.name, self.ops[number]) for v in op.results)
            for v in op.operands:
                users[v.name].add(self.ops[number])


class _Alignment:
    """Correspondence of ops between microbatches: ops that do the same with corresponding operands.

    `rows` has for each part from 1 on the numbers of its ops, in corresponding order; `previous_source` maps (position
    of op, operand) to the position and result of the producer in the preceding microbatch.
    """

    def __init__(self, parts: _PartMap, count: int) -> None:
        self.parts, self.count = parts, count
        self.key_ids: dict[object, int] = {}
        self.producers = {v.name: (n, i) for n, op in enumerate(parts.main.ops) for i, v in enumerate(op.results)}
        self.key_of: dict[int, int] = {}
        rows = [self._part_ops(part) for part in range(1, count)]
        self.rows = [rows[0], *(self._align(rows[0], row) for row in rows[1:])]
        for row, aligned_row in zip(rows[:-1], self.rows[:-1], strict=True):
            if len(row) != len(aligned_row):
                raise VerificationError("the emitted microbatches have different ops")
        self.position_of = [{number: i for i, number in enumerate(row)} for row in self.rows]
        """The position of each op in its part."""
        self.previous_source = self._previous_sources()

    def _part_ops(self, part: int) -> list[int]:
        numbers = [number for number, p in enumerate(self.parts.ops) if p == part]
        for number in numbers:
            self.key_of[number] = self._op_key(self.parts.main.ops[number], part)
        return numbers

    def _op_key(self, op: Op, part: int) -> int:
        """Return an id of an op and its operands, equal for corresponding ops of other parts."""
        operands = tuple(self._source_of(v, part) for v in op.operands)
        attrs = (op.name, op.location, op.attrs.get("stage"), op.attrs.get("kind"), op.attrs.get("stream"))
        return self.key_ids.setdefault((attrs, len(op.results), operands), len(self.key_ids))

    def _source_of(self, value: Value, part: int) -> object:
        value_part = self.parts.part_of[value.name]
        if value_part < 0 or value.name in self.parts.totals:
            return value.name
        if not part - 1 <= value_part <= part:
            raise VerificationError(f"%{value.name} is used by a microbatch that does not follow its own")
        if value_part == part - 1:
            return "before"
        if value.name not in self.producers:
            return ("input", self.parts.families[value.name])
        number, result = self.producers[value.name]
        return (self.key_of[number], result)

    def _align(self, first: Sequence[int], row: Sequence[int]) -> list[int]:
        """Return the ops of a part in the order of the corresponding ops of the first."""
        candidates: dict[int, list[int]] = defaultdict(list)
        for number in reversed(row):
            candidates[self.key_of[number]].append(number)
        try:
            return [candidates[self.key_of[number]].pop() for number in first]
        except IndexError:
            raise VerificationError("the emitted microbatches have different ops") from None

    def _previous_sources(self) -> dict[tuple[int, int], Source]:
        sources: dict[tuple[int, int], Source] = {}
        for part in range(2, self.count):
            previous_positions = self.position_of[part - 2]
            for position, number in enumerate(self.rows[part - 1]):
                for i, value in enumerate(self.parts.main.ops[number].operands):
                    if self.parts.part_of[value.name] == part - 1 and value.name not in self.parts.totals:
                        producer, result = self.producers.get(value.name, (-1, 0))
                        source = previous_positions.get(producer, -1), result
                        if source[0] < 0 or sources.setdefault((position, i), source) != source:
                            raise VerificationError(f"%{value.name} is not used by each microbatch that follows")
        return sources


_SHARED, _SAME, _PREVIOUS, _INPUT = range(4)


@dataclass(slots=True)
class _Expander:
    parts: _PartMap
    ranges: Sequence[range]
    alignment: _Alignment | None
    """None if all microbatches are emitted."""
    values: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    """The numbers of values that are not expanded."""
    results_of: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """The numbers of first results of expanded ops, by microbatch from 1 on, and position of the op."""
    input_numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    """The numbers of microbatch inputs, by the input that they are parts of, and microbatch."""
    plans: dict[int, tuple[list[int], list[tuple[int, tuple[int, int, int, str]]]]] = field(default_factory=dict)
    """For each op the operands shared by all microbatches, and the positions and sources of the others."""

    def entry(self) -> ExpandedEntry:
        inputs = list(self._inputs())
        steps, origins = Steps([], [], [], 0, len(inputs), []), []
        main = self.parts.main
        for number, microbatch in self._instances():
            op, position = main.ops[number], self._position(number)
            first, count = self.values, len(op.results)
            self.values += count
            if position is None:
                steps.operands.append([self._single(v, self.parts.ops[number]) for v in op.operands])
                self.shared.update((v.name, first + i) for i, v in enumerate(op.results))
            else:
                steps.operands.append(self._operands(number, position, microbatch))
                self.results_of[microbatch][position] = first
            is_copy = bool(op.task) and microbatch != op.attrs["microbatch"]
            origins.append((number, microbatch if is_copy else -1))
            steps.ops.append(_with_microbatch(op, origins[-1][1]))
            steps.results.append(list(range(first, first + count)))
        steps.values, steps.outputs = self.values, [n for o in main.outputs for n in self._all(o.value)]
        return ExpandedEntry(steps, inputs, origins)

    def _inputs(self) -> Iterator[int]:
        for number, item in enumerate(self.parts.main.inputs):
            part = self.parts.part_of[item.value.name]
            for microbatch in self.ranges[part] if part >= 0 else (0,):
                if part >= 0:
                    self.input_numbers[self.parts.families[item.value.name], microbatch] = self.values
                else:
                    self.shared[item.value.name] = self.values
                self.values += 1
                yield number

    def _position(self, number: int) -> int | None:
        part = self.parts.ops[number]
        return None if self.alignment is None or part < 1 else self.alignment.position_of[part - 1].get(number)

    def _instances(self) -> Iterator[tuple[int, int]]:
        """Yield op numbers with their microbatches, in the order of the program with all microbatches emitted."""
        start, part = 0, -1
        parts = [*self.parts.ops, len(self.ranges)]
        for number, p in enumerate(parts):
            if p >= 0 and p != part:
                yield from self._repeat(range(start, number), part)
                start, part = number, p

    def _repeat(self, numbers: range, part: int) -> Iterator[tuple[int, int]]:
        """Yield consecutive ops, of one part or none, for each microbatch that the part represents."""
        microbatches = self.ranges[part] if part >= 0 else range(1)
        yield from ((number, microbatches.start) for number in numbers)
        if len(microbatches) > 1:
            repeated = [number for number in numbers if self._position(number) is not None]
            yield from ((number, microbatch) for microbatch in microbatches[1:] for number in repeated)

    def _operands(self, number: int, position: int, microbatch: int) -> list[int]:
        """Return the numbers of the operands of an expanded op."""
        if microbatch == 1:
            # The predecessor of the second microbatch is the first, whose ops are not aligned.
            main, part = self.parts.main, self.parts.ops[number]
            numbers = []
            for i, value in enumerate(main.ops[number].operands):
                earlier = self.parts.part_of[value.name] == part - 1 >= 0 and value.name not in self.parts.totals
                numbers.append(
                    self._single(value, 0) if earlier else self._number(self._source_of(number, position, i), 1)
                )
            return numbers
        if number not in self.plans:
            sources = [self._source_of(number, position, i) for i in range(len(self.parts.main.ops[number].operands))]
            shared = [second if kind == _SHARED else -1 for kind, _, second, _ in sources]
            self.plans[number] = (shared, [(i, source) for i, source in enumerate(sources) if source[0] != _SHARED])
        shared, varying = self.plans[number]
        # Nearly all operands of a stage are weights, which are shared.
        numbers = shared.copy()
        for i, source in varying:
            numbers[i] = self._number(source, microbatch)
        return numbers

    def _number(self, source: tuple[int, int, int, str], microbatch: int) -> int:
        kind, first, second, family = source
        if kind == _SHARED:
            return second
        if kind == _INPUT:
            return self.input_numbers[family, microbatch]
        return self.results_of[microbatch if kind == _SAME else microbatch - 1][first] + second

    def _source_of(self, number: int, position: int, i: int) -> tuple[int, int, int, str]:
        """Return the source of an operand: shared, an input, or a producer in the same or the preceding microbatch."""
        assert self.alignment is not None
        value, part = self.parts.main.ops[number].operands[i], self.parts.ops[number]
        value_part = self.parts.part_of[value.name]
        if value_part < 0 or value.name in self.parts.totals:
            return _SHARED, 0, self._all(value)[-1], ""
        if value_part < part:
            return _PREVIOUS, *self.alignment.previous_source[position, i], ""
        if value.name not in self.alignment.producers:
            return _INPUT, 0, 0, self.parts.families[value.name]
        producer, result = self.alignment.producers[value.name]
        return _SAME, self.alignment.position_of[part - 1][producer], result, ""

    def _single(self, value: Value, part: int) -> int:
        """Return an operand of an op that is not expanded: of the last microbatch, or its own."""
        value_part = self.parts.part_of[value.name]
        if self.alignment is not None and 0 <= value_part != part and value.name not in self.parts.totals:
            raise VerificationError(f"%{value.name} of one microbatch is used by an op outside of all microbatches")
        return self._all(value)[-1]

    def _all(self, value: Value) -> list[int]:
        """Return the numbers of a value, for each microbatch that its own represents."""
        if value.name in self.shared:
            return [self.shared[value.name]]
        part = self.parts.part_of[value.name]
        if value.name in self.parts.families:
            return [self.input_numbers[self.parts.families[value.name], m] for m in self.ranges[part]]
        assert self.alignment is not None
        producer, result = self.alignment.producers[value.name]
        position = self.alignment.position_of[part - 1][producer]
        return [self.results_of[m][position] + result for m in self.ranges[part]]
