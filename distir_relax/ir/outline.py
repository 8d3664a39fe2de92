"""Sets of ops taken out of a function: regions, each a call of a function, equal ones calls of the same.

Regions are equal when they have the same ops in the same order with the same attributes and types, on operands that
are the same to them.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.ir.location import inside
from distir_relax.ir.printer import print_attribute
from distir_relax.ir.program import CALL, Attribute, Function, Input, Op, Output, Value, fresh_name


@dataclass(frozen=True, slots=True)
class Region:
    """The ops of one region, by number.

    `path` is that of the module that they are, `kind` what it is called after; `attrs` are attributes of its call.
    """

    numbers: tuple[int, ...]
    path: str = ""
    kind: str = ""
    attrs: Mapping[str, Attribute] = field(default_factory=dict)


def take_out(
    main: Function, groups: Sequence[Sequence[Region]], names: set[str], roles: Mapping[str, str] | None = None
) -> tuple[Function, list[Function]] | None:
    """`main` with each region as a call, and the function of each group of equal regions; None where regions wait for
    each other.

    `names` are those of functions that there are. `roles` are those of values that are no inputs: what is made of
    weights alone is a weight to a function. What a function takes comes in the order of its first use, weights last.
    """
    users = users_of(main)
    known = {**(roles or {}), **{item.value.name: item.role for item in main.inputs}}
    functions, calls = _functions(main, [_taken_out(main, users, group) for group in groups], names, known)
    ordered = _ordered(main, calls)
    return None if ordered is None else (replace(main, ops=ordered), functions)


def form_of(main: Function, region: Region) -> object:
    """Equal for equal regions: ops with attributes and types, operands as numbers in the order of their first use."""
    places: dict[str, int] = {}
    rows = []
    for number in region.numbers:
        op = main.ops[number]
        operands = tuple((places.setdefault(v.name, len(places)), v.type) for v in op.operands)
        results = tuple((places.setdefault(v.name, len(places)), v.type) for v in op.results)
        rows.append((op.name, operands, results, attributes_of(op)))
    return tuple(rows)


def users_of(main: Function) -> dict[str, list[int]]:
    """The numbers of the ops that use each value, by its name."""
    users: dict[str, list[int]] = defaultdict(list)
    for number, op in enumerate(main.ops):
        for value in op.operands:
            users[value.name].append(number)
    return users


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal regions with what each takes and gives: values in the order of their first use, and of their ops."""

    regions: Sequence[Region]
    operands: Sequence[Sequence[Value]]
    results: Sequence[Sequence[Value]]


def _taken_out(main: Function, users: Mapping[str, list[int]], regions: Sequence[Region]) -> _Group:
    outputs = {o.value.name for o in main.outputs}
    operands, made, left = [], [], set()
    for region in regions:
        ops, mine = [main.ops[n] for n in region.numbers], set(region.numbers)
        results = [v for op in ops for v in op.results]
        own = {v.name for v in results}
        operands.append(list(dict.fromkeys(v for op in ops for v in op.operands if v.name not in own)))
        made.append(results)
        # What one of the regions gives to others, all do: so they are one function.
        left |= {
            i for i, v in enumerate(results) if v.name in outputs or any(u not in mine for u in users.get(v.name, ()))
        }
    return _Group(regions, operands, [[results[i] for i in sorted(left)] for results in made])


def _functions(
    main: Function, groups: Sequence[_Group], names: set[str], roles: Mapping[str, str]
) -> tuple[list[Function], dict[int, tuple[Region, Op]]]:
    """The function of each group, and the call that stands for each region, by the number of its first op."""
    functions = []
    calls: dict[int, tuple[Region, Op]] = {}
    for group in groups:
        first = group.regions[0]
        name = fresh_name(_function_name(first), names)
        kinds = [{roles.get(v.name, "input") for v in column} for column in zip(*group.operands, strict=True)]
        taken = [kind.pop() if len(kind) == 1 else "input" for kind in kinds]
        # What is computed first, then weights.
        order = sorted(range(len(taken)), key=lambda i: taken[i] != "input")
        arguments = [[operands[i] for i in order] for operands in group.operands]
        functions.append(_function(main, name, replace(group, operands=arguments), [taken[i] for i in order]))
        for region, operands, results in zip(group.regions, arguments, group.results, strict=True):
            place = _place(main.ops[region.numbers[0]].location, region.path)
            call = Op(CALL, tuple(operands), tuple(results), {"callee": name, **region.attrs}, place)
            calls[region.numbers[0]] = (region, call)
    return functions, calls


