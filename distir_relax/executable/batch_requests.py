"""A step of several requests, of a program that continues one sequence.

Ops that are parallel along the new positions run once, on the rows of all requests (`request_rows`). The others run for
each request, in functions of their own, ``@main.each_0``, which are called for each. Rows are joined and taken apart
where the two meet. Values of sizes, and states, are those of each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.executable.hoist import SIZED, SIZES, is_constant, numbers_of, with_numbers
from distir_relax.executable.request_rows import RowOps, row_ops, rows_of
from distir_relax.ir import (
    CALL,
    EACH,
    Attribute,
    Function,
    Input,
    Module,
    Op,
    Output,
    PlacedType,
    TensorType,
    Value,
    fresh_name,
    value_names,
)
from distir_relax.ops import Trait, growing_states, lookup

CALLED = ".each_"
"""The text between the name of a function and the number of one that is called for each request."""


@dataclass(frozen=True, slots=True)
class BatchRequests:
    """Pass: executable stage, in and out, for a program of one sequence (`OneSequence`) without calls.

    `states` maps the inputs that are states to the outputs with their next values.
    """

    takes: ClassVar[tuple[str, ...]] = ("executable",)
    gives: ClassVar[str] = ""
    states: Mapping[str, str] = field(default_factory=dict)

    def run(self, module: Module) -> Module:
        """Divide the first function by whether an op runs once or for each request."""
        is_placed = any(isinstance(item.value.type, PlacedType) for item in module.main.inputs)
        devices = tuple(range(module.meshes[0].size)) if is_placed else None
        batch = _Batch(module.main, _rows(module), self.states, devices)
        return replace(module, functions=(batch.main(), *batch.each, *module.functions[1:]))


def is_for_each(op: Op) -> bool:
    """Return whether an op is a call for each request."""
    return bool(op.callee) and op.results[0].local.form == EACH


def _rows(module: Module) -> RowOps:
    """Find the values that requests share, and the ops that run once for all."""
    main, shared = module.main, {i.value.name for i in module.main.inputs if is_constant(i)}
    sizes = next((f for f in module.functions if f.name == main.name + SIZES), None)
    if sizes is not None:
        shared |= row_ops(sizes, shared).shared
    return row_ops(main, shared)


@dataclass(slots=True)
class _Batch:
    """The step of a function. Ops that run for each request wait until one that runs once needs their results."""

    function: Function
    rows: RowOps
    states: Mapping[str, str]
    devices: tuple[int, ...] | None
    """Those of a program of all devices."""
    ops: list[Op] = field(default_factory=list)
    each: list[Function] = field(default_factory=list)
    """The functions that are called for each request."""
    whole: dict[str, Value] = field(default_factory=dict)
    """The values with the rows of all requests, or that are the same for all."""
    parts: dict[str, Value] = field(default_factory=dict)
    """The values of each request."""
    waiting: list[Op] = field(default_factory=list)
    users: dict[str, set[str]] = field(default_factory=dict)
    """The first results of the ops that use a value, and the names of outputs."""
    made: set[str] = field(default_factory=set)
    """The values that are made for each request: of next states these are kept where they are made."""
    taken: set[str] = field(init=False)
    numbers: dict[str, Op] = field(init=False)
    """The ops that give numbers, by their results: each function has those it needs."""
    roles: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = value_names(self.function)
        self.numbers = numbers_of(self.function)
        self.roles = {item.value.name: item.role for item in self.function.inputs}
        for op in self.function.ops:
            for value in op.operands:
                self.users.setdefault(value.name, set()).add(op.results[0].name)
        for output in self.function.outputs:
            self.users.setdefault(output.value.name, set()).add(f"output {output.name}")

    def main(self) -> Function:
        """Return what runs once, with calls of the functions for each."""
        function, numbers = self.function, self.numbers
        inputs = []
        for item in function.inputs:
            of_each = item.value.name in self.states or item.role == SIZED
            inputs.append(replace(item, value=_each(item.value)) if of_each else item)
            (self.parts if of_each else self.whole)[item.value.name] = inputs[-1].value
        self.whole |= {name: op.results[0] for name, op in numbers.items()}
        for op in function.ops:
            if op.results[0].name not in numbers:
                self._add(op)
        self._flush()
        outputs = tuple(replace(o, value=self._output(o)) for o in function.outputs)
        return Function(function.name, tuple(inputs), tuple(with_numbers(self.ops, numbers)), outputs)

    def _add(self, op: Op) -> None:
        attends = bool(growing_states(op))
        runs_once = attends or op.results[0].name in self.rows.once
        # All ranks communicate in one order only if such an op is alone in its function.
        is_alone = not runs_once and Trait.ON_COMMUNICATOR in lookup(op.name, op.location).traits
        produced = {v.name for other in self.waiting for v in other.results}
        if is_alone or (runs_once and any(v.name in produced for v in op.operands)):
            self._flush()
        if attends:
            self._add_attending(op)
        elif runs_once:
            self.ops.append(replace(op, operands=tuple(map(self._whole, op.operands))))
            self.whole |= {v.name: v for v in op.results}
        else:
            self.waiting.append(op)
            if is_alone:
                self._flush()

    def _add_attending(self, op: Op) -> None:
        """Add an op that runs for all requests in one call, with their states, which it extends."""
        states = growing_states(op)
        operands = (self._whole(v) if n < states[0] else self._part(v) for n, v in enumerate(op.operands))
        results = (op.results[0], *map(_each, op.results[1:]))
        self.ops.append(replace(op, operands=tuple(operands), results=results))
        self.whole[op.results[0].name] = op.results[0]
        self.parts |= {v.name: v for v in results[1:]}
        self.made |= {v.name for v in results[1:]}

    def _flush(self) -> None:
        """Add the call of a function that runs the ops that wait, for each request."""
        if not self.waiting:
            return
        produced = {v.name: v for op in self.waiting for v in op.results}
        inner = {op.results[0].name for op in self.waiting}
        results = [v for v in produced.values() if self.users.get(v.name, set()) - inner]
        # What only communicates has a result, too, that nobody needs.
        results = results or list(self.waiting[-1].results)
        self._call(self.waiting, results)
        self.made |= {v.name for v in results}
        self.waiting = []

    def _call(self, ops: Sequence[Op], results: Sequence[Value]) -> None:
        produced = {v.name for op in ops for v in op.results}
        used = dict.fromkeys(v for op in ops for v in op.operands if v.name not in produced)
        used |= dict.fromkeys(v for v in results if v.name not in produced)
        taken = [v for v in used if v.name not in self.numbers]
        inputs = tuple(Input(v, "input" if v.name in self.states else self.roles.get(v.name, "input")) for v in taken)
        name = f"{self.function.name}{CALLED}{len(self.each)}"
        outputs = tuple(Output(v.name, v) for v in results)
        self.each.append(Function(name, inputs, tuple(with_numbers(ops, self.numbers)), outputs))
        given = tuple(self._given(v) for v in taken)
        of_each = tuple(map(_each, results))
        renamed = tuple(v if v.name in produced else replace(v, name=fresh_name(v.name, self.taken)) for v in of_each)
        on: dict[str, Attribute] = {} if self.devices is None else {"devices": self.devices}
        self.ops.append(Op(CALL, given, renamed, {"callee": name, **on}))
        self.parts |= {v.name: new for v, new in zip(results, renamed, strict=True)}

    def _given(self, value: Value) -> Value:
        """Return the operand of a call for each request: one of each, or the one value that all share."""
        is_same = value.name not in self.parts and (value.name in self.rows.shared or not rows_of(value.local))
        return self.whole[value.name] if is_same else self._part(value)

    def _part(self, value: Value) -> Value:
        """Return a value of each request: a value with the rows of all is taken apart first."""
        if value.name not in self.parts:
            rows = None if value.name in self.rows.shared else rows_of(value.local)
            attrs: dict[str, Attribute] = {} if rows is None else {"axis": rows[0], "size": rows[1]}
            name = "same_for_each" if rows is None else "rows_of_each"
            self.parts[value.name] = self._emit(name, self.whole[value.name], attrs)
        return self.parts[value.name]

    def _whole(self, value: Value) -> Value:
        """Return a value with the rows of all requests, which are joined first."""
        if value.name not in self.whole:
            rows = rows_of(value.local)
            # A shared value has no rows: that of any request will do.
            name, attrs = ("join_rows", {"axis": rows[0]}) if rows else ("one_of_each", {})
            self.whole[value.name] = self._emit(name, self.parts[value.name], attrs)
        return self.whole[value.name]

    def _output(self, output: Output) -> Value:
        """Return the value of an output: that of a state's next value is one of each."""
        if output.name not in self.states.values():
            return self._whole(output.value)
        state = next(key for key, other in self.states.items() if other == output.name)
        if output.value.name not in {state, *self.made}:
            # It is a value of all, or another state: a function keeps it.
            self._call([], [output.value])
        return self.parts[output.value.name]

    def _emit(self, name: str, operand: Value, attrs: Mapping[str, Attribute]) -> Value:
        plain = replace(operand, name=fresh_name(operand.name, self.taken))
        result = _each(plain) if name in ("rows_of_each", "same_for_each") else _with_form(plain, "")
        self.ops.append(Op(name, (operand,), (result,), attrs))
        return result


def _each(value: Value) -> Value:
    return _with_form(value, EACH)


def _with_form(value: Value, form: str) -> Value:
    kind = value.type
    assert isinstance(kind, (TensorType, PlacedType))
    return replace(value, type=replace(kind, form=form))
