"""The symbols of a program, and its specialization for values of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir.program import Function, Module, Op, Value
from distir_relax.ir.records import Record
from distir_relax.ir.types import DTensorType, PerRank, PlacedType, TensorType, per_rank
from distir_relax.layout import (
    Cut,
    Guard,
    Placement,
    Segment,
    Shard,
    Symbol,
    SymbolicSize,
    evaluate_size,
    is_always,
    size_of,
    symbols_of,
    symbols_within,
)


def module_symbols(module: Module) -> dict[str, Symbol]:
    """Return the symbols in the types, attributes and guards of a module, by name.

    Raises `VerificationError` if two have the same name and different bounds.
    """
    symbols: dict[str, Symbol] = {}
    for size in _sizes_of(module):
        for symbol in symbols_of(size):
            if symbols.setdefault(symbol.name, symbol) != symbol:
                raise VerificationError(f"expected one range of the size {symbol}, found two")
    return dict(sorted(symbols.items()))


def specialize(module: Module, values: Mapping[str, int]) -> Module:
    """Return a module with `values` of symbols by name; symbols without a value remain.

    Raises `DistIRError` for a value outside of a symbol's bounds, or one that violates a guard.
    """
    if not values:
        return module
    binding = _Binding(values)
    records = tuple(r for record in module.records if (r := binding.record(record)) is not None)
    return replace(module, functions=tuple(map(binding.function, module.functions)), records=records)


def specialize_layout(kind: DTensorType, values: Mapping[str, int]) -> DTensorType:
    """Return a type with `values` of symbols by name, also in its cuts."""
    layout: DTensorType = _Binding(values).item(kind)
    return layout


def at_sizes(module: Module, sizes: Mapping[str, int]) -> Module:
    """Return a module with these values of symbols by name, and the typical values of all others.

    Raises `DistIRError` for a name that is not one of its symbols, and as `specialize` does.
    """
    symbols = module_symbols(module)
    check_symbols(sizes, symbols)
    return specialize(module, {name: sizes.get(name, symbol.typical) for name, symbol in symbols.items()})


def with_typical(module: Module, sizes: Mapping[str, int]) -> Module:
    """Return a module whose symbols of these names have other typical values.

    Raises `DistIRError` for a name that is not one of its symbols, and for a value out of bounds.
    """
    symbols = module_symbols(module)
    check_symbols(sizes, symbols)
    for name, size in sizes.items():
        symbols[name].check(size)
    return specialize(module, {n: size_of(replace(symbols[n], typical=size)) for n, size in sizes.items()})


def check_symbols(sizes: Iterable[str], symbols: Collection[str]) -> None:
    """Raise `DistIRError` for a name that is not one of the symbols of a program."""
    for name in sizes:
        if name not in symbols:
            known = f"its sizes are {', '.join(symbols)}" if symbols else "all of its sizes are fixed"
            raise DistIRError(f"the program has no size {name!r}", hint=known)


def specialize_op(op: Op, values: Mapping[str, int]) -> Op:
    """Return an op with `values` of symbols by name."""
    return _Binding(values).op(op) if values else op


def typical_op(op: Op) -> Op:
    """Return an op with typical sizes instead of symbolic ones."""
    return specialize_op(op, {symbol.name: symbol.typical for symbol in op_symbols(op)})


@lru_cache(maxsize=1 << 14)
def typical_layout(layout: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return a layout with typical sizes instead of symbolic ones."""
    cuts = [p.cut for p in layout if isinstance(p, Shard) and p.cut is not None]
    symbols = symbols_within(tuple((s.repeat, s.sizes) for cut in cuts for s in cut.segments))
    converted: tuple[Placement, ...] = _Binding({symbol.name: symbol.typical for symbol in symbols}).item(layout)
    return converted


def op_symbols(op: Op) -> frozenset[Symbol]:
    """Return the symbols in the attributes, operands and results of an op."""
    items = [*op.attrs.values(), *(v.type for v in (*op.operands, *op.results))]
    return frozenset().union(*(symbols_of(size) for item in items for size in _within(item)))


