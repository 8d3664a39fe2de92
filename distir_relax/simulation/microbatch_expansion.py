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
from operator import itemgetter
from typing import Any

import numpy as np

from distir_relax.errors import VerificationError
from distir_relax.interpret.interpreter import Steps, list_steps
from distir_relax.interpret.ragged import IntArray
from distir_relax.ir import Function, MicrobatchParts, Module, Op, RepeatedMicrobatches, TaskOrder, Value
from distir_relax.simulation.kept_values import prepared_from
from distir_relax.simulation.schedule_order import order_ops

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
    return entry if order is None else _apply_order(entry, order, module.main)


def expand_module(module: Module) -> Module:
    """Return a module whose entry has the ops of all microbatches, for counting; expanded values keep the names of the
    emitted ones. Raises as `expand_entry` does."""
    if _repeated(module) is None:
        return module
    ops = tuple(expand_entry(module).ops(module.main))
    return replace(module, functions=(replace(module.main, ops=ops), *module.functions[1:]))


def _repeated(module: Module) -> RepeatedMicrobatches | None:
    return next((record for record in module.records if isinstance(record, RepeatedMicrobatches)), None)


def _apply_order(entry: ExpandedEntry, order: TaskOrder, main: Function) -> ExpandedEntry:
    steps = entry.steps
    numbers = order_ops(steps, _task_names(entry, main), order.tasks)

    in_order = itemgetter(*numbers) if len(numbers) > 1 else list

    def sort(items: list[Any]) -> list[Any]:
        return list(in_order(items))

    steps = replace(
        steps, ops=sort(steps.ops), operands=sort(steps.operands), results=sort(steps.results),
        varying=sort(steps.varying), patterns=sort(steps.patterns),
    )  # fmt: skip
    return ExpandedEntry(steps, entry.inputs, sort(entry.origins))


