"""A program of several meshes: places of one mesh, each a group of devices that works on its own part of the program.

The program comes laid out on the devices of one place, with `to_place` ops where a value goes to another. Every op runs
where its operands are; a value goes from one place to the next by `send`, shard by shard::

    mesh[0] of 2 devices, mesh[1] of 2 devices   =>   one mesh of 2 x 2, with `place` as its first axis
    %y_1 = to_place(%y) {place=1}                =>   %y_1 @ {2,3} = send(%y)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import PlacementError
from distir_relax.ir import Function, Module, Op, Value, fresh_name, value_names
from distir_relax.layout import DeviceMesh
from distir_relax.ops import Trait, lookup

AXIS = "place"


@dataclass(frozen=True)
class ToPlaces:
    """The pass: distributed stage in and out, from the devices of one place to those of `count`."""

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"
    count: int = 1

    def run(self, module: Module) -> Module:
        """Put every op at its place. Raises `PlacementError` for an op whose operands are at several."""
        mesh = module.meshes[0]
        whole = DeviceMesh((self.count, *mesh.shape), (AXIS, *mesh.axes))
        main = _Places(module.main, mesh.size).function()
        return replace(module, functions=(main,), meshes=(whole,))


@dataclass(slots=True)
class _Places:
    function_: Function
    size: int
    """The devices of one place."""
    group: dict[str, str] = field(default_factory=dict)
    """For each value another that is at the same place; for one of each group, itself."""
    place: dict[str, int] = field(default_factory=dict)
    """The place of a group, by the name of the value that leads to itself."""
    values: dict[tuple[str, int], Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    makers: dict[str, Op] = field(default_factory=dict)
    """The ops without operands: each place that needs one runs it for itself."""

    def function(self) -> Function:
        """The function with every value at its place."""
        given = self.function_
        self.names = value_names(given)
        self._find()
        inputs = []
        for item in given.inputs:
            place = self.place.setdefault(self._lead(item.value.name), 0)
            value = self.values[item.value.name, place] = self._moved(item.value, place)
            inputs.append(replace(item, value=value))
        for op in given.ops:
            self._write(op)
        outputs = tuple(replace(o, value=self._output(o.value)) for o in given.outputs)
        return replace(given, inputs=tuple(inputs), ops=tuple(self.ops), outputs=outputs)

    def _find(self) -> None:
        """Which values are together, and where."""
        ops = self.function_.ops
        for op in ops:
            names = [v.name for v in (*op.operands, *op.results)]
            if _moves(op):
                self._set(op, op.results[0].name)
            elif not op.operands:
                self.makers.update((v.name, op) for v in op.results)
            else:
                self._join(op, [name for name in names if name not in self.makers])
        for op in ops:
            # What nobody has put anywhere is where it is first needed.
            if _moves(op) and op.operands[0].name not in self.makers:
                self.place.setdefault(self._lead(op.operands[0].name), _target(op))

    def _lead(self, name: str) -> str:
        while (above := self.group.setdefault(name, name)) != name:
            name = above
        return name

    def _set(self, op: Op, name: str) -> None:
        if self.place.setdefault(self._lead(name), _target(op)) != _target(op):
            raise _torn(op)

    def _join(self, op: Op, names: Sequence[str]) -> None:
        leads = list(dict.fromkeys(self._lead(name) for name in names))
        places = {self.place[lead] for lead in leads if lead in self.place}
        if len(places) > 1:
            raise _torn(op)
        for lead in leads[1:]:
            self.group[lead] = leads[0]
        if places:
            self.place[leads[0]] = places.pop()

    def _write(self, op: Op) -> None:
        if not op.operands:
            return
        place = self.place.setdefault(self._lead(op.results[0].name), 0)
        if _moves(op):
            self.values[op.results[0].name, place] = self._sent(op, place)
            return
        operands = tuple(self._at(v, place) for v in op.operands)
        results = tuple(self._moved(v, place) for v in op.results)
        self.values.update(((v.name, place), v) for v in results)
        self.ops.append(replace(op, operands=operands, results=results))

    def _sent(self, op: Op, place: int) -> Value:
        source = op.operands[0]
        if source.name in self.makers:
            return self._at(source, place)
        origin = self.place.setdefault(self._lead(source.name), 0)
        if origin == place:
            return self._at(source, place)
        result = self._moved(op.results[0], place)
        self.ops.append(Op("send", (self._at(source, origin),), (result,), {}, op.location))
        return result

    def _at(self, value: Value, place: int) -> Value:
        """The value at a place; one that is made from nothing is made there."""
        if (value.name, place) not in self.values:
            op = self.makers[value.name]
            taken = any(name == value.name for name, _ in self.values)
            for result in op.results:
                moved = self._moved(result, place)
                moved = replace(moved, name=fresh_name(moved.name, self.names)) if taken else moved
                self.values[result.name, place] = moved
            results = tuple(self.values[v.name, place] for v in op.results)
            self.ops.append(replace(op, results=results))
        return self.values[value.name, place]

    def _output(self, value: Value) -> Value:
        return self._at(value, 0 if value.name in self.makers else self.place[self._lead(value.name)])

    def _moved(self, value: Value, place: int) -> Value:
        kind = value.placed
        devices = tuple(device + place * self.size for device in kind.devices)
        return Value(value.name, replace(kind, devices=devices))


def _moves(op: Op) -> bool:
    return Trait.PLACE in lookup(op.name, op.location).traits


def _target(op: Op) -> int:
    place = op.attrs["place"]
    assert isinstance(place, int)
    return place


def _torn(op: Op) -> PlacementError:
    operands = ", ".join(f"%{v.name}" for v in op.operands)
    return PlacementError(
        f"{op.name} has operands at several places: {operands}",
        op.location,
        "an op runs on one mesh: redistribute its operands to it",
    )
