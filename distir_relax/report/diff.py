"""How two bundles of one model differ: placements, collectives, bytes."""

from __future__ import annotations

from collections import Counter

from distir_relax.bundle import Bundle, local_bytes
from distir_relax.ir import DTensorType, Module
from distir_relax.layout import print_placements
from distir_relax.runtime.verification import read_stage
from distir_relax.sharding import redistributions


def diff(first: Bundle, second: Bundle) -> str:
    """What changed from `first` to `second`, a line each; values are matched by name.

    Bytes per step are those that each device sends, with ring algorithms and shards of equal size; weight bytes are
    those that each rank holds. Raises `BundleError` when a bundle has no text of its sharded stage.
    """
    old, new = (read_stage(bundle, "sharded") for bundle in (first, second))
    lines = []
    if old.meshes != new.meshes:
        lines.append(f"mesh: {old.meshes[0]} -> {new.meshes[0]}")
    if first.manifest.tail != second.manifest.tail:
        lines.append(f"tail: {first.manifest.tail} -> {second.manifest.tail}")
    before, after = _placements(old), _placements(new)
    for name in {**before, **after}:
        a, b = before.get(name, "absent"), after.get(name, "absent")
        if a != b:
            lines.append(f"{name}: {a} -> {b}")
    counts = _collectives(old), _collectives(new)
    for key in sorted(counts[0].keys() | counts[1].keys()):
        if counts[0][key] != counts[1][key]:
            lines.append(f"{key}: {counts[0][key]} -> {counts[1][key]}")
    sent = [sum(moved.bytes * moved.times for moved in redistributions(module)) for module in (old, new)]
    if sent[0] != sent[1]:
        lines.append(f"bytes sent per device and step: {sent[0]:,.0f} -> {sent[1]:,.0f}")
    held = [_weight_bytes(bundle) for bundle in (first, second)]
    if held[0] != held[1]:
        lines.append(f"weight bytes per rank: {_numbers(held[0])} -> {_numbers(held[1])}")
    return "\n".join(lines) or "no difference in placements, collectives and bytes"


def _placements(module: Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for function in module.functions:
        values = [i.value for i in function.inputs] + [v for op in function.ops for v in op.results]
        layouts = ((v.name, v.type.placements) for v in values if isinstance(v.type, DTensorType))
        prefix = "%" if function is module.main else f"@{function.name}."
        found.update((f"{prefix}{name}", print_placements(placements)) for name, placements in layouts)
    return found


def _collectives(module: Module) -> Counter[str]:
    found: Counter[str] = Counter()
    for moved in redistributions(module):
        for name, axis in moved.collectives:
            found[f"{name} along {axis}"] += moved.times
    return found


def _weight_bytes(bundle: Bundle) -> list[int]:
    mesh = bundle.manifest.mesh
    return [sum(local_bytes(t, mesh, rank) for t in bundle.manifest.weights) for rank in range(mesh.size)]


def _numbers(values: list[int]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]:,}"
    if len(values) > 8:
        return f"{min(values):,} to {max(values):,}"
    return "|".join(f"{value:,}" for value in values)
