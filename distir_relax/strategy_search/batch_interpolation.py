"""Interpolate a program at a batch size between those of two others.

If each device has whole samples, a program is linear in the batch: dims, and attributes that refer to them. So only two
of many batch sizes are compiled. If those programs differ in more than numbers, the batch at which the program changes
is unknown, and nothing can be interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distir_relax.ir import Function, Input, Module, Op, Output, PerRank, PlacedType, Type, Value


class StructureMismatch(Exception):
    """Two programs differ in more than numbers, or one in between would have a part of a sample."""


def interpolate(low: tuple[int, Module], high: tuple[int, Module], batch: int) -> Module:
    """Return the module at `batch` from those at two others, each with its batch. Raises `StructureMismatch`."""
    (a, first), (b, second) = low, high
    if batch in (a, b):
        return first if batch == a else second
    return _Interpolation(batch - a, b - a).module(first, second)


def same_structure(first: Module, second: Module) -> bool:
    """Return whether two modules differ in numbers only, so that `interpolate` applies."""
    if first is second:
        return True
    try:
        _Interpolation(1, 1).module(first, second)
    except StructureMismatch:
        return False
    return True


def differ_by_rank(first: Module, second: Module) -> bool:
    """Return whether rank-dependent sizes differ between modules of the same structure."""
    if first is second:
        return False
    pairs = zip(first.functions, second.functions, strict=True)
    values = (pair for a, b in pairs for pair in zip(_values(a), _values(b), strict=True))
    seen = {(id(a.type), id(b.type)): (a.placed.shape, b.placed.shape) for a, b in values}
    sizes = (pair for a, b in seen.values() for pair in zip(a, b, strict=True))
    return any(a != b and (isinstance(a, PerRank) or isinstance(b, PerRank)) for a, b in sizes)


def with_shared_types(module: Module) -> Module:
    """Return the module with one object per distinct type, since caches identify types by `id`."""
    types: dict[Type, Type] = {}

    def share_types(function: Function) -> Function:
        values: dict[str, Value] = {}

        def share(value: Value) -> Value:
            type_ = types.setdefault(value.type, value.type)
            values[value.name] = value if type_ is value.type else Value(value.name, type_)
            return values[value.name]

        inputs = tuple([replace(item, value=share(item.value)) for item in function.inputs])
        ops = []
        for op in function.ops:
            operands = tuple([values[v.name] for v in op.operands])
            ops.append(Op(op.name, operands, tuple(map(share, op.results)), op.attrs, op.location))
        outputs = tuple([replace(output, value=values[output.value.name]) for output in function.outputs])
        return Function(function.name, inputs, tuple(ops), outputs)

    return replace(module, functions=tuple(map(share_types, module.functions)))


@dataclass(slots=True)
class _Interpolation:
    offset: int
    distance: int
    types: dict[tuple[int, int], tuple[Type, Type, Type]] = field(default_factory=dict)
    """Interpolated types, by the ids of both ends, which they keep alive; equal ones are one object."""

    def module(self, first: Module, second: Module) -> Module:
        if len(first.functions) != len(second.functions) or first.meshes != second.meshes:
            raise StructureMismatch
        pairs = zip(first.functions, second.functions, strict=True)
        return replace(first, functions=tuple(self._function(a, b) for a, b in pairs))

    def _function(self, first: Function, second: Function) -> Function:
        if first == second:
            return first
        if (first.name, len(first.ops)) != (second.name, len(second.ops)):
            raise StructureMismatch
        values: dict[str, Value] = {}
        inputs = tuple(self._input(a, b, values) for a, b in _pairs(first.inputs, second.inputs))
        ops = tuple(self._op(a, b, values) for a, b in _pairs(first.ops, second.ops))
        outputs = tuple(self._output(a, b, values) for a, b in _pairs(first.outputs, second.outputs))
        return Function(first.name, inputs, ops, outputs)

    def _input(self, first: Input, second: Input, values: dict[str, Value]) -> Input:
        if first.role != second.role:
            raise StructureMismatch
        value = self._value(first.value, second.value, values)
        # Most inputs are weights, which do not depend on the batch.
        return first if value is first.value and first.layout is None else replace(first, value=value, layout=None)

    def _output(self, first: Output, second: Output, values: dict[str, Value]) -> Output:
        if (first.name, first.value.name) != (second.name, second.value.name):
            raise StructureMismatch
        return replace(first, value=values[first.value.name], layout=None)

    def _op(self, first: Op, second: Op, values: dict[str, Value]) -> Op:
        if first.name != second.name or [v.name for v in first.operands] != [v.name for v in second.operands]:
            raise StructureMismatch
        if first.attrs.keys() != second.attrs.keys() or len(first.results) != len(second.results):
            raise StructureMismatch
        attrs = first.attrs
        if first.attrs != second.attrs:
            attrs = {key: self._attribute(value, second.attrs[key]) for key, value in first.attrs.items()}
        results = tuple([self._value(a, b, values) for a, b in zip(first.results, second.results, strict=True)])
        return Op(first.name, tuple([values[v.name] for v in first.operands]), results, attrs, first.location)

    def _value(self, a: Value, b: Value, values: dict[str, Value]) -> Value:
        if a.name != b.name:
            raise StructureMismatch
        values[a.name] = a if a.type == b.type else Value(a.name, self._type(a.type, b.type))
        return values[a.name]

    def _type(self, first: Type, second: Type) -> Type:
        key = id(first), id(second)
        if key not in self.types:
            if not (isinstance(first, PlacedType) and isinstance(second, PlacedType)):
                raise StructureMismatch
            if (first.dtype, first.devices, len(first.shape)) != (second.dtype, second.devices, len(second.shape)):
                raise StructureMismatch
            shape = tuple(self._attribute(a, b) for a, b in zip(first.shape, second.shape, strict=True))
            self.types[key] = first, second, replace(first, shape=shape)
        return self.types[key][2]

    def _attribute(self, first: Any, second: Any) -> Any:
        if first == second:
            return first
        if type(first) is not type(second):
            raise StructureMismatch
        if isinstance(first, PerRank):
            return PerRank(self._attribute(first.values, second.values))
        if isinstance(first, tuple):
            if len(first) != len(second):
                raise StructureMismatch
            return tuple(self._attribute(a, b) for a, b in zip(first, second, strict=True))
        if isinstance(first, float):
            # The divisor of a mean, on which no time depends.
            return first
        if isinstance(first, bool) or not isinstance(first, int):
            raise StructureMismatch
        difference, remainder = divmod((second - first) * self.offset, self.distance)
        if remainder:
            raise StructureMismatch
        return first + difference


def _values(function: Function) -> Iterator[Value]:
    yield from (item.value for item in function.inputs)
    yield from (value for op in function.ops for value in op.results)


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> zip[tuple[Any, Any]]:
    if len(first) != len(second):
        raise StructureMismatch
    return zip(first, second, strict=True)