class _Binding:
    """Substitution of values for symbols in types, attributes and records; equal items are converted once."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self.values = values
        self._sizes: dict[SymbolicSize, int] = {}
        self._types: dict[int, tuple[Any, Any]] = {}
        self._equal: dict[Any, Any] = {}

    def function(self, function: Function) -> Function:
        inputs = tuple(replace(i, value=self.value(i.value), layout=self.item(i.layout)) for i in function.inputs)
        outputs = tuple(replace(o, value=self.value(o.value), layout=self.item(o.layout)) for o in function.outputs)
        return replace(function, inputs=inputs, ops=tuple(map(self.op, function.ops)), outputs=outputs)

    def op(self, op: Op) -> Op:
        attrs = {key: self.item(value) for key, value in op.attrs.items()}
        operands, results = tuple(map(self.value, op.operands)), tuple(map(self.value, op.results))
        return replace(op, operands=operands, results=results, attrs=attrs)

    def value(self, value: Value) -> Value:
        # Values share types, which are kept so that their ids stay theirs.
        key = id(value.type)
        if key not in self._types:
            kind = self.item(value.type)
            # Analyses tell types by their id, so those of equal layers are made one.
            self._types[key] = value.type, self._equal.setdefault(kind, kind)
        kind = self._types[key][1]
        return value if kind is value.type else Value(value.name, kind)

    def size(self, size: SymbolicSize) -> int:
        if size not in self._sizes:
            self._sizes[size] = evaluate_size(size, self.values)
        return self._sizes[size]

    def record(self, record: Record) -> Record | None:
        """Convert a record; None for a guard that holds."""
        changed: Record = _changed(record, **{f.name: self.item(getattr(record, f.name)) for f in fields(record)})
        if isinstance(record, Guard) and isinstance(changed, Guard):
            holds = is_always(changed.first, changed.relation, changed.second)
            if holds == changed.holds:
                return None
            if holds is not None:
                raise guard_error(record, self.values)
        return changed

    def item(self, item: Any) -> Any:
        """Convert a type, an attribute, a placement or a record."""
        match item:
            case SymbolicSize():
                return self.size(item)
            case tuple():
                converted = tuple(map(self.item, item))
                return item if all(a is b for a, b in zip(item, converted, strict=True)) else converted
            case PerRank():
                return per_rank(self.item(item.values))
            case TensorType() | PlacedType():
                return _changed(item, shape=self.item(item.shape))
            case DTensorType():
                return _changed(item, shape=self.item(item.shape), placements=self.item(item.placements))
            case Shard(cut=Cut()):
                return _changed(item, cut=self.item(item.cut))
            case Cut():
                return _changed(item, segments=self.item(item.segments))
            case Segment():
                return _changed(item, repeat=self.item(item.repeat), sizes=self.item(item.sizes))
        return item


def guard_error(guard: Guard, values: Mapping[str, int]) -> DistIRError:
    """Return the error for values of symbols that violate a guard."""
    given = ", ".join(f"{s} = {values[s.name]}" for s in sorted(guard.symbols, key=str) if s.name in values)
    return DistIRError(
        f"expected {guard}, found {given}",
        guard.location,
        "the program was compiled for values for which this holds; compile with an example call for these sizes",
    )


def _changed(item: Any, **fields: Any) -> Any:
    is_same = all(getattr(item, name) is value for name, value in fields.items())
    return item if is_same else replace(item, **fields)


def _sizes_of(module: Module) -> Iterator[SymbolicSize]:
    seen: set[int] = set()
    for guard in module.guards:
        yield from _within((guard.first, guard.second))
    for function in module.functions:
        values = [item.value for item in function.inputs]
        for op in function.ops:
            values += op.results
            for attribute in op.attrs.values():
                yield from _within(attribute)
        for value in values:
            if id(value.type) not in seen:
                seen.add(id(value.type))
                yield from _within(value.type)


def _within(item: Any) -> Iterator[SymbolicSize]:
    match item:
        case SymbolicSize():
            yield item
        case tuple():
            for part in item:
                yield from _within(part)
        case PerRank():
            yield from _within(item.values)
        case TensorType() | PlacedType():
            yield from _within(item.shape)
        case DTensorType():
            yield from _within(item.shape)
