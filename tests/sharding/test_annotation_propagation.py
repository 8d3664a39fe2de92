"""Propagation by levels, over arrays, reaches values in the order of a queue."""

from __future__ import annotations

import random
import re
from collections import deque

import pytest

from distir_relax.ir import Function, Op, inlined_main, parse
from distir_relax.layout import DeviceMesh, R, Shard
from distir_relax.ops import BLOCKED, PARALLEL
from distir_relax.sharding.annotation_propagation import annotated_slot, propagate_annotations
from distir_relax.sharding.factors import Factoring, factoring_of, is_annotation
from tests.sharding.test_factors import UNLIKE_LAYER

MESH = DeviceMesh((3, 5), ("data", "tensor"))
Splits = dict[tuple[str, int], tuple[tuple[int, int], str, str, str]]
"""By value and axis: the split, the annotation's location, and the factor and the value through which it came."""


def drawn_program(seed: int) -> str:
    """The program of two functions, with annotations on some values of its entry, whose users see them or do not."""
    draw = random.Random(seed)
    lines: list[str] = []
    names: dict[str, str] = {}
    is_main = True
    for line in UNLIKE_LAYER.split("\n"):
        is_main &= "func @layer" not in line
        if not is_main:
            lines.append(line)
            continue
        result, separator, expression = line.partition(" = ")
        used = re.sub(r"%(\w+)", lambda match: "%" + names.get(match[1], match[1]), expression)
        lines.append(f"{result}{separator}{used}")
        # Inputs can be annotated once they are all declared.
        for name in "xabc" if line == "  ) {" else re.findall(r"^    %(\w)", line):
            if draw.random() < 0.5:
                placements = ", ".join(draw.choice(("S[0]", "S[1]", "R")) for _ in MESH.shape)
                attrs = f'{{placements="{placements}", round={draw.randrange(3)}}}'
                kind = f"f32[{15 if name in 'abc' else 7},15]"
                lines.append(f"    %{name}{name}: {kind} = annotate_sharding(%{name}) {attrs}  # m.py:{len(lines)}")
                names[name] = name + name if draw.random() < 0.7 else name
    return "\n".join(lines)


def by_queue(function: Function, factoring: Factoring) -> Splits:
    """Propagate with a queue, value by value."""
    pinned: dict[str, Op] = {}
    unsplit: set[tuple[str, int]] = set()
    splits: Splits = {}
    users: dict[str, list[tuple[int, int]]] = {}
    rounds: dict[int, deque[tuple[str, int]]] = {}
    for number, op in enumerate(function.ops):
        for position, value in enumerate((*op.operands, *op.results)):
            users.setdefault(value.name, []).append((number, position))
    inputs = {item.value.name for item in function.inputs}
    for op in filter(is_annotation, function.ops):
        value, source = op.results[0], op.operands[0].name
        pinned[value.name] = op
        for axis, placement in enumerate(op.placements):
            producer = users[source][0][0]
            is_sum = any(atom.kind not in (PARALLEL, BLOCKED) for atom in factoring.atoms[producer])
            if placement == R and source not in inputs and len(users[source]) == 2 and is_sum:
                unsplit.add((source, axis))
            if isinstance(placement, Shard):
                slot = annotated_slot(value, placement, factoring)
                splits[value.name, axis] = slot[1:], op.location, "", ""
                rounds.setdefault(int(str(op.attrs["round"])), deque()).append((value.name, axis))
    for _, queue in sorted(rounds.items()):
        while queue:
            name, axis = queue.popleft()
            split, location, _, _ = splits[name, axis]
            for number, position in users[name]:
                op = function.ops[number]
                names = [v.name for v in (*op.operands, *op.results)]
                for atom in factoring.atoms[number]:
                    if atom.kind == BLOCKED or atom.places[position] != split:
                        continue
                    for other, place in enumerate(atom.places):
                        key = names[other], axis
                        if place is None or other == position or names[other] in pinned or key in unsplit | {*splits}:
                            continue
                        splits[key] = place, location, atom.name, name
                        queue.append(key)
    return splits


@pytest.mark.parametrize("seed", range(40))
def test_levels_reach_values_as_a_queue_does(seed: int) -> None:
    module = parse(drawn_program(seed))
    function, factoring = inlined_main(module).function, factoring_of(module)
    targets, expected = propagate_annotations(function, factoring, MESH), by_queue(function, factoring)
    found: Splits = {}
    for name in factoring.slots:
        for axis, split in enumerate(targets.splits(name)):
            cause = targets.cause(name, axis)
            assert (split is None) == (cause is None)
            if split is not None and cause is not None:
                found[name, axis] = split, cause[0], cause[2], cause[3]
    assert found == expected
