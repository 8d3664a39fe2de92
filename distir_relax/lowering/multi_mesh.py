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
from distir_relax.ir import Function, Module, Op, Value, fresh_name, value_names
from distir_relax.layout import DeviceMesh
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
        main = _Places(module.main, mesh.size).function()
        return replace(module, functions=(main,), meshes=(full_mesh,))


@dataclass(slots=True)
class _Places:
    function_: Function
    size: int
    """The number of devices of a place."""
    parents: dict[str, str] = field(default_factory=dict)
    """Union-find of values at the same place."""
    place: dict[str, int] = field(default_factory=dict)
    """The place of a group, by its representative."""
    values: dict[tuple[str, int], Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    constants: dict[str, Op] = field(default_factory=dict)
    """Values of ops without operands: each place that needs one computes it."""

    def function(self) -> Function:
        """Return the function with every value at its place."""
        function = self.function_
        self.names = value_names(function)
        self._find()
        inputs = []
        for item in function.inputs:
            place = self.place.setdefault(self._representative(item.value.name), 0)
            value = self.values[item.value.name, place] = self._on_place(item.value, place)
            inputs.append(replace(item, value=value))
        for op in function.ops:
            self._write(op)
        outputs = tuple(replace(o, value=self._output(o.value)) for o in function.outputs)
        return replace(function, inputs=tuple(inputs), ops=tuple(self.ops), outputs=outputs)

    def _find(self) -> None:
        """Find groups of values at the same place, and their places."""
        ops = self.function_.ops
        for op in ops:
            names = [v.name for v in (*op.operands, *op.results)]
            if _is_transfer(op):
                self._place_at(op, op.results[0].name)
            elif not op.operands:
                self.constants.update((v.name, op) for v in op.results)
            else:
                self._join(op, [name for name in names if name not in self.constants])
        for op in ops:
            # A value whose place is not determined is placed where it is first needed.
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

    def _write(self, op: Op) -> None:
        if not op.operands:
            return
        place = self.place.setdefault(self._representative(op.results[0].name), 0)
        if _is_transfer(op):
            self.values[op.results[0].name, place] = self._send(op, place)
            return
        operands = tuple(self._at(v, place) for v in op.operands)
        results = tuple(self._on_place(v, place) for v in op.results)
        self.values.update(((v.name, place), v) for v in results)
        self.ops.append(replace(op, operands=operands, results=results))

    def _send(self, op: Op, place: int) -> Value:
        source = op.operands[0]
        if source.name in self.constants:
            return self._at(source, place)
        origin = self.place.setdefault(self._representative(source.name), 0)
        if origin == place:
            return self._at(source, place)
        result = self._on_place(op.results[0], place)
        self.ops.append(Op("send", (self._at(source, origin),), (result,), {}, op.location))
        return result

    def _at(self, value: Value, place: int) -> Value:
        """Return the value at a place; constants are computed there."""
        if (value.name, place) not in self.values:
            op = self.constants[value.name]
            exists_elsewhere = any(name == value.name for name, _ in self.values)
            for result in op.results:
                copy = self._on_place(result, place)
                copy = replace(copy, name=fresh_name(copy.name, self.names)) if exists_elsewhere else copy
                self.values[result.name, place] = copy
            results = tuple(self.values[v.name, place] for v in op.results)
            self.ops.append(replace(op, results=results))
        return self.values[value.name, place]

    def _output(self, value: Value) -> Value:
        return self._at(value, 0 if value.name in self.constants else self.place[self._representative(value.name)])

    def _on_place(self, value: Value, place: int) -> Value:
        kind = value.placed
        devices = tuple(device + place * self.size for device in kind.devices)
        return Value(value.name, replace(kind, devices=devices))


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
