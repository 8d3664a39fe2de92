"""A program of many microbatches from one in which only some are written out: for the simulator.

`Microbatches` writes out the first, the second, the last, and each of another size; they stand for all. Here the ops of
those in between are found by their place in the flow of data, and stand in the program once for each microbatch::

    written out, for 5                          as it is simulated
    %sum.0 = call @g(%x.0)                      %sum.0 = call @g(%x.0)
    %sum.1 = call @g_1(%x.1, %sum.0)            for m in 1, 2, 3:  %sum[m] = call @g_1(%x[m], %sum[m - 1])
    %sum.2 = call @g_1(%x.2, %sum.1)            %sum[4] = call @g_1(%x[4], %sum[3])
    %w.new = update(%w, %sum.2)                 %w.new = update(%w, %sum[4])

The steps are those of the program with all microbatches written out, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distir_relax.analysis.interpreter import Steps, steps_of
from distir_relax.analysis.schedule_order import in_order
from distir_relax.errors import VerificationError
from distir_relax.ir import Divided, Function, Module, Op, Repeated, Scheduled, Value

Source = tuple[int, int]
"""A value: what makes it, by number among the ops of a part, and which of its results it is."""


@dataclass(slots=True)
class Entry:
    """What the entry function of a program does, with all microbatches.

    `inputs` are the numbers of the function's inputs that the steps' inputs are of. `places` says of each step which op
    of the function it is, and for which microbatch, -1 for its own: so it is known of programs that differ in types.
    """

    steps: Steps
    inputs: list[int]
    places: list[tuple[int, int]]

    def ops(self, main: Function) -> list[Op]:
        """The steps' ops in an entry function that is the same but for types."""
        return [_of_microbatch(main.ops[number], microbatch) for number, microbatch in self.places]


def entry_of(module: Module) -> Entry:
    """What the entry of a module of the distributed stage does, in the order of its `Scheduled` record, if it has one.

    Raises `VerificationError` where microbatches that are written out do not do the same.
    """
    repeated = _repeated(module)
    if repeated is None:
        main = module.main
        return Entry(steps_of(main), list(range(len(main.inputs))), [(number, -1) for number in range(len(main.ops))])
    ranges = repeated.ranges
    parts = _Parts(module, repeated)
    found = _Writer(parts, ranges, None if len(ranges) == repeated.count else _Flow(parts, len(ranges))).entry()
    order = next((record for record in module.records if isinstance(record, Scheduled)), None)
    return found if order is None else _scheduled(found, order)


def with_all_ops(module: Module) -> Module:
    """A module whose entry has the ops of all microbatches, for whom counts ops; values have the names of those that
    stand for them. Raises as `entry_of` does."""
    if _repeated(module) is None:
        return module
    ops = tuple(entry_of(module).steps.ops)
    return replace(module, functions=(replace(module.main, ops=ops), *module.functions[1:]))


def _repeated(module: Module) -> Repeated | None:
    return next((record for record in module.records if isinstance(record, Repeated)), None)


def _scheduled(entry: Entry, order: Scheduled) -> Entry:
    steps = entry.steps
    chosen = in_order(steps, order.names)

    def sort(items: list[Any]) -> list[Any]:
        return [items[number] for number in chosen]

    steps = replace(steps, ops=sort(steps.ops), operands=sort(steps.operands), results=sort(steps.results))
    return Entry(steps, entry.inputs, sort(entry.places))


def _of_microbatch(op: Op, microbatch: int) -> Op:
    if microbatch < 0:
        return op
    return Op(op.name, op.operands, op.results, {**op.attrs, "microbatch": microbatch}, op.location)


class _Parts:
    """To which part of the program its values and ops belong: -1 to none, or else to a microbatch written out."""

    def __init__(self, module: Module, repeated: Repeated) -> None:
        self.main: Function = module.main
        self.totals = frozenset(repeated.totals.split())
        self.families: dict[str, str] = {}
        """The input of which each is a part."""
        for record in module.records:
            if isinstance(record, Divided) and record.role == "input":
                self.families.update(dict.fromkeys(record.names, record.value))
        known = repeated.part_of
        self.of = {item.value.name: known.get(item.value.name, -1) for item in self.main.inputs}
        self.ops: list[int] = []
        for op in self.main.ops:
            if op.task:
                part = int(op.task["microbatch"])  # type: ignore[arg-type]
            else:
                # What passes put in between belongs to what it is made of.
                own = [known[v.name] for v in op.results if v.name in known]
                part = max(own or [self.of[v.name] for v in op.operands if v.name not in self.totals], default=-1)
            self.ops.append(part)
            self.of.update((v.name, part) for v in op.results)
        self._pull(known)

    def _pull(self, known: Mapping[str, int]) -> None:
        """What passes made for one microbatch alone is of that: parameters that are gathered for a task."""
        users: dict[str, set[int]] = defaultdict(set)
        for output in self.main.outputs:
            users[output.value.name].add(-1)
        for number in range(len(self.ops) - 1, -1, -1):
            op = self.main.ops[number]
            if self.ops[number] < 0 and not any(v.name in known or v.name in self.totals for v in op.operands):
                parts = set().union(*(users[v.name] for v in op.results))
                if len(parts) == 1:
                    self.ops[number] = parts.pop()
                    self.of.update((v.name, self.ops[number]) for v in op.results)
            for v in op.operands:
                users[v.name].add(self.ops[number])


