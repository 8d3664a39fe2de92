"""Explanation of a value's layout: its cause, its communication, and that of other layouts."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from distir_relax.autosharding.alternatives import Alternatives
from distir_relax.autosharding.serialize import parse_search
from distir_relax.bundle import Bundle
from distir_relax.errors import DistIRError
from distir_relax.ir import (
    DTensorType,
    Function,
    HeadPartition,
    Module,
    Op,
    PerRank,
    Reason,
    Record,
    local_type,
    parse_records,
    value_names,
)
from distir_relax.ir.symbols import with_typical
from distir_relax.layout import DeviceMesh, Partial, Placement, R, Routed, Shard, print_placements, symbols_within
from distir_relax.layout.partition import refine_cut
from distir_relax.ops import Trait, lookup
from distir_relax.report.alternatives import alternatives_text
from distir_relax.runtime.verification import read_stage
from distir_relax.sharding import bytes_sent, list_reshards
from distir_relax.sharding.reshard_cost import Reshard


def explain(bundle: Bundle, name: str, limit: float = 30.0, dims: Mapping[str, int] | None = None) -> str:
    """Explain the layout of the value `name` (with or without ``%``) of a bundle, as text.

    Lists the chain of reasons back to the annotation, the bytes that each device sends to produce it and to reshard it
    for its uses, and those that it holds of it; and the layout with the least communication, with both. If placements
    were searched, a table has the costs of the whole program under each other layout that is evaluated within `limit`
    seconds. Bytes and times are those of `dims`, values of symbolic sizes by name; others are typical. A value of a
    function may be qualified, as ``@layer.linear``; it is explained as in the first call. Raises `DistIRError` if there
    is no such value, or if several functions have one.
    """
    module = _read_sharded(bundle, dims)
    records = _read_records(bundle)
    reasons = [record for record in records if isinstance(record, Reason)]
    function, name = _find(module, name.removeprefix("%"))
    kind = _kinds(function)[name]
    # Operands of a function come from the entry function: a chain may continue there.
    relevant = [r for f in dict.fromkeys((function.name, module.main.name)) for r in reasons if r.function == f]
    owner = "" if function is module.main else f" of @{function.name}"
    alternatives = read_alternatives(bundle, module, dims)
    sizes = ", ".join(f"{s} = {s.typical}" for s in sorted(symbols_within(kind.shape), key=str))
    lines = [
        f"%{name}{owner}: {kind}",
        *([f"bytes and times are those of {sizes}"] if sizes else ()),
        *(str(r) for r in records if isinstance(r, HeadPartition) and (r.value, function) == (name, module.main)),
        *(_chains(function.name, name, relevant) if alternatives is None else ()),
    ]
    moves = [*_moves(module, function, name)]
    lines += moves or ["no communication produces it or reshards it for its uses"]
    if alternatives is None:
        lines += _alternative(module, function, name, kind)
    elif (searched := _searched_value(alternatives, function, name)) == name:
        lines += alternatives_text(alternatives, function.name, name, kind, limit)
    else:
        lines.append(f"its layout follows from %{searched}: distir explain of that value lists the other costs")
    return "\n".join(lines)


def explain_json(
    bundle: Bundle, name: str, limit: float = 30.0, dims: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the layout of a value as JSON, with the lines of `explain` in `text`.

    `reasons` are those of this value, `redistributions` those that produce it or reshard it for its uses, with the
    bytes that each device sends, `held_bytes` the largest shard of a device.
    """
    text = explain(bundle, name, limit, dims).splitlines()
    module = _read_sharded(bundle, dims)
    function, name = _find(module, name.removeprefix("%"))
    kind = _kinds(function)[name]
    reasons = [record for record in _read_records(bundle) if isinstance(record, Reason)]
    return {
        "value": name,
        "function": function.name,
        "type": str(kind),
        "placements": print_placements(kind.placements),
        "held_bytes": _max_bytes(kind, module.meshes[0]),
        "reasons": [asdict(reason) for reason in reasons if (reason.function, reason.value) == (function.name, name)],
        "redistributions": [
            {
                "operand": op.operands[0].name,
                "result": reshard.result,
                "from": print_placements(op.operands[0].dtensor.placements),
                "to": print_placements(op.results[0].dtensor.placements),
                "bytes": reshard.bytes,
                "times": reshard.times,
                "collectives": [{"name": kind, "axis": axis} for kind, axis in reshard.collectives],
                "location": op.location,
            }
            for op, reshard in _reshards(module, function, name)
        ],
        "text": text,
    }