def _function(main: Function, name: str, group: _Group, roles: Sequence[str]) -> Function:
    """The function of a group, as its first region has it, with names and places of its own."""
    region = group.regions[0]
    taken: set[str] = set()
    values: dict[str, Value] = {}

    def own(value: Value, name: str = "") -> Value:
        values[value.name] = Value(fresh_name(name or _local_name(value.name, region.path), taken), value.type)
        return values[value.name]

    inputs = tuple(
        Input(own(v, "x" if role == "input" else ""), role) for v, role in zip(group.operands[0], roles, strict=True)
    )
    ops = []
    for number in region.numbers:
        op = main.ops[number]
        operands = tuple(values[v.name] for v in op.operands)
        results = tuple(map(own, op.results))
        ops.append(Op(op.name, operands, results, op.attrs, inside(region.path, op.location)))
    given = [values[v.name] for v in group.results[0]]
    return Function(name, inputs, tuple(ops), tuple(Output(v.name, v) for v in given))


def _local_name(name: str, path: str) -> str:
    """A value's name without the path of its region, and the number that told it from those of others."""
    prefix = re.sub(r"[^\w.]+", ".", path).strip(".") + "."
    if path and name.startswith(prefix):
        return name.removeprefix(prefix)
    return re.sub(r"(?<=[^\W\d])_\d+$", "", name)


def _function_name(region: Region) -> str:
    """``LlamaDecoderLayer`` is ``llama_decoder_layer``; without a class, ``/model/layers.0`` is ``layer``."""
    words = region.kind or next((w for w in reversed(re.split(r"[./]", region.path)) if w.isidentifier()), "block")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()
    name = re.sub(r"\W", "_", name)
    return name if region.kind or not name.endswith("s") else name[:-1] or "block"


def _place(location: str, path: str) -> str:
    """The place of a region, from that of one of its ops."""
    file, found, _ = location.partition(f":{path}/")
    return f"{file}:{path}" if path and found else path or location


def _ordered(main: Function, calls: Mapping[int, tuple[Region, Op]]) -> tuple[Op, ...] | None:
    """The ops of `main` with calls for regions, each after what it needs; None where regions need each other."""
    owner = {n: first for first, (region, _) in calls.items() for n in region.numbers}
    nodes = {n: op for n, op in enumerate(main.ops) if n not in owner}
    nodes |= {first: call for first, (_, call) in calls.items()}
    made = {v.name: n for n, op in nodes.items() for v in op.results}
    waits = {n: {made[v.name] for v in op.operands if v.name in made} for n, op in nodes.items()}
    after: dict[int, list[int]] = defaultdict(list)
    for number, needs in waits.items():
        for need in needs:
            after[need].append(number)
    ready = [n for n, needs in waits.items() if not needs]
    heapq.heapify(ready)
    ordered: list[Op] = []
    for number in _drain(ready, waits, after):
        ordered.append(nodes[number])
    return tuple(ordered) if len(ordered) == len(nodes) else None


def _drain(ready: list[int], waits: dict[int, set[int]], after: Mapping[int, list[int]]) -> Iterator[int]:
    """The numbers that are ready, lowest first, and those that become so."""
    while ready:
        number = heapq.heappop(ready)
        yield number
        for other in after.get(number, ()):
            waits[other].discard(number)
            if not waits[other]:
                heapq.heappush(ready, other)


def attributes_of(op: Op) -> str:
    """An op's attributes as text: 1 is not 1.0, 0.0 is not -0.0, and a NaN is a NaN."""
    return ", ".join(f"{key}={print_attribute(op.attrs[key])}" for key in sorted(op.attrs))