class _Flow:
    """Which ops of one microbatch are those of another: those that do the same with what is made in the same way.

    `aligned` has for each part from 1 on the numbers of its ops, by their place in every part; `before` says of
    which op of the microbatch before, by that place, an operand is, by places of the op and the operand.
    """

    def __init__(self, parts: _Parts, count: int) -> None:
        self.parts, self.count = parts, count
        self.forms: dict[object, int] = {}
        self.makers = {v.name: (n, i) for n, op in enumerate(parts.main.ops) for i, v in enumerate(op.results)}
        self.form_of: dict[int, int] = {}
        rows = [self._row(part) for part in range(1, count)]
        self.aligned = [rows[0], *(self._like(rows[0], row) for row in rows[1:])]
        for row, chosen in zip(rows[:-1], self.aligned[:-1], strict=True):
            if len(row) != len(chosen):
                raise VerificationError("microbatches do unlike things")
        self.place = [{number: i for i, number in enumerate(row)} for row in self.aligned]
        """The place of each op in its part."""
        self.before = self._before()

    def _row(self, part: int) -> list[int]:
        found = [number for number, mine in enumerate(self.parts.ops) if mine == part]
        for number in found:
            self.form_of[number] = self._form(self.parts.main.ops[number], part)
        return found

    def _form(self, op: Op, part: int) -> int:
        """A number for what an op does, the same for ops of other parts that do it."""
        operands = tuple(self._source(v, part) for v in op.operands)
        what = (op.name, op.location, op.attrs.get("stage"), op.attrs.get("kind"), op.attrs.get("stream"))
        return self.forms.setdefault((what, len(op.results), operands), len(self.forms))

    def _source(self, value: Value, part: int) -> object:
        mine = self.parts.of[value.name]
        if mine < 0 or value.name in self.parts.totals:
            return value.name
        if not part - 1 <= mine <= part:
            raise VerificationError(f"%{value.name} is used by a microbatch that does not follow its own")
        if mine == part - 1:
            return "before"
        if value.name not in self.makers:
            return ("input", self.parts.families[value.name])
        number, result = self.makers[value.name]
        return (self.form_of[number], result)

    def _like(self, first: Sequence[int], row: Sequence[int]) -> list[int]:
        """The ops of a part in the order of those of the first."""
        waiting: dict[int, list[int]] = defaultdict(list)
        for number in reversed(row):
            waiting[self.form_of[number]].append(number)
        try:
            return [waiting[self.form_of[number]].pop() for number in first]
        except IndexError:
            raise VerificationError("microbatches do unlike things") from None

    def _before(self) -> dict[tuple[int, int], Source]:
        found: dict[tuple[int, int], Source] = {}
        for part in range(2, self.count):
            earlier = self.place[part - 2]
            for place, number in enumerate(self.aligned[part - 1]):
                for i, value in enumerate(self.parts.main.ops[number].operands):
                    if self.parts.of[value.name] == part - 1 and value.name not in self.parts.totals:
                        maker, result = self.makers.get(value.name, (-1, 0))
                        source = earlier.get(maker, -1), result
                        if source[0] < 0 or found.setdefault((place, i), source) != source:
                            raise VerificationError(f"%{value.name} is not used by each microbatch that follows")
        return found


_ONCE, _OWN, _BEFORE, _GIVEN = range(4)


