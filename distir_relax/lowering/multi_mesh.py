"""Lowering of programs on several meshes to one: each place is a group of devices that runs a part of the program.

The input is laid out on the devices of one place, with `to_place` ops between places. Every op runs at the place of its
operands; values are sent from place to place by `send`, shard by shard::

    mesh[0] of 2 devices, mesh[1] of 2 devices   =>   one mesh of 2 x 2, with `place` as its first axis
    %y_1 = to_place(%y) {place=1}                =>   %y_1 @ {2,3} = send(%y)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import PlacementError
from distir_relax.ir import Function, Module, Op
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.placement_builder import PlacementBuilder
from distir_relax.ops import Trait, lookup

AXIS = "place"


@dataclass(frozen=True)
class ToPlaces:
    """Pass: distributed stage in and out, from the devices of one place to those of `count`."""

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"
    count: int = 1

    def run(self, module: Module) -> Module:
        """Assign a place to every op. Raises `PlacementError` for an op with operands at several."""
        mesh = module.meshes[0]
        full_mesh = DeviceMesh((self.count, *mesh.shape), (AXIS, *mesh.axes))
        places = _ExplicitPlacement(module.main.ops).places(module.main)
        builder = PlacementBuilder(module.main, places, {}, mesh.size, full_mesh.devices)
        return replace(module, functions=(builder.function(),), meshes=(full_mesh,))


@dataclass(slots=True)
class _ExplicitPlacement:
    """The place of each value, from the transfers of a function; constants have none: they are computed as needed."""

    ops: Sequence[Op]
    parents: dict[str, str] = field(default_factory=dict)
    """Union-find of values at the same place."""
    place: dict[str, int] = field(default_factory=dict)
    """The place of a group, by its representative."""
    constants: set[str] = field(default_factory=set)

    def places(self, function: Function) -> dict[str, int]:
        """Return the places; a value whose place is not determined is placed where it is first needed, else at 0."""
        self._find()
        names = [item.value.name for item in function.inputs]
        names += [v.name for op in function.ops for v in op.results if v.name not in self.constants]
        return {name: self.place.setdefault(self._representative(name), 0) for name in names}

    def _find(self) -> None:
        """Find groups of values at the same place, and their places."""
        for op in self.ops:
            names = [v.name for v in (*op.operands, *op.results)]
            if _is_transfer(op):
                self._place_at(op, op.results[0].name)
            elif not op.operands:
                self.constants.update(v.name for v in op.results)
            else:
                self._join(op, [name for name in names if name not in self.constants])
        for op in self.ops:
            if _is_transfer(op) and op.operands[0].name not in self.constants:
                self.place.setdefault(self._representative(op.operands[0].name), _target(op))

    def _representative(self, name: str) -> str:
        while (parent := self.parents.setdefault(name, name)) != name:
            name = parent
        return name

    def _place_at(self, op: Op, name: str) -> None:
        if self.place.setdefault(self._representative(name), _target(op)) != _target(op):
            raise _error(op)

    def _join(self, op: Op, names: Sequence[str]) -> None:
        roots = list(dict.fromkeys(self._representative(name) for name in names))
        places = {self.place[root] for root in roots if root in self.place}
        if len(places) > 1:
            raise _error(op)
        for root in roots[1:]:
            self.parents[root] = roots[0]
        if places:
            self.place[roots[0]] = places.pop()


def _is_transfer(op: Op) -> bool:
    return Trait.PLACE in lookup(op.name, op.location).traits


def _target(op: Op) -> int:
    place = op.attrs["place"]
    assert isinstance(place, int)
    return place


def _error(op: Op) -> PlacementError:
    operands = ", ".join(f"%{v.name}" for v in op.operands)
    return PlacementError(
        f"{op.name} has operands at several places: {operands}",
        op.location,
        "an op runs on one mesh: redistribute its operands to it",
    )
