"""Outlining: replace regions of a function with calls of new functions, one function for equal regions.

Regions are equal if they have the same ops in the same order, with the same attributes and types and corresponding
operands.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.ir.location import relative_location
from distir_relax.ir.printer import print_attribute
from distir_relax.ir.program import CALL, Attribute, Function, Input, Op, Output, Value, fresh_name


@dataclass(frozen=True, slots=True)
class Region:
    """The ops of one region, by index.

    `path` is that of the module that they form, `kind` the base name of the function; `attrs` are attributes of its
    call.
    """

    numbers: tuple[int, ...]
    path: str = ""
    kind: str = ""
    attrs: Mapping[str, Attribute] = field(default_factory=dict)


def outline_regions(
    main: Function, groups: Sequence[Sequence[Region]], names: set[str], roles: Mapping[str, str] | None = None
) -> tuple[Function, list[Function]] | None:
    """Replace each region of `main` with a call; return `main` and the function of each group of equal regions.

    Returns None if regions depend on each other cyclically. `names` are those of existing functions. `roles` are those
    of values that are not inputs: a value computed only from weights is a weight input of the function. A function's
    inputs are in the order of their first use, weights last.
    """
    users = op_users(main)
    all_roles = {**(roles or {}), **{item.value.name: item.role for item in main.inputs}}
    functions, calls = _make_functions(main, [_make_group(main, users, group) for group in groups], names, all_roles)
    ordered = _sort_ops(main, calls)
    return None if ordered is None else (replace(main, ops=ordered), functions)


def region_key(main: Function, region: Region) -> object:
    """Return a key that is equal for equal regions: ops with attributes and types, operands numbered by first use."""
    places: dict[str, int] = {}
    rows = []
    for number in region.numbers:
        op = main.ops[number]
        operands = tuple((places.setdefault(v.name, len(places)), v.type) for v in op.operands)
        results = tuple((places.setdefault(v.name, len(places)), v.type) for v in op.results)
        rows.append((op.name, operands, results, print_attributes(op)))
    return tuple(rows)


def op_users(main: Function) -> dict[str, list[int]]:
    """Return the indices of the ops that use each value, by its name."""
    users: dict[str, list[int]] = defaultdict(list)
    for number, op in enumerate(main.ops):
        for value in op.operands:
            users[value.name].append(number)
    return users


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal regions with their operands, in the order of first use, and their results, in the order of definition."""

    regions: Sequence[Region]
    operands: Sequence[Sequence[Value]]
    results: Sequence[Sequence[Value]]


def _make_group(main: Function, users: Mapping[str, list[int]], regions: Sequence[Region]) -> _Group:
    outputs = {o.value.name for o in main.outputs}
    inputs, defined_values, escaping = [], [], set()
    for region in regions:
        ops, ids = [main.ops[n] for n in region.numbers], set(region.numbers)
        results = [v for op in ops for v in op.results]
        defined = {v.name for v in results}
        inputs.append(list(dict.fromkeys(v for op in ops for v in op.operands if v.name not in defined)))
        defined_values.append(results)
        # A value that one region defines and others use is a result of all regions: they share one function.
        escaping |= {
            i for i, v in enumerate(results) if v.name in outputs or any(u not in ids for u in users.get(v.name, ()))
        }
    return _Group(regions, inputs, [[results[i] for i in sorted(escaping)] for results in defined_values])


def _make_functions(
    main: Function, groups: Sequence[_Group], names: set[str], roles: Mapping[str, str]
) -> tuple[list[Function], dict[int, tuple[Region, Op]]]:
    """Return the function of each group, and the call that replaces each region, by the index of its first op."""
    functions = []
    calls: dict[int, tuple[Region, Op]] = {}
    for group in groups:
        first = group.regions[0]
        name = fresh_name(_function_name(first), names)
        kinds = [{roles.get(v.name, "input") for v in column} for column in zip(*group.operands, strict=True)]
        input_roles = [kind.pop() if len(kind) == 1 else "input" for kind in kinds]
        # Activations first, then weights.
        order = sorted(range(len(input_roles)), key=lambda i: input_roles[i] != "input")
        arguments = [[operands[i] for i in order] for operands in group.operands]
        functions.append(_build(main, name, replace(group, operands=arguments), [input_roles[i] for i in order]))
        for region, operands, results in zip(group.regions, arguments, group.results, strict=True):
            place = _region_location(main.ops[region.numbers[0]].location, region.path)
            call = Op(CALL, tuple(operands), tuple(results), {"callee": name, **region.attrs}, place)
            calls[region.numbers[0]] = (region, call)
    return functions, calls


def _build(main: Function, name: str, group: _Group, roles: Sequence[str]) -> Function:
    """Build the function of a group from its first region, with local names and locations."""
    region = group.regions[0]
    names: set[str] = set()
    values: dict[str, Value] = {}

    def local(value: Value, name: str = "") -> Value:
        values[value.name] = Value(fresh_name(name or _local_name(value.name, region.path), names), value.type)
        return values[value.name]

    inputs = tuple(
        Input(local(v, "x" if role == "input" else ""), role) for v, role in zip(group.operands[0], roles, strict=True)
    )
    ops = []
    for number in region.numbers:
        op = main.ops[number]
        operands = tuple(values[v.name] for v in op.operands)
        results = tuple(map(local, op.results))
        ops.append(Op(op.name, operands, results, op.attrs, relative_location(region.path, op.location)))
    outputs = [values[v.name] for v in group.results[0]]
    return Function(name, inputs, tuple(ops), tuple(Output(v.name, v) for v in outputs))


def _local_name(name: str, path: str) -> str:
    """Return a value's name without the path of its region and without a deduplicating number."""
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


def _region_location(location: str, path: str) -> str:
    """Return the location of a region, given that of one of its ops."""
    file, separator, _ = location.partition(f":{path}/")
    return f"{file}:{path}" if path and separator else path or location


def _sort_ops(main: Function, calls: Mapping[int, tuple[Region, Op]]) -> tuple[Op, ...] | None:
    """Topologically sort the ops of `main` with calls for regions; None if there is a cycle."""
    owner = {n: first for first, (region, _) in calls.items() for n in region.numbers}
    nodes = {n: op for n, op in enumerate(main.ops) if n not in owner}
    nodes |= {first: call for first, (_, call) in calls.items()}
    producer_of = {v.name: n for n, op in nodes.items() for v in op.results}
    dependencies = {n: {producer_of[v.name] for v in op.operands if v.name in producer_of} for n, op in nodes.items()}
    dependents: dict[int, list[int]] = defaultdict(list)
    for number, needs in dependencies.items():
        for need in needs:
            dependents[need].append(number)
    ready = [n for n, needs in dependencies.items() if not needs]
    heapq.heapify(ready)
    ordered: list[Op] = []
    for number in _pop_ready(ready, dependencies, dependents):
        ordered.append(nodes[number])
    return tuple(ordered) if len(ordered) == len(nodes) else None


def _pop_ready(ready: list[int], needs: dict[int, set[int]], users: Mapping[int, list[int]]) -> Iterator[int]:
    """Yield op indices in topological order, lowest first."""
    while ready:
        number = heapq.heappop(ready)
        yield number
        for other in users.get(number, ()):
            needs[other].discard(number)
            if not needs[other]:
                heapq.heappush(ready, other)


def print_attributes(op: Op) -> str:
    """Print an op's attributes as text that distinguishes 1 from 1.0 and 0.0 from -0.0, and compares NaN equal."""
    return ", ".join(f"{key}={print_attribute(op.attrs[key])}" for key in sorted(op.attrs))
