"""A program at a batch between two others: its sizes are in between, and all else is the same.

What a program says of a batch is linear in it, if each device has whole samples: dims, and attributes that name them.
So of many batches two are compiled. Where these are not the same program but for numbers, it is not known at which
batch it changes, and nothing can be said of those in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distir_relax.ir import Function, Input, Module, Op, Output, PerRank, PlacedType, Type, Value


class Unlike(Exception):
    """Two programs differ in more than in numbers, or one in between would have a part of a sample."""


def scaled(low: tuple[int, Module], high: tuple[int, Module], batch: int) -> Module:
    """The module at `batch` from those at two others, each with its batch. Raises `Unlike`."""
    (a, one), (b, other) = low, high
    if batch in (a, b):
        return one if batch == a else other
    return _Scale(batch - a, b - a).module(one, other)


def alike(one: Module, other: Module) -> bool:
    """Whether two modules are the same but for numbers: then `scaled` knows those in between."""
    if one is other:
        return True
    try:
        _Scale(1, 1).module(one, other)
    except Unlike:
        return False
    return True


def differ_by_rank(one: Module, other: Module) -> bool:
    """Whether dims of which devices have unlike parts differ between two modules that are `alike`: their devices need
    not be alike in the same way."""
    if one is other:
        return False
    pairs = zip(one.functions, other.functions, strict=True)
    values = (pair for a, b in pairs for pair in zip(_values(a), _values(b), strict=True))
    seen = {(id(a.type), id(b.type)): (a.placed.shape, b.placed.shape) for a, b in values}
    sizes = (pair for a, b in seen.values() for pair in zip(a, b, strict=True))
    return any(a != b and (isinstance(a, PerRank) or isinstance(b, PerRank)) for a, b in sizes)


def with_shared_types(module: Module) -> Module:
    """The module with one object for each type: what is known of types by which they are is found sooner."""
    types: dict[Type, Type] = {}

    def shared(function: Function) -> Function:
        values: dict[str, Value] = {}

        def made(value: Value) -> Value:
            kind = types.setdefault(value.type, value.type)
            values[value.name] = value if kind is value.type else Value(value.name, kind)
            return values[value.name]

        inputs = tuple([replace(item, value=made(item.value)) for item in function.inputs])
        ops = []
        for op in function.ops:
            operands = tuple([values[v.name] for v in op.operands])
            ops.append(Op(op.name, operands, tuple(map(made, op.results)), op.attrs, op.location))
        outputs = tuple([replace(output, value=values[output.value.name]) for output in function.outputs])
        return Function(function.name, inputs, tuple(ops), outputs)

    return replace(module, functions=tuple(map(shared, module.functions)))


@dataclass(slots=True)
class _Scale:
    part: int
    whole: int
    types: dict[tuple[int, int], tuple[Type, Type, Type]] = field(default_factory=dict)
    """Types in between, with those that they come from, so that equal ones stay one object."""

    def module(self, one: Module, other: Module) -> Module:
        if len(one.functions) != len(other.functions) or one.meshes != other.meshes:
            raise Unlike
        pairs = zip(one.functions, other.functions, strict=True)
        return replace(one, functions=tuple(self._function(a, b) for a, b in pairs))

    def _function(self, one: Function, other: Function) -> Function:
        if one == other:
            return one
        if (one.name, len(one.ops)) != (other.name, len(other.ops)):
            raise Unlike
        known: dict[str, Value] = {}
        inputs = tuple(self._input(a, b, known) for a, b in _pairs(one.inputs, other.inputs))
        ops = tuple(self._op(a, b, known) for a, b in _pairs(one.ops, other.ops))
        outputs = tuple(self._output(a, b, known) for a, b in _pairs(one.outputs, other.outputs))
        return Function(one.name, inputs, ops, outputs)

    def _input(self, one: Input, other: Input, known: dict[str, Value]) -> Input:
        if one.role != other.role:
            raise Unlike
        value = self._made(one.value, other.value, known)
        # Most are weights, of which a batch changes nothing.
        return one if value is one.value and one.layout is None else replace(one, value=value, layout=None)

    def _output(self, one: Output, other: Output, known: dict[str, Value]) -> Output:
        if (one.name, one.value.name) != (other.name, other.value.name):
            raise Unlike
        return replace(one, value=known[one.value.name], layout=None)

    def _op(self, one: Op, other: Op, known: dict[str, Value]) -> Op:
        if one.name != other.name or [v.name for v in one.operands] != [v.name for v in other.operands]:
            raise Unlike
        if one.attrs.keys() != other.attrs.keys() or len(one.results) != len(other.results):
            raise Unlike
        attrs = one.attrs
        if one.attrs != other.attrs:
            attrs = {key: self._attribute(value, other.attrs[key]) for key, value in one.attrs.items()}
        results = tuple([self._made(a, b, known) for a, b in zip(one.results, other.results, strict=True)])
        return Op(one.name, tuple([known[v.name] for v in one.operands]), results, attrs, one.location)

    def _made(self, one: Value, other: Value, known: dict[str, Value]) -> Value:
        if one.name != other.name:
            raise Unlike
        known[one.name] = one if one.type == other.type else Value(one.name, self._type(one.type, other.type))
        return known[one.name]

    def _type(self, one: Type, other: Type) -> Type:
        key = id(one), id(other)
        if key not in self.types:
            if not (isinstance(one, PlacedType) and isinstance(other, PlacedType)):
                raise Unlike
            if (one.dtype, one.devices, len(one.shape)) != (other.dtype, other.devices, len(other.shape)):
                raise Unlike
            shape = tuple(self._attribute(a, b) for a, b in zip(one.shape, other.shape, strict=True))
            self.types[key] = one, other, replace(one, shape=shape)
        return self.types[key][2]

    def _attribute(self, one: Any, other: Any) -> Any:
        if one == other:
            return one
        if type(one) is not type(other):
            raise Unlike
        if isinstance(one, PerRank):
            return PerRank(self._attribute(one.values, other.values))
        if isinstance(one, tuple):
            if len(one) != len(other):
                raise Unlike
            return tuple(self._attribute(a, b) for a, b in zip(one, other, strict=True))
        if isinstance(one, float):
            # By how much a mean is divided: no time depends on it.
            return one
        if isinstance(one, bool) or not isinstance(one, int):
            raise Unlike
        more, rest = divmod((other - one) * self.part, self.whole)
        if rest:
            raise Unlike
        return one + more


def _values(function: Function) -> Iterator[Value]:
    yield from (item.value for item in function.inputs)
    yield from (value for op in function.ops for value in op.results)


def _pairs(one: Sequence[Any], other: Sequence[Any]) -> zip[tuple[Any, Any]]:
    if len(one) != len(other):
        raise Unlike
    return zip(one, other, strict=True)
