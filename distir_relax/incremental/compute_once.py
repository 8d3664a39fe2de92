"""Values of an incremental program that are the same in each call: states with what the first call has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.ir import (
    NEXT_ROLE,
    CachedState,
    Function,
    Inline,
    Module,
    Op,
    Output,
    OutputAssembly,
    Record,
    Value,
    count_uses,
    live_ops,
    producers,
    value_names,
)
from distir_relax.ir.symbols import module_symbols
from distir_relax.layout import Guard, Symbol, assuming, symbols_within
from distir_relax.ops import Builder, Trait, lookup


@dataclass(frozen=True, slots=True)
class ComputeOnce:
    """Let each call of an incremental program take what depends on `inputs` alone from states.

    `inputs` are the same in each call for a sequence, such as the input of an encoder. Values of them and of weights
    that other ops read, such as the keys and values of cross-attention, become states: ``keep(state, value)``. The
    smallest of the tensors that a value is moved, repeated or broadcast from is kept. The program computes the same as
    before; `FirstCall` and `EachCall` divide it at its states. Functions are inlined.

    Raises `DistIRError` for a name that is not one of the program's inputs.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    inputs: tuple[str, ...]

    def run(self, module: Module) -> Module:
        """Return the program with these states, and a record `CachedState` for each."""
        main = Inline().run(module).main
        names = [item.value.name for item in main.inputs if item.role == "input"]
        if missing := [name for name in self.inputs if name not in names]:
            raise DistIRError(f"the program has no input {missing[0]!r}", hint=f"its inputs are {', '.join(names)}")
        with assuming(module.guards):
            rewriter = _Rewriter(main, frozenset(self.inputs))
            function = rewriter.function()
        return replace(module, functions=(function,), records=(*module.records, *rewriter.records))


@dataclass(slots=True)
class _Rewriter:
    """Rewrites a function; `fixed` are the values that are the same in each call."""

    main: Function
    inputs: frozenset[str]
    records: list[CachedState] = field(default_factory=list)
    _fixed: set[str] = field(init=False)
    _producers: dict[str, Op] = field(init=False)
    _builder: Builder = field(init=False)
    _made: dict[str, Value] = field(default_factory=dict)
    _states: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fixed = _fixed_values(self.main, self.inputs)
        self._producers = producers(self.main)
        self._builder = Builder()
        self._builder.inputs = list(self.main.inputs)
        self._builder.reserve(value_names(self.main))

    def function(self) -> Function:
        """Return the function with states."""
        for op in self.main.ops:
            is_fixed = any(v.name in self._fixed for v in op.results)
            self._builder.ops.append(op if is_fixed else replace(op, operands=self._read(op.operands)))
        outputs = [replace(o, value=self._read([o.value])[0]) for o in self.main.outputs]
        return self._builder.function(self.main.name, [*outputs, *self._states])

    def _read(self, operands: Sequence[Value]) -> tuple[Value, ...]:
        """Return the operands of an op of each call."""
        return tuple(self._kept(v) if v.name in self._fixed else v for v in operands)

    def _kept(self, value: Value) -> Value:
        """Return a fixed value as each call has it: emit its state, and the ops that make it of a smaller tensor."""
        if value.name not in self._made:
            source, moves = self._smallest(value)
            if not moves:
                self._made[value.name] = self._keep(value)
            else:
                result = self._kept(source)
                for op in moves:
                    operands = [result if v.name in self._fixed else v for v in op.operands]
                    self._builder.location, self._builder.hint = op.location, op.results[0].name
                    result = self._builder.again(op, *operands)
                self._made[value.name] = result
        return self._made[value.name]

    def _smallest(self, value: Value) -> tuple[Value, list[Op]]:
        """Return the smallest tensor that a value is moved from, and the ops that do, in order."""
        best, length = value, 0
        chain: list[Op] = []
        source = value
        while (op := self._producers.get(source.name)) is not None and Trait.MOVES in lookup(op.name).traits:
            sources = [v for v in op.operands if v.name in self._fixed]
            if len(op.results) > 1 or len(sources) != 1:
                break
            (source,) = sources
            chain.append(op)
            if source.tensor.typical.bytes < best.tensor.typical.bytes:
                best, length = source, len(chain)
        return best, chain[:length][::-1]

    def _keep(self, value: Value) -> Value:
        made_by = self._producers.get(value.name)
        self._builder.location = made_by.location if made_by is not None else ""
        self._builder.hint = f"{value.name}.again"
        state = self._builder.input(f"{value.name}.kept", value.tensor, "input", self._builder.location)
        result: Value = self._builder.emit("keep", state, value)
        self.records.append(CachedState(state.name, f"{state.name}.next", 0, False))
        self._states.append(Output(f"{state.name}.next", result, role=NEXT_ROLE, of=state.name))
        return result


