"""Why a value lies as it does, what that sends, and what another layout would send."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from distir_relax.bundle import Bundle
from distir_relax.errors import DistIRError
from distir_relax.ir import (
    DeviceMesh,
    DTensorType,
    Function,
    Module,
    Op,
    Partial,
    Placement,
    R,
    Shard,
    parse,
    print_placements,
)
from distir_relax.ops import lookup
from distir_relax.sharding import bytes_sent, traffic
from distir_relax.sharding.cuts import refined

_REASON = re.compile(
    r"(?P<root>from the annotation at .+?)(?:, through (?P<op>\S+) (?P<factor>.+) of %(?P<source>\S+))?"
)
_LINE = re.compile(r"^\s*(?:\w+ )?%(?P<name>[^\s:]+): .*?#[^;]*; (?P<remark>.*)$", re.MULTILINE)


def explain(bundle: Bundle, name: str) -> str:
    """The layout of the value `name` (with or without ``%``) of a bundle, in words.

    Its chain of reasons back to the annotation, the bytes that each device sends to make it and to bring it where it
    is used, and the layout that would send least instead. Raises `DistIRError` when there is no such value.
    """
    text = bundle.stage("sharded")
    module = parse(text, "sharded.txt")
    remarks = {match["name"]: match["remark"].split("; ") for match in _LINE.finditer(text)}
    name = name.removeprefix("%")
    kinds = _kinds(module.main)
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=3)
        hint = f"did you mean %{' or %'.join(near)}?" if near else "distir show --stage sharded lists them"
        raise DistIRError(f"the program has no value %{name}", "", hint)
    lines = [f"%{name}: {kinds[name]}", *_chains(name, remarks)]
    moves = [*_moves(module, name)]
    lines += moves or ["nothing is sent to make it or to bring it where it is used"]
    lines += _alternative(module, name, kinds[name])
    return "\n".join(lines)


def _kinds(function: Function) -> dict[str, DTensorType]:
    values = [i.value for i in function.inputs] + [v for op in function.ops for v in op.results]
    return {v.name: v.type for v in values if isinstance(v.type, DTensorType)}


def _chains(name: str, remarks: Mapping[str, list[str]]) -> list[str]:
    reasons = [match for text in remarks.get(name, ()) if (match := _REASON.fullmatch(text))]
    if not reasons:
        return ["no annotation reaches it: its layout follows from its operands"]
    return [line for reason in reasons for line in _chain(name, reason, remarks)]


def _chain(name: str, reason: re.Match[str], remarks: Mapping[str, list[str]]) -> list[str]:
    lines, seen = [], {name}
    at: re.Match[str] | None = reason
    while at is not None and at["source"] and at["source"] not in seen:
        lines.append(f"  %{name} is split as %{at['source']} is, through {at['op']} {at['factor']}")
        name = at["source"]
        seen.add(name)
        found = (_REASON.fullmatch(text) for text in remarks.get(name, ()))
        at = next((match for match in found if match and match["root"] == reason["root"]), None)
    return [*lines, f"  %{name} is split {reason['root']}"]


def _moves(module: Module, name: str) -> Iterator[str]:
    by_result = {moved.result: moved for moved in traffic(module)}
    for op in module.main.ops:
        if op.results[0].name in by_result and name in (op.operands[0].name, op.results[0].name):
            have, want = (_type(op.operands[0]), _type(op.results[0]))
            yield (
                f"%{op.results[0].name} = redistribute(%{op.operands[0].name}), "
                f"{print_placements(have.placements)} to {print_placements(want.placements)}: "
                f"{by_result[op.results[0].name]}{f'  # {op.location}' if op.location else ''}"
            )


def _alternative(module: Module, name: str, kind: DTensorType) -> list[str]:
    """The other layout of the value that would send least, its producer and its uses being as they are."""
    mesh = module.meshes[0]
    maker = next((op for op in module.main.ops if name in {v.name for v in op.results}), None)
    source = _type(maker.operands[0]) if maker is not None and _is_redistribution(maker) else kind
    needs = [
        _type(op.results[0]) if _is_redistribution(op) else kind
        for op in module.main.ops
        if name in {v.name for v in op.operands}
    ]

    def sent(layout: tuple[Placement, ...]) -> float:
        middle = replace(kind, placements=layout)
        made = bytes_sent(source, middle, mesh) if maker is not None else 0.0
        return made + sum(bytes_sent(middle, need, mesh) for need in {n.placements: n for n in needs}.values())

    if any(isinstance(p, Partial) for p in kind.placements):
        return []
    others = [layout for layout in _layouts(kind, mesh) if layout != kind.placements]
    if not others:
        return []
    best = min(others, key=sent)
    return [
        f"as it lies, each device sends {sent(kind.placements):,.0f} bytes for it; "
        f"the cheapest other layout is {print_placements(best)}, with {sent(best):,.0f} bytes"
    ]


def _layouts(kind: DTensorType, mesh: DeviceMesh) -> Iterator[tuple[Placement, ...]]:
    dims: list[int | None] = [None, *(dim for dim, size in enumerate(kind.shape) if size > 1)]
    for chosen in itertools.product(dims, repeat=len(mesh.shape)):
        layout: list[Placement] = []
        for dim, ranks in zip(chosen, mesh.shape, strict=True):
            before = [p.cut for p in layout if isinstance(p, Shard) and p.dim == dim and p.cut]
            layout.append(R if dim is None else Shard(dim, refined(kind.shape[dim], before, ranks)))
        yield tuple(layout)


def _is_redistribution(op: Op) -> bool:
    return lookup(op.name, op.location).role == "redistribution"


def _type(value: object) -> DTensorType:
    kind = getattr(value, "type", None)
    assert isinstance(kind, DTensorType)
    return kind
