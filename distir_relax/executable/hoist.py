"""What a rank's program computes once, when it is loaded or for a choice of sizes, in functions of their own.

A function ``f`` of the ranked or the distributed stage becomes up to three of the executable stage:

    @f.prepare   of weights, what every call takes of them: results of ops on weights alone, and packed weights (`pack`)
    @f.sizes     of the entry function: values that depend on the sizes of a call, and on weights, alone
    @f           the rest

Inputs of ``@f`` are its arguments, then those of role ``parameter``, ``constant`` or ``state``, which ``@f.prepare``
gives, and those of role ``sized``, which ``@f.sizes`` gives. Functions that calls share are prepared once for each
choice of weights. A program of all devices, which is simulated, is divided as those of its ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.executable.lasting_values import (
    entries_of,
    fixed_values,
    kept_values,
    mutated_values,
    sized_values,
    stored_inputs,
    symbols_in_code,
)
from distir_relax.ir import (
    CALL,
    Attribute,
    Function,
    Input,
    Module,
    Op,
    Output,
    Type,
    Value,
    callees_first,
    fresh_name,
    remap_devices,
    value_names,
)
from distir_relax.ops import Trait, is_packable, lookup, packed_operands, packing_of

PREPARE, SIZES = ".prepare", ".sizes"
"""What the names of functions end in that are computed once: for weights, and for sizes."""
SIZED = "sized"
"""The role of inputs that are computed for a choice of sizes."""


@dataclass(frozen=True, slots=True)
class Hoist:
    """Pass: ranked or distributed to executable stage.

    Without `sizes`, values that depend on sizes alone are those of each call; without `pack`, weights stay as they are.
    """

    takes: ClassVar[tuple[str, ...]] = ("distributed", "ranked")
    gives: ClassVar[str] = "executable"
    sizes: bool = True
    pack: bool = True

    def run(self, module: Module) -> Module:
        """Divide every function by when its ops run."""
        entries, functions, mutated = entries_of(module), callees_first(module), mutated_values(module)
        stored, kept = stored_inputs(module, mutated), kept_values(module)
        parts: dict[str, _Parts] = {}
        for f in functions:
            is_entry = f.name in entries
            division = _Division(
                f,
                is_entry,
                self.sizes and is_entry,
                self.pack,
                stored[f.name],
                mutated[f.name],
                kept.get(f.name, ()),
                parts,
            )
            parts[f.name] = division.parts()
        divided = [part for f in module.functions for part in parts[f.name].functions if part is not None]
        return replace(module, stage="executable", functions=tuple(divided))


def numbers_of(function: Function) -> dict[str, Op]:
    """Return the ops of a function that are numbers which the code of their users contains, by name."""
    outputs = {output.value.name for output in function.outputs}
    return {
        op.results[0].name: op
        for op in function.ops
        if not op.operands and not op.callee and Trait.SCALAR in lookup(op.name, op.location).traits
        and op.results[0].name not in outputs
    }  # fmt: skip


def prepared_name(call: str, name: str) -> str:
    """Return the name of what a call has prepared, from a name for the call, and the name in its function."""
    return f"{call}.prepared.{name}"


def is_constant(item: Input) -> bool:
    """Return whether an input comes with the weights, rather than with a call."""
    return item.role not in ("input", SIZED)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A function in parts. `arguments` and `weights` are the numbers of inputs, `symbols` those in its code."""

    main: Function
    prepare: Function | None
    sizes: Function | None
    arguments: Sequence[int]
    weights: Sequence[int]
    symbols: frozenset[str]

    @property
    def functions(self) -> tuple[Function | None, ...]:
        return self.main, self.prepare, self.sizes


