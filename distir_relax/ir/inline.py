"""Function inlining: replace calls with the ops of the functions called, in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import VerificationError
from distir_relax.ir.def_use import value_names
from distir_relax.ir.location import absolute_location
from distir_relax.ir.memoize import memoize
from distir_relax.ir.program import STAGES, Function, Module, Op, Value, fresh_name
from distir_relax.ir.types import PlacedType


@dataclass(frozen=True, slots=True)
class Instance:
    """A function, or one call of it, in an inlined program.

    `names` maps the function's value names to those of the inlined program. `ops` has, for each op of the function, its
    index in that program; for a call, the instance of the callee. `place` is its location in the model.
    """

    function: Function
    names: Mapping[str, str]
    ops: tuple[int | Instance, ...]
    place: str = ""


def remap_devices(kind: PlacedType, devices: tuple[int, ...]) -> PlacedType:
    """Map a type of a function, whose devices are numbered from 0, to the `devices` of a call."""
    is_all = kind.devices == tuple(range(len(devices)))
    return replace(kind, devices=devices if is_all else tuple([devices[i] for i in kind.devices]))


MAX_CALL_DEPTH = 64
"""Maximum depth of nested calls: a model's blocks are a few functions deep."""
MAX_OPS = 10_000_000
"""Maximum number of ops of a program after inlining."""


def verify_no_recursion(module: Module) -> None:
    """Raise `VerificationError` if a function calls itself, directly or not, or a function that does not exist.

    Also if calls are nested deeper than `MAX_CALL_DEPTH`, or inline to more than `MAX_OPS` ops: the number of ops can
    grow exponentially with the number of functions, if each calls the next twice.
    """
    functions = {f.name: f for f in module.functions}
    sizes: dict[str, tuple[int, int]] = {}
    for name in functions:
        _measure_calls(name, (), functions, sizes)
    entries = module.ranks or tuple(f.name for f in module.functions[:1])
    if sum(sizes[name][0] for name in dict.fromkeys(entries) if name in sizes) > MAX_OPS:
        raise VerificationError(f"a program has at most {MAX_OPS:,} ops after inlining, found more")


def _measure_calls(
    name: str, above: tuple[str, ...], functions: Mapping[str, Function], sizes: dict[str, tuple[int, int]]
) -> tuple[int, int]:
    """Return the number of ops of a function after inlining, and its depth of calls; `sizes` has those found so far.

    The functions `above` it call each other, and the last one calls it. Raises as `verify_no_recursion` does.
    """
    if name in above:
        raise VerificationError(f"a function does not call itself, found {' -> '.join((*above, name))}")
    if name not in sizes:
        count = height = 0
        for op in functions[name].ops:
            callee = op.callee
            if not callee:
                count += 1
                continue
            if callee not in functions:
                raise VerificationError(f"a call names a function of its module, found @{callee}", op.location)
            is_too_deep = len(above) >= MAX_CALL_DEPTH
            inner, below = (1, 0) if is_too_deep else _measure_calls(callee, (*above, name), functions, sizes)
            count, height = count + inner, max(height, below + 1)
        if height > MAX_CALL_DEPTH or len(above) == MAX_CALL_DEPTH:
            raise VerificationError(f"calls are nested at most {MAX_CALL_DEPTH} deep, found more, of @{name}")
        sizes[name] = count, height
    return sizes[name]


def callees_first(module: Module) -> list[Function]:
    """Return the functions of a module in post-order: callees before callers."""
    visited: dict[str, Function] = {}
    for function in module.functions:
        _add_callees(module, function, visited)
    return list(visited.values())


def program_of(module: Module, entry: str) -> Module:
    """Return the module with the function `entry`, which comes first, and those that it calls alone."""
    reached: dict[str, Function] = {}
    main = module.function(entry)
    _add_callees(module, main, reached)
    others = (f for f in module.functions if f.name in reached and f is not main)
    return replace(module, functions=(main, *others))


def _add_callees(module: Module, function: Function, visited: dict[str, Function]) -> None:
    """Add the functions that a function calls, and then itself."""
    for name in dict.fromkeys(op.callee for op in function.ops if op.callee):
        if name not in visited:
            _add_callees(module, module.function(name), visited)
    visited.setdefault(function.name, function)


@dataclass(frozen=True, slots=True)
class Inline:
    """Pass: keep only the entry function, with its calls inlined; any stage but the executable one."""

    takes: ClassVar[tuple[str, ...]] = STAGES[:-1]
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """See `inline`."""
        return inline(module)


