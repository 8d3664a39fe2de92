"""Ops of a program that several requests can share, because they treat every position alike.

A program that continues one sequence has a row per new position in most of its values. An op that is parallel along
these rows computes the rows of several requests at once, joined along that dim. Every other op, such as attention over
the positions of one sequence or a mask, runs for each request. Nothing is assumed of an op that is not proven to be
parallel by its factor rule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from distir_relax.ir import Attribute, Function, Op, PlacedType, TensorType, Value
from distir_relax.ir.symbols import op_symbols
from distir_relax.layout import size_of, symbols_within
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table.rule import PARALLEL, Dims
from distir_relax.ops.table.spmd_inference import device_kinds, local_attrs

ROWS = ("new", "last")
"""The sizes of dims that have one element per position of a call."""

Rows: TypeAlias = tuple[int, str]
"""The dim of a value that has the rows, and the name of its size."""


@dataclass(frozen=True)
class RowOps:
    """The values of a program by their dependence on requests.

    `shared` values are the same for all requests, `joined` ones have the rows of all of them; all others belong to one
    request. `once` are the first results of the ops that run once for all requests.
    """

    shared: frozenset[str]
    joined: Mapping[str, Rows]
    once: frozenset[str]


def row_ops(function: Function, fixed: Collection[str]) -> RowOps:
    """Find the values that requests share. `fixed` are the weights, and values that depend on nothing else."""
    shared = set(fixed)
    joined: dict[str, Rows] = {}
    once = set[str]()
    # Layers repeat each other's ops.
    parallel: dict[object, bool] = {}
    for item in function.inputs:
        if item.role == "input" and (rows := rows_of(item.value.local)):
            joined[item.value.name] = rows
    for op in function.ops:
        names = [v.name for v in op.results]
        if all(v.name in shared for v in op.operands) and not op_symbols(op):
            shared.update(names)
        elif _remembered(op, shared, parallel):
            joined |= {v.name: rows for v in op.results if (rows := rows_of(v.local))}
        else:
            continue
        once.add(names[0])
    return RowOps(frozenset(shared), joined, frozenset(once))


@lru_cache(maxsize=1 << 12)
def rows_of(kind: TensorType) -> Rows | None:
    """Return the only dim of a type that depends on a call's positions, if its size is their number."""
    along = [(dim, size) for dim, size in enumerate(kind.shape) if symbols_within((size,))]
    if len(along) != 1:
        return None
    (dim, size), = along  # fmt: skip
    symbols = {symbol.name: symbol for symbol in symbols_within((size,))}
    return next(((dim, name) for name in ROWS if name in symbols and size == size_of(symbols[name])), None)


def _remembered(op: Op, shared: Collection[str], parallel: dict[object, bool]) -> bool:
    """Return `_is_parallel`, as for an earlier op that differs in names only."""
    operands = tuple((v.type, v.name in shared) for v in op.operands)
    key = (op.name, operands, tuple(v.type for v in op.results), tuple(op.attrs.items()))
    if key not in parallel:
        parallel[key] = all(_is_parallel(local, shared) for local in _on_devices(op))
    return parallel[key]


def _on_devices(op: Op) -> list[Op]:
    """Return an op as the devices that run it have it, once for equal ones."""
    if op.callee or not isinstance(op.results[0].type, PlacedType):
        return [op]
    devices, kinds = op.results[0].placed.devices, [v.placed for v in op.operands]
    distinct = device_kinds(op.name, kinds, op.attrs, devices, [v.placed for v in op.results])

    def local(value: Value, index: int) -> Value:
        kind = value.placed
        place = kind.devices.index(devices[index]) if devices[index] in kind.devices else index
        return Value(value.name, kind.local(place))

    return [
        replace(
            op, operands=tuple(local(v, index) for v in op.operands),
            results=tuple(local(v, index) for v in op.results), attrs=local_attrs(op.attrs, index),
        )
        for index in distinct.firsts
    ]  # fmt: skip


def _is_parallel(op: Op, shared: Collection[str]) -> bool:
    """Return whether an op computes each row of its results from the same row of its operands that are not shared."""
    entry = lookup(op.name, op.location)
    values = [v for v in op.operands if v.name not in shared]
    found = {rows_of(v.tensor) for v in (*values, *op.results)}
    if Trait.ON_COMMUNICATOR in entry.traits:
        # It moves or reduces whole shards. A received or sent value stands for itself.
        kinds = {rows_of(v.tensor) for v in (*op.operands, *op.results) if symbols_within(v.tensor.shape)}
        return len(kinds) == 1 and None not in kinds and len(op.operands) <= 1 and _has_row_attrs(op)
    if not values or None in found or len({rows[1] for rows in found if rows}) != 1 or not _has_row_attrs(op):
        return False
    try:
        rule = entry.rule_for([v.tensor for v in op.operands], op.attrs, [v.tensor for v in op.results])
    except (NotImplementedError, ValueError):  # a rank's program may have operands that no rule is for
        return False
    variant = entry.split.positional | entry.split.expand.keys()
    windowed = {w.result_dim for w in rule.windows}
    factors = set[int]()
    for value, dims in zip(op.results, rule.results, strict=True):
        dim = _dim(value)
        if len(dims[dim]) != 1 or dim in windowed:
            return False
        factors |= set(dims[dim])
    for value, dims in zip(op.operands, rule.operands, strict=True):
        if value.name not in shared and set(dims[_dim(value)]) != factors:
            return False
    (number,) = factors if len(factors) == 1 else (-1,)
    if number < 0 or rule.factors[number].kind != PARALLEL or rule.factors[number].name in variant:
        return False
    return _is_elsewhere(op, rule.operands, number, shared)


def _is_elsewhere(op: Op, operands: tuple[Dims, ...], factor: int, shared: Collection[str]) -> bool:
    """Return whether no shared operand has the rows."""
    pairs = zip(op.operands, operands, strict=True)
    return not any(factor in dim for value, dims in pairs if value.name in shared for dim in dims)


def _has_row_attrs(op: Op) -> bool:
    """Return whether the attributes depend on a call's sizes only as the shape of the result."""
    shapes = {v.tensor.shape for v in op.results}
    return all(value in shapes or not _symbols(value) for value in op.attrs.values())


def _symbols(value: Attribute) -> bool:
    return bool(symbols_within((value,)))


def _dim(value: Value) -> int:
    rows = rows_of(value.tensor)
    assert rows is not None
    return rows[0]