def _task_names(entry: ExpandedEntry, main: Function) -> list[str]:
    """Return the task of each step, empty for other ops."""
    emitted = [op.task_name for op in main.ops]
    stems = {
        number: op.task_name.removesuffix(str(op.attrs["microbatch"])) for number, op in enumerate(main.ops) if op.task
    }
    return [emitted[number] if m < 0 else f"{stems[number]}{m}" for number, m in entry.origins]


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
        self.prepared = prepared_from(module, self.main)
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
            # Microbatches of two sizes have what they need of weights prepared for each.
            return self.parts.prepared.get(value.name, value.name)
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


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive steps: `ops` for the first of `microbatches`, and then `repeated` for each of the others."""

    ops: range
    repeated: list[int]
    microbatches: range

    @property
    def count(self) -> int:
        return len(self.ops) + len(self.repeated) * (len(self.microbatches) - 1)


@dataclass(slots=True)
class _Expander:
    """Lists the steps of all microbatches.

    First, steps and values are numbered (`_number_run`). The numbers of an op's steps, operands and results are regular
    from the second microbatch of a part on, so these steps are listed as the rows of an array, and not one by one.
    """

    parts: _PartMap
    ranges: Sequence[range]
    alignment: _Alignment | None
    """None if all microbatches are emitted."""
    values: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    """The numbers of values that are not expanded."""
    input_numbers: dict[str, IntArray] = field(default_factory=dict)
    """The numbers of microbatch inputs, by the input that they are parts of, for each microbatch."""
    step_of: IntArray = field(init=False)
    """The steps of expanded ops, by position of the op, and microbatch from 1 on."""
    first_result: IntArray = field(init=False)
    """The numbers of their first results."""
    steps: Steps = field(init=False)
    origins: list[tuple[int, int]] = field(init=False)

    def entry(self) -> ExpandedEntry:
        main, inputs = self.parts.main, list(self._inputs())
        runs = list(self._runs())
        count = sum(run.count for run in runs)
        empty: list[Any] = [None] * count
        self.steps = Steps(empty, empty.copy(), empty.copy(), 0, len(inputs), [], empty.copy(), empty.copy())
        self.origins = empty.copy()
        positions = len(self.alignment.rows[0]) if self.alignment is not None else 0
        self.step_of = np.full((positions, self.ranges[-1].stop), -1, dtype=np.int64)
        self.first_result = self.step_of.copy()
        singles: list[tuple[int, int]] = []
        step = 0
        for run in runs:
            singles += self._number_run(run, step)
            step += run.count
        for step, number in singles:
            operands = [self._single(v, self.parts.ops[number]) for v in main.ops[number].operands]
            self._add_step(step, number, operands, -1)
        for number in range(len(main.ops)):
            if (position := self._position(number)) is not None:
                self._add_steps(number, position)
        self.steps.values, self.steps.outputs = self.values, [n for o in main.outputs for n in self._all(o.value)]
        return ExpandedEntry(self.steps, inputs, self.origins)

    def _inputs(self) -> Iterator[int]:
        for number, item in enumerate(self.parts.main.inputs):
            part = self.parts.part_of[item.value.name]
            if part < 0:
                self.shared[item.value.name] = self.values
                self.values += 1
                yield number
                continue
            microbatches, family = self.ranges[part], self.parts.families[item.value.name]
            if family not in self.input_numbers:
                self.input_numbers[family] = np.full(self.ranges[-1].stop, -1, dtype=np.int64)
            numbers = range(self.values, self.values + len(microbatches))
            self.input_numbers[family][microbatches.start : microbatches.stop] = numbers
            self.values += len(microbatches)
            yield from [number] * len(microbatches)

    def _position(self, number: int) -> int | None:
        part = self.parts.ops[number]
        return None if self.alignment is None or part < 1 else self.alignment.position_of[part - 1].get(number)

    def _runs(self) -> Iterator[_Run]:
        """Yield all steps, in the order of the program with all microbatches emitted.

        Consecutive ops, of one part or none, are repeated for each microbatch that the part represents.
        """
        start, part = 0, -1
        for number, p in enumerate([*self.parts.ops, len(self.ranges)]):
            if p >= 0 and p != part:
                microbatches = self.ranges[part] if part >= 0 else range(1)
                repeated = [n for n in range(start, number) if self._position(n) is not None]
                yield _Run(range(start, number), repeated, microbatches)
                start, part = number, p

    def _number_run(self, run: _Run, step: int) -> list[tuple[int, int]]:
        """Number the steps of a run, from `step` on, and their results; return the steps and ops not expanded."""
        ops, singles, microbatch = self.parts.main.ops, [], run.microbatches.start
        for number in run.ops:
            op, position = ops[number], self._position(number)
            self.steps.results[step] = list(range(self.values, self.values + len(op.results)))
            if position is None:
                singles.append((step, number))
                self.shared.update((v.name, self.values + i) for i, v in enumerate(op.results))
            else:
                self.step_of[position, microbatch], self.first_result[position, microbatch] = step, self.values
            step, self.values = step + 1, self.values + len(op.results)
        others = np.arange(len(run.microbatches) - 1)
        if others.size and run.repeated:
            columns = slice(microbatch + 1, run.microbatches.stop)
            counts = [len(ops[number].results) for number in run.repeated]
            for number, count in zip(run.repeated, counts, strict=True):
                position = self._position(number)
                self.step_of[position, columns] = step + len(counts) * others
                self.first_result[position, columns] = self.values + sum(counts) * others
                step, self.values = step + 1, self.values + count
            self.values += sum(counts) * (len(others) - 1)
        return singles

    def _add_step(self, step: int, number: int, operands: list[int], microbatch: int) -> None:
        steps, op = self.steps, self.parts.main.ops[number]
        steps.ops[step], steps.operands[step], steps.varying[step], steps.patterns[step] = op, operands, operands, step
        is_copy = microbatch >= 0 and bool(op.task) and microbatch != op.attrs["microbatch"]
        self.origins[step] = number, microbatch if is_copy else -1

    def _add_steps(self, number: int, position: int) -> None:
        """Add the steps of an expanded op."""
        microbatches = self.ranges[self.parts.ops[number]]
        first = microbatches.start
        step, operands = int(self.step_of[position, first]), self.parts.main.ops[number].operands
        numbers = []
        for i, value in enumerate(operands):
            if first == 1 and self.parts.part_of[value.name] == 0 and value.name not in self.parts.totals:
                # The predecessor of the second microbatch is the first, whose ops are not aligned.
                numbers.append(self._single(value, 0))
            else:
                source = self._source_of(number, position, i)
                numbers.append(int(self._numbers(source, slice(first, first + 1), [step])[0]))
        self._add_step(step, number, numbers, first)
        if len(microbatches) > 1:
            self._add_rows(number, position, microbatches[1:])

    def _add_rows(self, number: int, position: int, microbatches: range) -> None:
        """Add the steps of an expanded op for all microbatches of its part but the first."""
        steps, op = self.steps, self.parts.main.ops[number]
        columns = slice(microbatches.start, microbatches.stop)
        numbers = self.step_of[position, columns]
        sources = [self._source_of(number, position, i) for i in range(len(op.operands))]
        operands = np.empty((len(microbatches), len(sources)), dtype=np.int64)
        for i, source in enumerate(sources):
            operands[:, i] = self._numbers(source, columns, numbers)
        is_varying = [kind != _SHARED or second >= steps.inputs for kind, _, second, _ in sources]
        first, last = int(numbers[0]), int(numbers[-1])
        rows = slice(first, last + 1, (last - first) // (len(numbers) - 1) if len(numbers) > 1 else 1)
        steps.ops[rows] = [op] * len(numbers)
        steps.operands[rows] = operands.tolist()
        steps.varying[rows] = operands[:, is_varying].tolist()
        steps.patterns[rows] = [first] * len(numbers)
        steps.results[rows] = (self.first_result[position, columns, None] + np.arange(len(op.results))).tolist()
        emitted = op.attrs["microbatch"] if op.task else None
        copies = [-1 if emitted is None or m == emitted else m for m in microbatches]
        self.origins[rows] = [(number, microbatch) for microbatch in copies]

    def _numbers(
        self, source: tuple[int, int, int, str], columns: slice, steps: IntArray | list[int]
    ) -> IntArray | list[int]:
        """Return the numbers of an operand for consecutive microbatches, whose steps are `steps`."""
        kind, first, second, family = source
        if kind == _SHARED:
            return [second] * len(steps)
        if kind == _INPUT:
            return self.input_numbers[family][columns]
        if kind == _PREVIOUS:
            columns = slice(columns.start - 1, columns.stop - 1)
        if (self.step_of[first, columns] >= steps).any():
            raise VerificationError("a microbatch uses a value that another one computes later")
        result: IntArray = self.first_result[first, columns] + second
        return result

    def _source_of(self, number: int, position: int, i: int) -> tuple[int, int, int, str]:
        """Return the source of an operand: shared, an input, or a producer in the same or the preceding microbatch."""
        assert self.alignment is not None
        value, part = self.parts.main.ops[number].operands[i], self.parts.ops[number]
        value_part = self.parts.part_of[value.name]
        if value_part < 0 or value.name in self.parts.totals:
            return _SHARED, 0, self._last(value), ""
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
        return self._last(value)

    def _last(self, value: Value) -> int:
        """Return the number of a value for the last microbatch that its own represents."""
        number = self.shared.get(value.name)
        return self._all(value)[-1] if number is None else number

    def _all(self, value: Value) -> list[int]:
        """Return the numbers of a value, for each microbatch that its own represents."""
        if value.name in self.shared:
            return [self.shared[value.name]]
        microbatches = self.ranges[self.parts.part_of[value.name]]
        columns = slice(microbatches.start, microbatches.stop)
        if value.name in self.parts.families:
            numbers = self.input_numbers[self.parts.families[value.name]][columns]
        else:
            assert self.alignment is not None
            producer, result = self.alignment.producers[value.name]
            position = self.alignment.position_of[self.parts.part_of[value.name] - 1][producer]
            numbers = self.first_result[position, columns] + result
        return list(map(int, numbers))