def inline(module: Module) -> Module:
    """Return the module with only its entry function, calls inlined.

    In the ranked stage every rank's function is an entry. Raises `VerificationError` if a function calls itself.
    """
    verify_no_recursion(module)
    entries = [f for f in module.functions if f.name in module.ranks] if module.ranks else [module.main]
    functions = tuple(inline_calls(module, f).function if _calls(f) else f for f in entries)
    return module if functions == module.functions else replace(module, functions=functions)


@dataclass(frozen=True, slots=True)
class InlinedFunction:
    """A function with its calls inlined, and the tree of calls that its ops come from."""

    function: Function
    instance: Instance


def inline_calls(module: Module, function: Function) -> InlinedFunction:
    """Inline all calls of `function`, which must not be recursive.

    Its values keep their names; those of a callee are prefixed with the call's first result: ``%h.linear_1``.
    """
    names = value_names(function)
    writer = _Writer(module, names, [])
    values = {i.value.name: i.value for i in function.inputs}
    instance = writer.write(function, values, None, None, "")
    outputs = tuple(replace(o, value=values[o.value.name]) for o in function.outputs)
    return InlinedFunction(replace(function, ops=tuple(writer.ops), outputs=outputs), instance)


@memoize(4)
def inlined_main(module: Module) -> InlinedFunction:
    """Return the entry function of a module with its calls inlined."""
    return inline_calls(module, module.main)


def _calls(function: Function) -> bool:
    return any(op.callee for op in function.ops)


@dataclass(slots=True)
class _Writer:
    module: Module
    names: set[str]
    ops: list[Op]
    sets: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Equal device sets as one object."""
    types: dict[tuple[int, int], PlacedType] = field(default_factory=dict)
    """The types of functions on the devices of calls, by the identities of the type and of the devices."""

    locations: dict[tuple[str, str], str] = field(default_factory=dict)
    """Absolute locations, by that of a block and one in it."""

    def write(
        self,
        function: Function,
        values: dict[str, Value],
        devices: tuple[int, ...] | None,
        prefix: str | None,
        place: str,
    ) -> Instance:
        """Append the ops of `function`; `values` maps its value names to values of the inlined program.

        `devices` are those on which it runs, None to keep their numbers; `prefix` is prepended to names of its values,
        None to keep the names.
        """
        places: list[int | Instance] = []
        names, ops, locations = self.names, self.ops, self.locations
        for op in function.ops:
            operands = tuple([values[v.name] for v in op.operands])
            where = locations.get((place, op.location))
            if where is None:
                where = locations[place, op.location] = absolute_location(place, op.location)
            if op.callee:
                # The ops of a pipeline stage have absolute locations: a stage is not a block of the model.
                inner = place if op.task else where
                places.append(self._call(op, operands, values, devices, prefix, inner))
                continue
            results = []
            for value in op.results:
                kind = value.type if devices is None else self._remapped(value.placed, devices)
                if prefix is None:
                    result = value if devices is None else Value(value.name, kind)
                else:
                    result = Value(fresh_name(prefix + value.name, names), kind)
                values[value.name] = result
                results.append(result)
            places.append(len(ops))
            ops.append(Op(op.name, operands, tuple(results), op.attrs, where))
        return Instance(function, {name: value.name for name, value in values.items()}, tuple(places), place)

    def _remapped(self, kind: PlacedType, devices: tuple[int, ...]) -> PlacedType:
        key = id(kind), id(devices)
        found = self.types.get(key)
        if found is None:
            found = self.types[key] = remap_devices(kind, devices)
        return found

    def _call(
        self,
        op: Op,
        operands: tuple[Value, ...],
        values: dict[str, Value],
        devices: tuple[int, ...] | None,
        prefix: str | None,
        where: str,
    ) -> Instance:
        callee = self.module.function(op.callee)
        inner = {i.value.name: value for i, value in zip(callee.inputs, operands, strict=True)}
        numbers = op.devices
        onto = numbers if devices is None or numbers is None else tuple(devices[i] for i in numbers)
        onto = None if onto is None else self.sets.setdefault(onto, onto)
        named = f"{prefix or ''}{op.results[0].name}." if op.results else prefix or ""
        instance = self.write(callee, inner, onto, named, where)
        for result, output in zip(op.results, callee.outputs, strict=True):
            values[result.name] = inner[output.value.name]
        return instance