def _read_sharded(bundle: Bundle, dims: Mapping[str, int] | None) -> Module:
    return with_typical(read_stage(bundle, "sharded"), dims or {})


def _read_records(bundle: Bundle) -> tuple[Record, ...]:
    symbols = {symbol.name: symbol for symbol in bundle.manifest.symbols}
    return parse_records(bundle.records, "records.json", symbols)


def read_alternatives(bundle: Bundle, sharded: Module, dims: Mapping[str, int] | None = None) -> Alternatives | None:
    """Return the alternatives of a bundle whose placements were searched; None if they follow from annotations.

    Their costs are those of `dims`, values of symbolic sizes by name; others are typical. Raises `BundleError` if the
    search cannot be read.
    """
    searched = parse_search(bundle.texts, sharded.meshes[0], str(bundle.path or bundle.manifest.name))
    if searched is None:
        return None
    search, module = searched
    return Alternatives(search, with_typical(module, dims or {}))


def _searched_value(alternatives: Alternatives, function: Function, name: str) -> str:
    """Return the value of the searched program that `name` belongs to, before its reduction or resharding."""
    names = value_names(alternatives.module.function(function.name))
    operands = {op.results[0].name: op.operands[0].name for op in function.ops if _is_redistribution(op)}
    if name in names:
        return name
    sources = {source: result for result, source in operands.items() if result in names}
    return sources.get(name) or operands[name]


def _find(module: Module, name: str) -> tuple[Function, str]:
    """Return the function and the value that a user names."""
    matches = [(f, value) for f in module.functions for value in _kinds(f) if name in (value, f"@{f.name}.{value}")]
    if matches and (len(matches) == 1 or matches[0][0] is module.main):
        return matches[0]
    if matches:
        names = " or ".join(f"@{function.name}.{value}" for function, value in matches)
        raise DistIRError(f"several functions have a value %{name}", "", f"choose one: {names}")
    near = difflib.get_close_matches(name, [value for f in module.functions for value in _kinds(f)], n=3)
    hint = f"did you mean %{' or %'.join(near)}?" if near else "distir show --stage sharded lists them"
    raise DistIRError(f"the program has no value %{name}", "", hint)


def _kinds(function: Function) -> dict[str, DTensorType]:
    values = [i.value for i in function.inputs] + [v for op in function.ops for v in op.results]
    return {v.name: v.type for v in values if isinstance(v.type, DTensorType)}


def _chains(function: str, name: str, reasons: Sequence[Reason]) -> list[str]:
    own_reasons = [reason for reason in reasons if (reason.function, reason.value) == (function, name)]
    if not own_reasons:
        return ["no annotation affects it: its layout follows from its operands"]
    return [line for reason in own_reasons for line in _chain(reason, reasons)]


def _chain(reason: Reason, reasons: Sequence[Reason]) -> list[str]:
    """Follow the reasons of a value back to the annotation that determines its sharding along an axis."""
    lines, visited = [], {reason.value}
    name, at = reason.value, reason
    while at.source and at.source not in visited:
        lines.append(f"  %{name} is split as %{at.source} is, through {at.op} {at.factor}")
        name = at.source
        visited.add(name)
        previous = next((r for r in reasons if (r.value, r.axis, r.annotation) == (name, at.axis, at.annotation)), None)
        if previous is None:
            break
        at = previous
    return [*lines, f"  %{name} is split {reason.root}"]


