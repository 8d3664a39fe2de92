"""Patterns of fused ops: parsing and matching.

``add(linear(0, 1), 2)`` is an `add` of a `linear` of the fused op's operands 0 and 1, and of its operand 2. A number
with a decimal point matches a scalar constant close to it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass

from distir_relax.ir import Op, Value
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.table import TABLE, Table, lookup


@dataclass(frozen=True, slots=True)
class Pattern:
    """A call of op `name` on arguments: patterns, operand numbers, or scalar constants."""

    name: str
    arguments: tuple[Pattern | int | float, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """`operands` of the fused op, and the `inner` ops that it replaces besides the last one."""

    operands: tuple[Value, ...]
    inner: tuple[Op, ...]


def fusions() -> tuple[tuple[str, Pattern], ...]:
    """Return every fused op of the table with its pattern, largest pattern first."""
    return TABLE.derived(_fusions)


def _fusions(table: Table) -> tuple[tuple[str, Pattern], ...]:
    fusions: list[tuple[str, Pattern]] = []
    for entry in table.entries():
        pattern = _parse(ast.parse(entry.code.pattern, mode="eval").body) if entry.code.pattern else None
        if isinstance(pattern, Pattern):
            fusions.append((entry.name, pattern))
    return tuple(sorted(fusions, key=lambda item: -_size(item[1])))


def match(pattern: Pattern, op: Op, producers: Mapping[str, Op], single: Mapping[str, bool]) -> Match | None:
    """Match `pattern` with `op` as its last op; return None if it does not match.

    `producers` maps a value to the op that defines it; `single` tells whether a value has one use and can be removed.
    """
    for bound, inner in _matches(pattern, op, producers, single):
        if all(len(values) == 1 for values in bound.values()) and set(bound) == set(range(len(bound))):
            return Match(tuple(next(iter(bound[i])) for i in range(len(bound))), tuple(inner))
    return None


_Bound = dict[int, frozenset[Value]]


def _matches(
    pattern: Pattern, op: Op, producers: Mapping[str, Op], single: Mapping[str, bool]
) -> list[tuple[_Bound, list[Op]]]:
    if op.name != pattern.name or len(op.operands) != len(pattern.arguments):
        return []
    orders = [op.operands]
    if Trait.COMMUTATIVE in lookup(op.name).traits:
        orders.append(tuple(reversed(op.operands)))
    matches: list[tuple[_Bound, list[Op]]] = []
    for operands in orders:
        partial: list[tuple[_Bound, list[Op]]] = [({}, [])]
        for argument, value in zip(pattern.arguments, operands, strict=True):
            options = _match_value(argument, value, producers, single)
            partial = [(_join(b, c), [*i, *j]) for b, i in partial for c, j in options]
        matches += [(b, i) for b, i in partial if all(len(v) == 1 for v in b.values())]
    return matches


def _match_value(
    argument: Pattern | int | float, value: Value, producers: Mapping[str, Op], single: Mapping[str, bool]
) -> list[tuple[_Bound, list[Op]]]:
    producer = producers.get(value.name)
    if isinstance(argument, int):
        return [({argument: frozenset([value])}, [])]
    if isinstance(argument, float):
        number = producer.attrs.get("value") if producer and Trait.SCALAR in lookup(producer.name).traits else None
        is_close = isinstance(number, (int, float)) and math.isclose(number, argument, rel_tol=1e-6)
        return [({}, [])] if is_close else []
    if producer is None or not single.get(value.name, False):
        return []
    return [(bound, [*inner, producer]) for bound, inner in _matches(argument, producer, producers, single)]


def _join(a: _Bound, b: _Bound) -> _Bound:
    return {key: a.get(key, frozenset()) | b.get(key, frozenset()) for key in a.keys() | b.keys()}


def _parse(node: ast.expr) -> Pattern | int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Call):
        return Pattern(ast.unparse(node.func), tuple(_parse(a) for a in node.args))
    raise ValueError(f"not a pattern: {ast.unparse(node)}")


def _size(pattern: Pattern | int | float) -> int:
    return 1 + sum(map(_size, pattern.arguments)) if isinstance(pattern, Pattern) else 0
