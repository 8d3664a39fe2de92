"""Outlining of a model's repeated blocks into functions, called with the weights of each.

Blocks are identified by the modules of the model (torch), by the names of nodes (ONNX), or by the ops alone (see
`repeated_blocks`). Equal blocks share a function: they have the same ops in the same order with the same attributes and
types, and corresponding operands. Sizes, dtypes and annotations count, so a layer with another sharding is not merged.
A block is convex: no op outside of it both depends on it and is used by it.

Locations of its ops are relative to the block: ``mlp, model.py:7`` in the block ``layers.1``. For blocks without names,
they are those of the first block.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.repeated_blocks import find_repeats
from distir_relax.ir import Function, Module, memoize
from distir_relax.ir.outline import Region, op_users, outline_regions, region_key

MIN_OPS = 4
"""Blocks with fewer ops are not outlined."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Outline repeated blocks; global stage in and out. `scopes` are those of the imported model."""

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    scopes: Mapping[str, tuple[Frame, ...]] = field(default_factory=dict, repr=False)

    def run(self, module: Module) -> Module:
        """Return the module with its repeated blocks as functions; unchanged without any, or if it has functions."""
        if len(module.functions) > 1:
            return module
        return replace(module, functions=_outlined_functions(module, self.scopes))


@memoize(2)
def _outlined_functions(module: Module, scopes: Mapping[str, tuple[Frame, ...]]) -> tuple[Function, ...]:
    """Return the functions of a module with one; cached, since all strategies of a search begin with this."""
    main = module.main
    groups = _blocks_by_scope(main, scopes) if scopes else _blocks_by_ops(main)
    outlined = outline_regions(main, groups, {main.name}) if groups else None
    return module.functions if outlined is None else (outlined[0], *outlined[1])


def _blocks_by_scope(main: Function, scopes: Mapping[str, tuple[Frame, ...]]) -> list[list[Region]]:
    """Return the groups of equal blocks among modules whose paths differ in numbers, outermost first."""
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
            for group in _group_equal(main, users, blocks):
                groups.append(group)
                free.difference_update(n for block in group for n in block.numbers)
    return groups


_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")


def _blocks_by_ops(main: Function) -> list[list[Region]]:
    users = op_users(main)
    runs = [[Region(tuple(numbers), kind="block") for numbers in run] for run in find_repeats(main, MIN_OPS)]
    return [group for run in runs for group in _group_equal(main, users, run)]


def _group_equal(main: Function, users: Mapping[str, list[int]], blocks: Sequence[Region]) -> list[list[Region]]:
    """Return the groups of at least two equal blocks."""
    if len(blocks) < 2:
        return []
    groups: dict[object, list[Region]] = defaultdict(list)
    for block in blocks:
        if len(block.numbers) >= MIN_OPS and _is_convex(main, users, block):
            groups[region_key(main, block)].append(block)
    return [group for group in groups.values() if len(group) > 1]


def _is_convex(main: Function, users: Mapping[str, list[int]], block: Region) -> bool:
    """Return whether no path leaves the block and reenters it."""
    members = set(block.numbers)
    dependents: set[int] = set()
    for number in range(block.numbers[0], block.numbers[-1] + 1):
        if number in members and number in dependents:
            return False
        if number in members or number in dependents:
            users_of_op = {u for v in main.ops[number].results for u in users.get(v.name, ())}
            dependents |= users_of_op if number in dependents else users_of_op - members
    return True