@dataclass(slots=True)
class _Writer:
    parts: _Parts
    ranges: Sequence[range]
    flow: _Flow | None
    """None where all microbatches are written out."""
    values: int = 0
    once: dict[str, int] = field(default_factory=dict)
    """The numbers of values that stand for themselves."""
    made: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """The numbers of the first results of ops of microbatches from 1 on, by microbatch and place of the op."""
    given: dict[tuple[str, int], int] = field(default_factory=dict)
    """The numbers of the inputs of microbatches, by the input that they are parts of."""
    plans: dict[int, tuple[list[int], list[tuple[int, tuple[int, int, int, str]]]]] = field(default_factory=dict)
    """Of each op the operands that are the same for all microbatches, and where and what the others are."""

    def entry(self) -> Entry:
        inputs = list(self._inputs())
        steps, places = Steps([], [], [], 0, len(inputs), []), []
        main = self.parts.main
        for number, microbatch in self._instances():
            op, place = main.ops[number], self._place(number)
            first, count = self.values, len(op.results)
            self.values += count
            if place is None:
                steps.operands.append([self._alone(v, self.parts.ops[number]) for v in op.operands])
                self.once.update((v.name, first + i) for i, v in enumerate(op.results))
            else:
                steps.operands.append(self._operands(number, place, microbatch))
                self.made[microbatch][place] = first
            is_another = bool(op.task) and microbatch != op.attrs["microbatch"]
            places.append((number, microbatch if is_another else -1))
            steps.ops.append(_of_microbatch(op, places[-1][1]))
            steps.results.append(list(range(first, first + count)))
        steps.values, steps.outputs = self.values, [n for o in main.outputs for n in self._all(o.value)]
        return Entry(steps, inputs, places)

    def _inputs(self) -> Iterator[int]:
        for number, item in enumerate(self.parts.main.inputs):
            part = self.parts.of[item.value.name]
            for microbatch in self.ranges[part] if part >= 0 else (0,):
                if part >= 0:
                    self.given[self.parts.families[item.value.name], microbatch] = self.values
                else:
                    self.once[item.value.name] = self.values
                self.values += 1
                yield number

    def _place(self, number: int) -> int | None:
        part = self.parts.ops[number]
        return None if self.flow is None or part < 1 else self.flow.place[part - 1].get(number)

    def _instances(self) -> Iterator[tuple[int, int]]:
        """The ops of the program by number, each with its microbatch: in the order in which all were written out."""
        start, part = 0, -1
        parts = [*self.parts.ops, len(self.ranges)]
        for number, mine in enumerate(parts):
            if mine >= 0 and mine != part:
                yield from self._again(range(start, number), part)
                start, part = number, mine

    def _again(self, numbers: range, part: int) -> Iterator[tuple[int, int]]:
        """Ops that follow each other, of one part and of none, for each microbatch that the part stands for."""
        microbatches = self.ranges[part] if part >= 0 else range(1)
        yield from ((number, microbatches.start) for number in numbers)
        if len(microbatches) > 1:
            again = [number for number in numbers if self._place(number) is not None]
            yield from ((number, microbatch) for microbatch in microbatches[1:] for number in again)

    def _operands(self, number: int, place: int, microbatch: int) -> list[int]:
        """The numbers of the operands of an op that each microbatch has."""
        if microbatch == 1:
            # What is before the second is the first, whose ops are their own.
            main, mine = self.parts.main, self.parts.ops[number]
            found = []
            for i, value in enumerate(main.ops[number].operands):
                is_before = self.parts.of[value.name] == mine - 1 >= 0 and value.name not in self.parts.totals
                found.append(self._alone(value, 0) if is_before else self._of(self._source(number, place, i), 1))
            return found
        if number not in self.plans:
            sources = [self._source(number, place, i) for i in range(len(self.parts.main.ops[number].operands))]
            same = [second if how == _ONCE else -1 for how, _, second, _ in sources]
            self.plans[number] = same, [(i, source) for i, source in enumerate(sources) if source[0] != _ONCE]
        same, others = self.plans[number]
        # Nearly all operands of a stage are its weights.
        found = same.copy()
        for i, source in others:
            found[i] = self._of(source, microbatch)
        return found

    def _of(self, source: tuple[int, int, int, str], microbatch: int) -> int:
        how, first, second, family = source
        if how == _ONCE:
            return second
        if how == _GIVEN:
            return self.given[family, microbatch]
        return self.made[microbatch if how == _OWN else microbatch - 1][first] + second

    def _source(self, number: int, place: int, i: int) -> tuple[int, int, int, str]:
        """Where an operand comes from: once for all, or from which op of which microbatch."""
        assert self.flow is not None
        value, part = self.parts.main.ops[number].operands[i], self.parts.ops[number]
        mine = self.parts.of[value.name]
        if mine < 0 or value.name in self.parts.totals:
            return _ONCE, 0, self._all(value)[-1], ""
        if mine < part:
            return _BEFORE, *self.flow.before[place, i], ""
        if value.name not in self.flow.makers:
            return _GIVEN, 0, 0, self.parts.families[value.name]
        maker, result = self.flow.makers[value.name]
        return _OWN, self.flow.place[part - 1][maker], result, ""

    def _alone(self, value: Value, part: int) -> int:
        """An operand of an op that is there once: what the last microbatch gives, or its own."""
        mine = self.parts.of[value.name]
        if self.flow is not None and 0 <= mine != part and value.name not in self.parts.totals:
            raise VerificationError(f"%{value.name} is of one microbatch, and used where all are done")
        return self._all(value)[-1]

    def _all(self, value: Value) -> list[int]:
        """The numbers of a value: of each microbatch that its own stands for."""
        if value.name in self.once:
            return [self.once[value.name]]
        part = self.parts.of[value.name]
        if value.name in self.parts.families:
            return [self.given[self.parts.families[value.name], m] for m in self.ranges[part]]
        assert self.flow is not None
        maker, result = self.flow.makers[value.name]
        place = self.flow.place[part - 1][maker]
        return [self.made[m][place] + result for m in self.ranges[part]]
