"""Function calls written out: a program without calls, which does the same ops in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import VerificationError
from distir_relax.ir.def_use import value_names
from distir_relax.ir.location import within
from distir_relax.ir.memoize import lately
from distir_relax.ir.program import STAGES, Function, Module, Op, Value, fresh_name
from distir_relax.ir.types import PlacedType


@dataclass(frozen=True, slots=True)
class Instance:
    """A function, or one call of it, in a program with calls written out.

    `names` leads from the names of its values to those in that program. `ops` tells for each of its ops which one it is
    there; for a call, the instance of the function called. `place` is where in the model it is.
    """

    function: Function
    names: Mapping[str, str]
    ops: tuple[int | Instance, ...]
    place: str = ""


def on_devices(kind: PlacedType, devices: tuple[int, ...]) -> PlacedType:
    """A type of a function, whose devices are numbered from 0, as a call on `devices` has it."""
    return replace(kind, devices=tuple(devices[i] for i in kind.devices))


MOST_CALLS = 64
"""How deep calls may be nested: a model's blocks are a few functions deep."""
MOST_OPS = 10_000_000
"""How many ops a program may be with its calls written out."""


def verify_no_recursion(module: Module) -> None:
    """Raise `VerificationError` when a function calls itself, by way of others or not, or one that is not there.

    Also where calls are nested deeper than `MOST_CALLS`, or are more than `MOST_OPS` ops when they are written out: a
    few functions, each of which calls the next twice, are as many as one likes.
    """
    functions = {f.name: f for f in module.functions}
    # Of each function: how many ops it is with its calls written out, and how deep they are nested.
    sizes: dict[str, tuple[int, int]] = {}

    def visit(name: str, above: tuple[str, ...]) -> tuple[int, int]:
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
                inner, below = visit(callee, (*above, name)) if len(above) < MOST_CALLS else (1, 0)
                count, height = count + inner, max(height, below + 1)
            if height > MOST_CALLS or len(above) == MOST_CALLS:
                raise VerificationError(f"calls are nested at most {MOST_CALLS} deep, found more, of @{name}")
            sizes[name] = count, height
        return sizes[name]

    for name in functions:
        visit(name, ())
    entries = module.ranks or tuple(f.name for f in module.functions[:1])
    if sum(sizes[name][0] for name in dict.fromkeys(entries) if name in sizes) > MOST_OPS:
        raise VerificationError(f"a program has at most {MOST_OPS:,} ops with its calls written out, found more")


def called_first(module: Module) -> list[Function]:
    """The functions of a module, each after those that it calls, by way of others or not."""
    found: dict[str, Function] = {}

    def visit(function: Function) -> None:
        for name in dict.fromkeys(op.callee for op in function.ops if op.callee):
            if name not in found:
                visit(module.function(name))
        found.setdefault(function.name, function)

    for function in module.functions:
        visit(function)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Inline:
    """The pass: the entry function alone, calls replaced by what they call; any stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = STAGES
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """See `inline`."""
        return inline(module)


def inline(module: Module) -> Module:
    """The module with its entry function alone, calls replaced by the ops of what they call.

    In the ranked stage every rank's function is an entry. Raises `VerificationError` when a function calls itself.
    """
    verify_no_recursion(module)
    entries = [f for f in module.functions if f.name in module.ranks] if module.ranks else [module.main]
    functions = tuple(written_out(module, f).function if _calls(f) else f for f in entries)
    return module if functions == module.functions else replace(module, functions=functions)


@dataclass(frozen=True, slots=True)
class WrittenOut:
    """A function with calls written out, and what its ops were."""

    function: Function
    instance: Instance


def written_out(module: Module, function: Function) -> WrittenOut:
    """`function` of `module` with calls replaced by the ops of what they call. It must not call itself.

    Values keep their names, those of a function called are named after what the call gives: ``%h.linear_1``.
    """
    taken = value_names(function)
    writer = _Writer(module, taken, [])
    values = {i.value.name: i.value for i in function.inputs}
    instance = writer.write(function, values, None, None, "")
    outputs = tuple(replace(o, value=values[o.value.name]) for o in function.outputs)
    return WrittenOut(replace(function, ops=tuple(writer.ops), outputs=outputs), instance)


@lately(4)
def whole_of(module: Module) -> WrittenOut:
    """The entry function of a module with calls written out."""
    return written_out(module, module.main)


def _calls(function: Function) -> bool:
    return any(op.callee for op in function.ops)


@dataclass(slots=True)
class _Writer:
    module: Module
    taken: set[str]
    ops: list[Op]

    def write(
        self,
        function: Function,
        values: dict[str, Value],
        devices: tuple[int, ...] | None,
        prefix: str | None,
        place: str,
    ) -> Instance:
        """Append the ops of `function`; `values` leads from its names to the values of the whole program.

        `devices` are those on which it runs, None where they keep their numbers; `prefix` is for names of its values,
        None where they keep theirs.
        """
        places: list[int | Instance] = []
        for op in function.ops:
            operands = tuple(values[v.name] for v in op.operands)
            where = within(place, op.location)
            if op.callee:
                places.append(self._call(op, operands, values, devices, prefix, where))
                continue
            results = []
            for value in op.results:
                kind = value.type if devices is None else on_devices(value.placed, devices)
                name = value.name if prefix is None else fresh_name(prefix + value.name, self.taken)
                results.append(Value(name, kind))
                values[value.name] = results[-1]
            places.append(len(self.ops))
            self.ops.append(Op(op.name, operands, tuple(results), op.attrs, where))
        return Instance(function, {name: value.name for name, value in values.items()}, tuple(places), place)

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
        named = f"{prefix or ''}{op.results[0].name}." if op.results else prefix or ""
        instance = self.write(callee, inner, onto, named, where)
        for result, output in zip(op.results, callee.outputs, strict=True):
            values[result.name] = inner[output.value.name]
        return instance
