"""Which ops of a function may write their result into the memory of an operand that nothing reads afterwards."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distir_relax.ir import Function, Op, PerRank, PlacedType, TensorType, Value
from distir_relax.layout import Collective
from distir_relax.ops.table.entry import OpDef, Trait
from distir_relax.ops.table.helpers import contiguous
from distir_relax.ops.table.kernel import Overwriting
from distir_relax.ops.table.table import lookup


def reused_operands(function: Function, kept: Collection[str] = (), reordered: Collection[str] = ()) -> dict[str, int]:
    """Return the operand that each op overwrites, by the name of the op's result (`Overwriting`).

    Of a function of the distributed, the ranked or the executable stage. `kept` values are not overwritten, nor are
    inputs, which a caller may need, and what other ranks get, which they may read later. Inputs that are `reordered`
    are not in memory in the order of their dims.
    """
    storage = _storage(function)
    visible = {
        storage[value.name]
        for op in function.ops
        if not op.callee and not _KEEP_VISIBLE.isdisjoint(lookup(op.name, op.location).traits)
        for value in op.operands
    }
    last = {storage[value.name]: number for number, op in enumerate(function.ops) for value in op.operands}
    kept = {storage[name] for name in (*kept, *(output.value.name for output in function.outputs)) if name in storage}
    plain = plain_values(function, reordered)
    new: dict[str, int | tuple[int, ...]] = {}
    """The number of elements of each storage that is an op's own, and may be overwritten."""
    reused: dict[str, int] = {}
    for number, op in enumerate(function.ops):
        if op.callee:
            continue
        entry = lookup(op.name, op.location)
        if (kernel := entry.kernel(Overwriting)) is not None:
            names = [storage[value.name] for value in op.operands]
            free = (
                i
                for i, name in enumerate(names)
                if last[name] == number
                and _fits(op, i, kernel, new.get(name))
                and _is_alone(op, i, entry, names)
                and (_decides_order(op, i) or {op.operands[0].name, op.operands[i].name} <= plain)
            )
            if (operand := next(free, None)) is not None:
                reused[op.results[0].name] = operand
        if _is_new(op, entry):
            own = (value for value in op.results if storage[value.name] == value.name)
            new.update((v.name, _elements(v)) for v in own if v.name not in visible and v.name not in kept)
    return reused


_KEEP_VISIBLE = {
    *(Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, Trait.TRANSFER, Trait.STARTS),
    *(Trait.MAY_SHARE, Trait.KEEPS, Trait.SHAPE),
}
"""Traits of ops whose operands somebody else may read later, through another name."""


def _storage(function: Function) -> dict[str, str]:
    """Return the value whose storage each value is in: itself, or the one that it is a view of."""
    storage = {item.value.name: item.value.name for item in function.inputs}
    for op in function.ops:
        shares = not op.callee and bool(op.operands) and _shares_storage(op)
        for value in op.results:
            storage[value.name] = storage[op.operands[0].name] if shares else value.name
    return storage


def plain_values(function: Function, reordered: Collection[str] = ()) -> set[str]:
    """Return the values whose elements are in memory in the order of their dims, for all that is known here.

    Inputs are, but those that are `reordered`.
    """
    plain = {item.value.name for item in function.inputs} - set(reordered)
    for op in function.ops:
        entry = None if op.callee else lookup(op.name, op.location)
        keeps = entry is not None and (entry.shares_storage or entry.keeps_order)
        if not keeps or (all(v.name in plain for v in op.operands) and _is_whole(op)):
            plain.update(v.name for v in op.results)
    return plain


def _is_whole(op: Op) -> bool:
    """Return whether an op, if it gives a view, gives one of all elements in their order."""
    rule = lookup(op.name, op.location).code.strides
    if rule is None:
        return True
    shape, *results = (_shape(v) for v in (op.operands[0], *op.results))
    return all(rule(shape, contiguous(shape), op.attrs, new) == contiguous(new) for new in results)


def _decides_order(op: Op, number: int) -> bool:
    """Return whether torch lays the result out in memory as this operand: the first one of the result's shape."""
    return all(v.type != op.results[0].type for v in op.operands[:number])


def _shares_storage(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    return entry.shares_storage or entry.is_identity(op.operands, op.results)


def _fits(op: Op, number: int, kernel: Overwriting, elements: int | tuple[int, ...] | None) -> bool:
    """Return whether an operand in a storage of so many elements has room for the result, element by element.

    A view with another number is a part of the storage, or repeats some of it.
    """
    operand = op.operands[number]
    if kernel.operands is not None and number not in kernel.operands:
        return False
    return elements is not None and operand.type == op.results[0].type and _elements(operand) == elements


def _is_alone(op: Op, number: int, entry: OpDef, storage: Sequence[str]) -> bool:
    """Return whether no other operand is in the storage of one; `storage` has that of each."""
    same = [v.name for v, name in zip(op.operands, storage, strict=True) if name == storage[number]]
    # An elementwise op reads an element of the same operand before it writes it.
    return len(same) == 1 or (len(set(same)) == 1 and Trait.POINTWISE in entry.traits)


def _is_new(op: Op, entry: OpDef) -> bool:
    """Return whether the results of an op are in memory of their own: a gather in a group of one may be its operand."""
    is_sum = entry.cost.collective is Collective.ALL_REDUCE
    return is_sum or ("stream" not in op.attrs and _KEEP_VISIBLE.isdisjoint(entry.traits))


def _shape(value: Value) -> tuple[int, ...]:
    """Return the shape of a value on its first device, typically if it is symbolic."""
    type_ = value.type.local(0) if isinstance(value.type, PlacedType) else value.tensor
    return type_.typical.shape


def _elements(value: Value) -> int | tuple[int, ...]:
    """Return the number of elements of a value, that of each device if they differ."""
    type_ = value.type
    if isinstance(type_, PlacedType):
        if not any(isinstance(size, PerRank) for size in type_.shape):
            return type_.local(0).elements
        counts = tuple(type_.local(i).elements for i in range(len(type_.devices)))
        return counts if len(set(counts)) > 1 else counts[0]
    assert isinstance(type_, TensorType), "the distributed or the ranked stage"
    return type_.elements