@dataclass(slots=True)
class _Division:
    """The division of one function, whose callees have their `parts`."""

    function: Function
    is_entry: bool
    has_sizes: bool
    packs: bool
    stored: set[str]
    mutated: set[str]
    kept: Container[str]
    """The values that stay in the function."""
    callees: Mapping[str, _Parts]
    taken: set[str] = field(init=False)
    packed: dict[object, Op] = field(default_factory=dict)
    """The op that packs the weights of each product, by these and its kind."""
    prepared: dict[object, Op] = field(default_factory=dict)
    """The call that prepares the weights of a call, by these and its function."""

    def __post_init__(self) -> None:
        self.taken = value_names(self.function)

    def parts(self) -> _Parts:
        """Return the parts."""
        function = self.function
        numbers = numbers_of(function)
        fixed = fixed_values(function, self.stored - self.mutated, self.kept)
        own = {symbol.name for op in function.ops for symbol in symbols_in_code(op)}
        symbols = frozenset(own).union(*(self.callees[op.callee].symbols for op in function.ops if op.callee))
        sized = sized_values(function, fixed, self.mutated) if self.has_sizes and symbols else set()
        hoisted, of_sizes, remaining = list[Op](), list[Op](), list[Op]()
        for op in function.ops:
            name = op.results[0].name
            if name in numbers:
                remaining.append(op)
            elif name in fixed:
                hoisted.append(op)
            else:
                (of_sizes if name in sized else remaining).append(self._with_prepared(op, fixed))
        early = [*hoisted, *self.packed.values(), *self.prepared.values()]
        mine = _used(remaining) | {o.value for o in function.outputs}
        remaining = [op for op in remaining if op.results[0].name not in numbers or op.results[0] in mine]
        used = mine | _used(of_sizes)
        arguments = [n for n, i in enumerate(function.inputs) if i.value.name not in self.stored]
        weights = [n for n, i in enumerate(function.inputs) if i.value.name in self.stored]
        given = {item.value: item if self.is_entry else replace(item, role="constant") for item in function.inputs}
        taken = [given[function.inputs[n].value] for n in weights]
        made = [Input(v, "constant", op.location) for op in early for v in op.results]
        constants = [item for item in (*taken, *made) if item.value in used]
        prepare = None
        # A called function always has one: its results are shared by the calls.
        if constants and (early or not self.is_entry):
            outputs = tuple(Output(item.value.name, item.value) for item in constants)
            ops = tuple(with_numbers(early, numbers))
            prepare = Function(function.name + PREPARE, tuple(taken), ops, outputs)
        sizes = self._sizes(of_sizes, remaining, constants, numbers) if of_sizes else None
        after = [] if sizes is None else [Input(o.value, SIZED) for o in sizes.outputs]
        inputs = [
            *(given[function.inputs[n].value] if self.is_entry else replace(function.inputs[n], role="input")
              for n in arguments),
            *(item for item in constants if item.value in mine or not self.is_entry), *after,
        ]  # fmt: skip
        main = replace(function, inputs=tuple(inputs), ops=tuple(remaining))
        return _Parts(main, prepare, sizes, arguments, weights, symbols)

    def _sizes(
        self, ops: Sequence[Op], remaining: Sequence[Op], constants: Sequence[Input], numbers: Mapping[str, Op]
    ) -> Function:
        used = _used(remaining) | {o.value for o in self.function.outputs}
        results = [v for op in ops for v in op.results if v in used]
        inputs = tuple(item for item in constants if item.value in _used(ops))
        outputs = tuple(Output(v.name, v) for v in results)
        return Function(self.function.name + SIZES, inputs, tuple(with_numbers(ops, numbers)), outputs)

    def _with_prepared(self, op: Op, fixed: Collection[str]) -> Op:
        """Return an op that takes packed weights where it can, and a call what its function has prepared."""
        if op.callee:
            return self._call(op)
        if not self.packs or not is_packable(op):
            return op
        numbers = packed_operands(op)
        weights = tuple(op.operands[n] for n in numbers)
        if any(v.name not in fixed for v in weights):
            return op
        packing = packing_of(op, [f"{v.name}.packed" for v in weights])
        key = weights, *packing.attrs.items()
        if key not in self.packed:
            results = tuple(replace(v, name=fresh_name(v.name, self.taken)) for v in packing.results)
            self.packed[key] = replace(packing, results=results)
        operands = list(op.operands)
        for number, value in zip(numbers, self.packed[key].results, strict=True):
            operands[number] = value
        return replace(op, operands=tuple(operands))

    def _call(self, op: Op) -> Op:
        """Return a call with what its function has prepared of its weights."""
        callee = self.callees[op.callee]
        operands = tuple(op.operands[n] for n in callee.arguments)
        if callee.prepare is None:
            return replace(op, operands=operands)
        weights = tuple(op.operands[n] for n in callee.weights)
        key = op.callee, weights, op.devices
        if key not in self.prepared:
            base = re.sub(r"[^\w.]", "_", op.location) or op.callee
            name = fresh_name(base, self.taken)
            while any(prepared_name(name, o.name) in self.taken for o in callee.prepare.outputs):
                name = fresh_name(base, self.taken)
            results = tuple(Value(prepared_name(name, o.name), _type(o.value, op)) for o in callee.prepare.outputs)
            self.taken |= {v.name for v in results}
            on: dict[str, Attribute] = {} if op.devices is None else {"devices": op.devices}
            attrs = {"callee": callee.prepare.name, **on}
            self.prepared[key] = Op(CALL, weights, results, attrs, op.location)
        return replace(op, operands=(*operands, *self.prepared[key].results))


def with_numbers(ops: Sequence[Op], numbers: Mapping[str, Op]) -> list[Op]:
    """Return ops in order, after the `numbers` that they use."""
    used = dict.fromkeys(v.name for op in ops for v in op.operands if v.name in numbers)
    return [*(numbers[name] for name in used), *ops]


def _type(value: Value, call: Op) -> Type:
    """Return the type of a function's value where it is called."""
    return value.type if call.devices is None else remap_devices(value.placed, call.devices)


def _used(ops: Sequence[Op]) -> set[Value]:
    return {v for op in ops for v in op.operands}
