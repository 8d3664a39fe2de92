"""Patterns of fused ops: parsing and matching.

``add(linear(0, 1), 2)`` is an `add` of a `linear` of the fused op's operands 0 and 1, and of its operand 2. A number
with a decimal point matches a scalar constant close to it. A keyword is an attribute of the op that must have this
value: ``mean(0, keepdims=True)``. A name captures the value of a scalar constant or of an attribute, or an element of
one: ``concat(0, 1, axis=axis)``, ``strided_slice(0, begin=(half,))``. It is the same value wherever it occurs.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from distir_relax.ir import Attribute, Op, Value
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.kernel import Attrs
from distir_relax.ops.table.table import TABLE, Table, lookup


@dataclass(frozen=True, slots=True)
class Capture:
    """The value of a scalar constant or an attribute, under a name."""

    name: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """A call of op `name` on arguments, with attributes: patterns, operand numbers, constants, or captures of those."""

    name: str
    arguments: tuple[Pattern | Capture | int | float, ...]
    attrs: tuple[tuple[str, Template], ...] = ()


Template: TypeAlias = "Capture | Attribute | tuple[Template, ...]"
"""An attribute, in which captures stand for values."""


@dataclass(frozen=True, slots=True)
class Match:
    """The fused op's `operands` and captured `attrs`, and the `inner` ops that it replaces besides the last one."""

    operands: tuple[Value, ...]
    inner: tuple[Op, ...]
    attrs: Attrs


Bound = dict[int | str, Any]
"""The values of operands by number, and captured attributes by name."""


def fusions() -> tuple[tuple[str, Pattern], ...]:
    """Return the patterns of all fused ops of the table, each with the op's name, largest pattern first."""
    return TABLE.derived(_fusions)


def _fusions(table: Table) -> tuple[tuple[str, Pattern], ...]:
    fusions = [(entry.name, _parse(text)) for entry in table.entries() for text in entry.code.patterns]
    return tuple(sorted(fusions, key=lambda item: -_size(item[1])))


def match(pattern: Pattern, op: Op, producers: Mapping[str, Op], uses: Mapping[str, int]) -> Match | None:
    """Match `pattern` with `op` as its last op; return None if it does not match.

    `producers` maps a value to the op that defines it; `uses` counts the uses of each value. Only the matched ops use
    the results of those that are replaced.
    """
    for bound, found in _matches(pattern, op, producers):
        inner = tuple({o.results[0].name: o for o in found}.values())
        within = Counter(v.name for o in (*inner, op) for v in o.operands)
        if all(uses[v.name] == within[v.name] for o in inner for v in o.results):
            attrs = {key: value for key, value in bound.items() if isinstance(key, str)}
            return Match(tuple(bound[i] for i in range(len(bound) - len(attrs))), inner, attrs)
    return None


def match_attribute(template: Template, value: Attribute) -> Bound | None:
    """Return what a template captures of an attribute, None if it does not match."""
    if isinstance(template, Capture):
        return {template.name: value}
    if not isinstance(template, tuple):
        return {} if template == value else None
    if not isinstance(value, tuple) or len(value) != len(template):
        return None
    return join_bounds(match_attribute(part, element) for part, element in zip(template, value, strict=True))


def join_bounds(found: Iterable[Bound | None]) -> Bound | None:
    """Return all together, None if one is None or two differ in a common key."""
    bound: Bound | None = {}
    for each in found:
        bound = None if bound is None or each is None else _join(bound, each)
    return bound


def _matches(pattern: Pattern, op: Op, producers: Mapping[str, Op]) -> list[tuple[Bound, list[Op]]]:
    if op.name != pattern.name or len(op.operands) != len(pattern.arguments):
        return []
    captured = _match_attributes(pattern, op)
    if captured is None:
        return []
    orders = [op.operands]
    if Trait.COMMUTATIVE in lookup(op.name).traits:
        orders.append(tuple(reversed(op.operands)))
    matches: list[tuple[Bound, list[Op]]] = []
    for operands in orders:
        partial: list[tuple[Bound, list[Op]]] = [(captured, [])]
        for argument, value in zip(pattern.arguments, operands, strict=True):
            options = _match_value(argument, value, producers)
            partial = [(both, [*i, *j]) for b, i in partial for c, j in options if (both := _join(b, c)) is not None]
        matches += partial
    return matches


def _match_value(
    argument: Pattern | Capture | int | float, value: Value, producers: Mapping[str, Op]
) -> list[tuple[Bound, list[Op]]]:
    producer = producers.get(value.name)
    if isinstance(argument, int):
        return [({argument: value}, [])]
    if isinstance(argument, Pattern):
        found = [] if producer is None else _matches(argument, producer, producers)
        return [(bound, [*inner, producer]) for bound, inner in found if producer]
    number = producer.attrs.get("value") if producer and Trait.SCALAR in lookup(producer.name).traits else None
    if not isinstance(number, (int, float)):
        return []
    if isinstance(argument, Capture):
        return [({argument.name: number}, [])]
    return [({}, [])] if math.isclose(number, argument, rel_tol=1e-6) else []


def _match_attributes(pattern: Pattern, op: Op) -> Bound | None:
    return join_bounds(match_attribute(template, op.attrs.get(key)) for key, template in pattern.attrs)


def _join(a: Bound, b: Bound) -> Bound | None:
    """Return both, None if they differ in a common key."""
    return None if any(a[key] != b[key] for key in a.keys() & b.keys()) else a | b


def _parse(text: str) -> Pattern:
    pattern = _parse_argument(ast.parse(text, mode="eval").body)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"expected a pattern with an op, found {text}")
    return pattern


def _parse_argument(node: ast.expr) -> Pattern | Capture | int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name):
        return Capture(node.id)
    if isinstance(node, ast.Call):
        attrs = tuple((keyword.arg or "", _parse_template(keyword.value)) for keyword in node.keywords)
        return Pattern(ast.unparse(node.func), tuple(map(_parse_argument, node.args)), attrs)
    raise ValueError(f"not a pattern: {ast.unparse(node)}")


def _parse_template(node: ast.expr) -> Template:
    if isinstance(node, ast.Name):
        return Capture(node.id)
    if isinstance(node, ast.Tuple):
        return tuple(map(_parse_template, node.elts))
    value: Attribute = ast.literal_eval(node)
    return value


def _size(pattern: Pattern | Capture | float) -> int:
    return 1 + sum(map(_size, pattern.arguments)) if isinstance(pattern, Pattern) else 0