def _fixed_values(main: Function, inputs: frozenset[str]) -> set[str]:
    """Return the values that depend on `inputs`, and besides on weights and on sizes of `inputs` alone."""
    sizes: frozenset[Symbol] = frozenset().union(
        *(symbols_within(item.value.tensor.shape) for item in main.inputs if item.value.name in inputs)
    )
    fixed, varying = set(inputs), set[str]()
    for item in main.inputs:
        if item.role in ("input", "state") and item.value.name not in inputs:
            varying.add(item.value.name)
    for op in main.ops:
        names, results = {v.name for v in op.operands}, {v.name for v in op.results}
        used = symbols_within((tuple(op.attrs.values()), tuple(v.tensor.shape for v in op.results)))
        if names & varying or used - sizes:
            varying |= results
        elif names & fixed:
            fixed |= results
    return fixed


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The part of a distributed program that computes the states of `ComputeOnce`: they are its outputs."""

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"

    def run(self, module: Module) -> Module:
        """Return this part, with the inputs and weights that it uses."""
        main = Inline().run(module).main
        values = {op.results[0].name: op.operands[1] for op in _keeps(main)}
        outputs = tuple(replace(o, value=values[o.value.name]) for o in main.outputs if o.value.name in values)
        return _part(module, replace(main, outputs=outputs))


@dataclass(frozen=True, slots=True)
class EachCall:
    """The part of a distributed program that takes the states of `ComputeOnce` as they are.

    Their next values are the states themselves.
    """

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"

    def run(self, module: Module) -> Module:
        """Return this part, with the inputs and weights that it uses."""
        main = Inline().run(module).main
        states = {op.results[0].name: op.operands[0] for op in _keeps(main)}
        ops = tuple(replace(op, operands=tuple(states.get(v.name, v) for v in op.operands)) for op in main.ops)
        outputs = tuple(replace(o, value=states.get(o.value.name, o.value)) for o in main.outputs)
        return _part(module, replace(main, ops=ops, outputs=outputs))


def _keeps(main: Function) -> list[Op]:
    """Return the ops with states that are the same in each call. Raises `DistIRError` if there is none."""
    found = [op for op in main.ops if Trait.KEEPS in lookup(op.name, op.location).traits]
    if not found:
        raise DistIRError("the program computes nothing once", hint="compute-once{inputs=[...]} names such inputs")
    return found


def _part(module: Module, main: Function) -> Module:
    """Return the module with a part of its function, without dead ops, and the records that concern it."""
    live = replace(main, ops=live_ops(main))
    used, outputs = count_uses(live), {output.name for output in main.outputs}
    inputs = tuple(item for item in main.inputs if item.value.name in used)
    part = replace(module, functions=(replace(live, inputs=inputs),), records=())
    symbols = set(module_symbols(part).values())

    def concerns(record: Record) -> bool:
        match record:
            case Guard():
                return symbols >= set(record.symbols)
            case CachedState():
                return any(item.value.name == record.input for item in inputs)
            case OutputAssembly():
                return record.output in outputs
            case _:
                return True

    return replace(part, records=tuple(filter(concerns, module.records)))
