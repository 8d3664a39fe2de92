"""Why a value lies as it does, what that sends, and what another layout would send."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from distir_relax.autosharding.alternatives import Alternatives
from distir_relax.autosharding.serialize import parse_search
from distir_relax.bundle import Bundle
from distir_relax.errors import DistIRError
from distir_relax.ir import DTensorType, Function, Module, Op, PerRank, Reason, local_type, parse_records, value_names
from distir_relax.layout import DeviceMesh, Partial, Placement, R, Routed, Shard, print_placements
from distir_relax.layout.partition import refine_cut
from distir_relax.ops import Trait, lookup
from distir_relax.report.alternatives import alternatives_text
from distir_relax.runtime.verification import read_stage
from distir_relax.sharding import bytes_sent, list_reshards
from distir_relax.sharding.reshard_cost import Reshard


def explain(bundle: Bundle, name: str, limit: float = 30.0) -> str:
    """The layout of the value `name` (with or without ``%``) of a bundle, in words.

    Its chain of reasons back to the annotation, the bytes that each device sends to make it and to bring it where it is
    used, and those that it holds of it; and the layout that would send least instead, with both. Where placements were
    looked for, a table of what all of the program would have taken in each other layout, as far as that is found within
    `limit` seconds. A value of a function may be named with it, as ``@layer.linear``; it is explained as in the first
    call. Raises `DistIRError` when there is no such value, or when several functions have one.
    """
    module = read_stage(bundle, "sharded")
    reasons = [r for r in parse_records(bundle.records, "records.json") if isinstance(r, Reason)]
    function, name = _find(module, name.removeprefix("%"))
    kind = _kinds(function)[name]
    # What a function takes comes from the entry function: a chain may go on there.
    known = [r for f in dict.fromkeys((function.name, module.main.name)) for r in reasons if r.function == f]
    whose = "" if function is module.main else f" of @{function.name}"
    asked = search_of(bundle, module)
    lines = [f"%{name}{whose}: {kind}", *(_chains(function.name, name, known) if asked is None else ())]
    moves = [*_moves(module, function, name)]
    lines += moves or ["nothing is sent to make it or to bring it where it is used"]
    if asked is None:
        lines += _alternative(module, function, name, kind)
    elif (laid_out := _laid_out(asked, function, name)) == name:
        lines += alternatives_text(asked, function.name, name, kind, limit)
    else:
        lines.append(f"%{laid_out} is what lies in one layout or another: distir explain of it says what others cost")
    return "\n".join(lines)


def explain_json(bundle: Bundle, name: str, limit: float = 30.0) -> dict[str, Any]:
    """The layout of a value as JSON, with the whole of `explain` as lines in `text`.

    `reasons` are those of this value, `list_reshards` those that make it or bring it to its uses, with the bytes that
    each device sends, `held_bytes` the most that a device holds of it.
    """
    text = explain(bundle, name, limit).splitlines()
    module = read_stage(bundle, "sharded")
    function, name = _find(module, name.removeprefix("%"))
    kind = _kinds(function)[name]
    reasons = [r for r in parse_records(bundle.records, "records.json") if isinstance(r, Reason)]
    return {
        "value": name,
        "function": function.name,
        "type": str(kind),
        "placements": print_placements(kind.placements),
        "held_bytes": _most(kind, module.meshes[0]),
        "reasons": [asdict(reason) for reason in reasons if (reason.function, reason.value) == (function.name, name)],
        "redistributions": [
            {
                "operand": op.operands[0].name,
                "result": moved.result,
                "from": print_placements(op.operands[0].dtensor.placements),
                "to": print_placements(op.results[0].dtensor.placements),
                "bytes": moved.bytes,
                "times": moved.times,
                "collectives": [{"name": kind, "axis": axis} for kind, axis in moved.collectives],
                "location": op.location,
            }
            for op, moved in _moved(module, function, name)
        ],
        "text": text,
    }


def search_of(bundle: Bundle, sharded: Module) -> Alternatives | None:
    """The search by which the placements of a bundle were found; None where they follow from marks by rules.

    Raises `BundleError` where it cannot be read.
    """
    found = parse_search(bundle.texts, sharded.meshes[0], str(bundle.path or bundle.manifest.name))
    return None if found is None else Alternatives(*found)


def _laid_out(asked: Alternatives, function: Function, name: str) -> str:
    """The value of the program that was laid out which a value is, before its sum is made or in another layout."""
    own = value_names(asked.module.function(function.name))
    ends = {op.results[0].name: op.operands[0].name for op in function.ops if _is_redistribution(op)}
    if name in own:
        return name
    made = {source: result for result, source in ends.items() if result in own}
    return made.get(name) or ends[name]


def _find(module: Module, name: str) -> tuple[Function, str]:
    """The function and the value that a user names."""
    found = [(f, value) for f in module.functions for value in _kinds(f) if name in (value, f"@{f.name}.{value}")]
    if found and (len(found) == 1 or found[0][0] is module.main):
        return found[0]
    if found:
        names = " or ".join(f"@{function.name}.{value}" for function, value in found)
        raise DistIRError(f"several functions have a value %{name}", "", f"say which: {names}")
    near = difflib.get_close_matches(name, [value for f in module.functions for value in _kinds(f)], n=3)
    hint = f"did you mean %{' or %'.join(near)}?" if near else "distir show --stage sharded lists them"
    raise DistIRError(f"the program has no value %{name}", "", hint)


def _kinds(function: Function) -> dict[str, DTensorType]:
    values = [i.value for i in function.inputs] + [v for op in function.ops for v in op.results]
    return {v.name: v.type for v in values if isinstance(v.type, DTensorType)}


def _chains(function: str, name: str, reasons: Sequence[Reason]) -> list[str]:
    mine = [reason for reason in reasons if (reason.function, reason.value) == (function, name)]
    if not mine:
        return ["no annotation reaches it: its layout follows from its operands"]
    return [line for reason in mine for line in _chain(reason, reasons)]


def _chain(reason: Reason, reasons: Sequence[Reason]) -> list[str]:
    """From a value back to the annotation that decides how it is split along an axis."""
    lines, seen = [], {reason.value}
    name, at = reason.value, reason
    while at.source and at.source not in seen:
        lines.append(f"  %{name} is split as %{at.source} is, through {at.op} {at.factor}")
        name = at.source
        seen.add(name)
        before = next((r for r in reasons if (r.value, r.axis, r.annotation) == (name, at.axis, at.annotation)), None)
        if before is None:
            break
        at = before
    return [*lines, f"  %{name} is split {reason.root}"]


def _moves(module: Module, function: Function, name: str) -> Iterator[str]:
    for op, moved in _moved(module, function, name):
        have, want = (op.operands[0].dtensor, op.results[0].dtensor)
        yield (
            f"%{op.results[0].name} = redistribute(%{op.operands[0].name}), "
            f"{print_placements(have.placements)} to {print_placements(want.placements)}: "
            f"{moved}{f', {moved.times} times' if moved.times > 1 else ''}"
            f"{f'  # {op.location}' if op.location else ''}"
        )


def _moved(module: Module, function: Function, name: str) -> Iterator[tuple[Op, Reshard]]:
    """The redistributions that make a value, or bring it to its uses."""
    by_result = {moved.result: moved for moved in list_reshards(module) if moved.function == function.name}
    for op in function.ops:
        moved = by_result.get(op.results[0].name) if op.results else None
        if moved and name in (op.operands[0].name, op.results[0].name):
            yield op, moved


def _alternative(module: Module, function: Function, name: str, kind: DTensorType) -> list[str]:
    """The other layout of the value that would send least, its producer and its uses being as they are."""
    mesh = module.meshes[0]
    maker = next((op for op in function.ops if name in {v.name for v in op.results}), None)
    source = maker.operands[0].dtensor if maker is not None and _is_redistribution(maker) else kind
    needs = [
        op.results[0].dtensor if _is_redistribution(op) else kind
        for op in function.ops
        if name in {v.name for v in op.operands}
    ]

    def sent(layout: tuple[Placement, ...]) -> float:
        middle = replace(kind, placements=layout)
        made = bytes_sent(source, middle, mesh) if maker is not None else 0.0
        return made + sum(bytes_sent(middle, need, mesh) for need in {n.placements: n for n in needs}.values())

    def costs(layout: tuple[Placement, ...]) -> str:
        return f"sends {sent(layout):,.0f} bytes for it and holds {_held(replace(kind, placements=layout), mesh)}"

    if any(isinstance(p, (Partial, Routed)) for p in kind.placements):
        return [f"each device holds {_held(kind, mesh)} of it"]
    lines = [f"as it lies, each device {costs(kind.placements)}"]
    if others := [layout for layout in _layouts(kind, mesh) if layout != kind.placements]:
        best = min(others, key=lambda layout: (sent(layout), _most(replace(kind, placements=layout), mesh)))
        lines.append(f"in the other layout that sends least, {print_placements(best)}, it {costs(best)}")
    return lines


def _held(kind: DTensorType, mesh: DeviceMesh) -> str:
    """The bytes that a device holds of a value."""
    most = _most(kind, mesh)
    held = local_type(kind, mesh)
    same = not any(isinstance(size, PerRank) for size in held.shape)
    return f"{most:,} bytes" if same else f"up to {most:,} bytes"


def _most(kind: DTensorType, mesh: DeviceMesh) -> int:
    held = local_type(kind, mesh)
    return max(held.local(index).bytes for index in range(len(held.devices)))


def _layouts(kind: DTensorType, mesh: DeviceMesh) -> Iterator[tuple[Placement, ...]]:
    dims: list[int | None] = [None, *(dim for dim, size in enumerate(kind.shape) if size > 1)]
    for chosen in itertools.product(dims, repeat=len(mesh.shape)):
        layout: list[Placement] = []
        for dim, ranks in zip(chosen, mesh.shape, strict=True):
            before = [p.cut for p in layout if isinstance(p, Shard) and p.dim == dim and p.cut]
            layout.append(R if dim is None else Shard(dim, refine_cut(kind.shape[dim], before, ranks)))
        yield tuple(layout)


def _is_redistribution(op: Op) -> bool:
    return Trait.REDISTRIBUTION in lookup(op.name, op.location).traits