def _moves(module: Module, function: Function, name: str) -> Iterator[str]:
    for op, reshard in _reshards(module, function, name):
        source, target = (op.operands[0].dtensor, op.results[0].dtensor)
        yield (
            f"%{op.results[0].name} = redistribute(%{op.operands[0].name}), "
            f"{print_placements(source.placements)} to {print_placements(target.placements)}: "
            f"{reshard}{f', {reshard.times} times' if reshard.times > 1 else ''}"
            f"{f'  # {op.location}' if op.location else ''}"
        )


def _reshards(module: Module, function: Function, name: str) -> Iterator[tuple[Op, Reshard]]:
    """Return the reshards that produce a value, or that prepare it for its uses."""
    by_result = {reshard.result: reshard for reshard in list_reshards(module) if reshard.function == function.name}
    for op in function.ops:
        reshard = by_result.get(op.results[0].name) if op.results else None
        if reshard and name in (op.operands[0].name, op.results[0].name):
            yield op, reshard


def _alternative(module: Module, function: Function, name: str, kind: DTensorType) -> list[str]:
    """Return the other layout with the least communication, for the given producer and uses."""
    mesh = module.meshes[0]
    producer = next((op for op in function.ops if name in {v.name for v in op.results}), None)
    source = producer.operands[0].dtensor if producer is not None and _is_redistribution(producer) else kind
    needs = [
        op.results[0].dtensor if _is_redistribution(op) else kind
        for op in function.ops
        if name in {v.name for v in op.operands}
    ]

    def sent(layout: tuple[Placement, ...]) -> float:
        middle = replace(kind, placements=layout)
        produced = bytes_sent(source, middle, mesh) if producer is not None else 0.0
        return produced + sum(bytes_sent(middle, need, mesh) for need in {n.placements: n for n in needs}.values())

    def costs(layout: tuple[Placement, ...]) -> str:
        return f"sends {sent(layout):,.0f} bytes for it and holds {_local_size(replace(kind, placements=layout), mesh)}"

    if any(isinstance(p, (Partial, Routed)) for p in kind.placements):
        return [f"each device holds {_local_size(kind, mesh)} of it"]
    lines = [f"with this layout, each device {costs(kind.placements)}"]
    if others := [layout for layout in _layouts(kind, mesh) if layout != kind.placements]:
        best = min(others, key=lambda layout: (sent(layout), _max_bytes(replace(kind, placements=layout), mesh)))
        lines.append(f"with the other layout that sends least, {print_placements(best)}, it {costs(best)}")
    return lines


def _local_size(kind: DTensorType, mesh: DeviceMesh) -> str:
    """Format the bytes that a device holds of a value."""
    most = _max_bytes(kind, mesh)
    local = local_type(kind, mesh)
    is_even = not any(isinstance(size, PerRank) for size in local.shape)
    return f"{most:,} bytes" if is_even else f"up to {most:,} bytes"


def _max_bytes(kind: DTensorType, mesh: DeviceMesh) -> int:
    local = local_type(kind, mesh)
    return max(local.local(index).bytes for index in range(len(local.devices)))


def _layouts(kind: DTensorType, mesh: DeviceMesh) -> Iterator[tuple[Placement, ...]]:
    dims: list[int | None] = [None, *(dim for dim, size in enumerate(kind.shape) if size != 1)]
    for chosen in itertools.product(dims, repeat=len(mesh.shape)):
        layout: list[Placement] = []
        for dim, ranks in zip(chosen, mesh.shape, strict=True):
            before = [p.cut for p in layout if isinstance(p, Shard) and p.dim == dim and p.cut]
            layout.append(R if dim is None else Shard(dim, refine_cut(kind.shape[dim], before, ranks)))
        yield tuple(layout)


def _is_redistribution(op: Op) -> bool:
    return Trait.REDISTRIBUTION in lookup(op.name, op.location).traits
