"""Repeated blocks of a model become one function, called with the weights of each.

Which ops are a block is told by the modules of the model (torch), by the names of nodes (ONNX), or by the ops alone
(see `repeats`). Blocks are one function when they are equal: the same ops in the same order with the same attributes
and types, on operands that are the same to them. Sizes, dtypes and annotations are part of that, so a layer that is cut
otherwise than its neighbours stays apart. A block is never left and entered again: what it computes depends on nothing
outside that depends on it.

The places of its ops are told from its own: ``mlp, model.py:7`` in the block ``layers.1``. Where blocks have no names,
they are the places of the first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.repeated_blocks import repeats
from distir_relax.ir import Function, Module
from distir_relax.ir.outline import Region, op_users, outline_regions, region_key

LEAST_OPS = 4
"""Blocks of fewer ops stay where they are."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The pass: global stage in and out, repeated blocks as functions. `scopes` are those of the imported model."""

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    scopes: Mapping[str, tuple[Frame, ...]] = field(default_factory=dict, repr=False)

    def run(self, module: Module) -> Module:
        """The module with its repeated blocks as functions; itself where it has none, or has functions already."""
        main = module.main
        if len(module.functions) > 1:
            return module
        found = _named(main, self.scopes) if self.scopes else _unnamed(main)
        taken_out = outline_regions(main, found, {main.name}) if found else None
        return module if taken_out is None else replace(module, functions=(taken_out[0], *taken_out[1]))


def _named(main: Function, scopes: Mapping[str, tuple[Frame, ...]]) -> list[list[Region]]:
    """The groups of equal blocks among the modules whose paths differ in numbers, outermost first."""
    frames = [scopes.get(op.results[0].name, ()) for op in main.ops]
    users = op_users(main)
    free = set(range(len(main.ops)))
    groups: list[list[Region]] = []
    for depth in range(max(map(len, frames), default=0)):
        families: dict[tuple[str, str], dict[Frame, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number in sorted(free):
            if depth < len(frames[number]):
                frame = frames[number][depth]
                families[_NUMBER.sub("*", frame.path), frame.kind][frame].append(number)
        for instances in families.values():
            blocks = [Region(tuple(ns), frame.path, frame.kind) for frame, ns in instances.items()]
            for group in _equal(main, users, blocks):
                groups.append(group)
                free.difference_update(n for block in group for n in block.numbers)
    return groups


_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")


def _unnamed(main: Function) -> list[list[Region]]:
    users = op_users(main)
    runs = [[Region(tuple(numbers), kind="block") for numbers in run] for run in repeats(main, LEAST_OPS)]
    return [group for run in runs for group in _equal(main, users, run)]


def _equal(main: Function, users: Mapping[str, list[int]], blocks: Sequence[Region]) -> list[list[Region]]:
    """The groups of at least two blocks that are equal."""
    if len(blocks) < 2:
        return []
    groups: dict[object, list[Region]] = defaultdict(list)
    for block in blocks:
        if len(block.numbers) >= LEAST_OPS and _is_whole(main, users, block):
            groups[region_key(main, block)].append(block)
    return [group for group in groups.values() if len(group) > 1]


def _is_whole(main: Function, users: Mapping[str, list[int]], block: Region) -> bool:
    """Whether nothing between the block's ops both depends on them and is used by them."""
    mine = set(block.numbers)
    behind: set[int] = set()
    for number in range(block.numbers[0], block.numbers[-1] + 1):
        if number in mine and number in behind:
            return False
        if number in mine or number in behind:
            after = {u for v in main.ops[number].results for u in users.get(v.name, ())}
            behind |= after if number in behind else after - mine
    return True
