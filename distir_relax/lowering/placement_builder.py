"""Builder of programs on several places, groups of devices, from a program on the devices of one.

Every value is computed at its place, and sent to the places that need it, shard by shard; values that depend on inputs
alone are computed wherever needed. `stage_placement` and `multi_mesh` determine the places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distir_relax.ir import (
    WAIT,
    Attribute,
    Function,
    Input,
    Op,
    PerRank,
    PlacedType,
    Value,
    fresh_name,
    producers,
    value_names,
)
from distir_relax.ops import Trait, lookup

UP, DOWN = "up", "down"
"""The streams on which values are sent to later places, and to earlier ones."""


@dataclass(slots=True)
class PlacementBuilder:
    """Builds a function on the devices of all places from that on the devices of one place.

    `place` has the place of each value that is computed at one place only; the others are computed at the places
    `use_places` of each.
    """

    main: Function
    place: Mapping[str, int]
    use_places: Mapping[str, set[int]]
    size: int
    """The number of devices of a place."""
    all_devices: tuple[int, ...]
    values: dict[tuple[str, int], Value] = field(default_factory=dict)
    """The copies of each value, by place."""
    ops: list[Op] = field(default_factory=list)
    producers: Mapping[str, Op] = field(init=False)
    names: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    inputs: dict[str, Value] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)
    """The last task that each value depends on."""
    stored: set[str] = field(default_factory=set)
    """Values whose storage the program may overwrite: weights, and views of them."""
    devices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    """The original name of each copy that is computed or received at another place, by its new name."""
    types: dict[tuple[int, int], tuple[PlacedType, PlacedType]] = field(default_factory=dict)
    """Cache of types by identity and place, with the original, which must stay alive."""

    def __post_init__(self) -> None:
        self.producers = producers(self.main)

    def function(self) -> Function:
        """Return the function; `copies` then has the original names of values."""
        main = self.main
        self.names = value_names(main)
        self.stored.update(i.value.name for i in main.inputs if i.role in ("parameter", "state"))
        for op in main.ops:
            task = op.task_name or self._last_task(op)
            self.tasks.update((v.name, task) for v in op.results if task)
            if not op.callee and op.operands and op.operands[0].name in self.stored:
                self.stored.update(v.name for v in op.results if lookup(op.name, op.location).shares_storage)
        inputs = tuple(self._input(item, self.use_places.get(item.value.name, set())) for item in main.inputs)
        for op in main.ops:
            place = self.place.get(op.results[0].name)
            if place is not None:
                self._emit(op, place)
        outputs = tuple(replace(o, value=self._at(o.value, self.place.get(o.value.name, 0))) for o in main.outputs)
        return replace(main, inputs=inputs, ops=tuple(self.ops), outputs=outputs)

    def _last_task(self, op: Op) -> str:
        return next((self.tasks[v.name] for v in reversed(op.operands) if v.name in self.tasks), "")

    def _input(self, item: Input, places_of_use: set[int]) -> Input:
        """Return an input at its place; one that several places need is on all devices."""
        name = item.value.name
        self.used.add(name)
        places = sorted(places_of_use) or [self.place.get(name, 0)]
        if len(places) > 1:
            value = Value(name, replace(item.value.placed, devices=self.all_devices))
            value = self._repeat_shape(value, item.value.placed)
            self.inputs[name] = value
        else:
            value = self.values[name, places[0]] = self._at_place(item.value, places[0], name)
        return replace(item, value=value)

    def _repeat_shape(self, value: Value, kind: PlacedType) -> Value:
        """Repeat the per-device sizes of one place for all places."""
        count = len(self.all_devices) // self.size
        shape = tuple(replace(d, values=d.values * count) if isinstance(d, PerRank) else d for d in kind.shape)
        return Value(value.name, replace(value.placed, shape=shape))

    def _emit(self, op: Op, place: int) -> None:
        if Trait.PLACE in lookup(op.name, op.location).traits:
            self.values[op.results[0].name, place] = self._transfer(op, place)
            return
        operands = tuple(self._at(v, place) for v in op.operands)
        results = []
        for value in op.results:
            name = value.name if value.name not in self.used else fresh_name(value.name, self.names)
            self.used.add(name)
            self.copies[name] = value.name
            results.append(self._at_place(value, place, name))
            self.values[value.name, place] = results[-1]
        attrs = op.attrs
        if op.callee:
            attrs = {**attrs, "devices": self._map_devices(op.devices or (), place)}
        self.ops.append(replace(op, operands=operands, results=tuple(results), attrs=attrs))

    def _at(self, value: Value, place: int) -> Value:
        """Return the value at a place, sent there if it is computed elsewhere."""
        if (value.name, place) in self.values:
            return self.values[value.name, place]
        home = self.place.get(value.name)
        if home is None and value.name in self.producers:
            self._emit(self.producers[value.name], place)
            return self.values[value.name, place]
        if home is None:
            result = self._at_place(value, place, fresh_name(value.name, self.names))
            self.ops.append(Op("restrict", (self.inputs[value.name],), (result,)))
        else:
            result = self._send(value, home, place)
        self.values[value.name, place] = result
        self.copies[result.name] = value.name
        return result

    def _transfer(self, op: Op, place: int) -> Value:
        """Return the operand of an explicit transfer at its place, sent there if it is computed elsewhere."""
        source = op.operands[0]
        home = self.place.get(source.name)
        if home is None or home == place:
            return self._at(source, place)
        self.used.add(op.results[0].name)
        result = self._at_place(op.results[0], place, op.results[0].name)
        self.ops.append(Op("send", (self._at(source, home),), (result,), {}, op.location))
        return result

    def _send(self, value: Value, home: int, place: int) -> Value:
        """Send a value from its place to another, overlapped with computation."""
        producer = self.producers.get(value.name)
        location = producer.location if producer else ""
        received = self._at_place(value, place, fresh_name(value.name, self.names))
        ready = replace(received, name=fresh_name(f"{received.name}.here", self.names))
        attrs: dict[str, Attribute] = {"stream": UP if place > home else DOWN}
        if value.name in self.stored:
            attrs["copy"] = True
        if value.name in self.tasks:
            attrs["task"] = self.tasks[value.name]
        self.ops.append(Op("send", (self.values[value.name, home],), (received,), attrs, location))
        self.ops.append(Op(WAIT, (received,), (ready,), {}, location))
        return ready

    def _at_place(self, value: Value, place: int, name: str) -> Value:
        kind = value.placed
        key = id(kind), place
        if key not in self.types:
            self.types[key] = kind, replace(kind, devices=self._map_devices(kind.devices, place))
        return Value(name, self.types[key][1])

    def _map_devices(self, devices: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Map devices of the first place to another. Equal sets are one object: they are cached by identity."""
        if len(devices) != self.size:
            return tuple(d + place * self.size for d in devices)
        first = place * self.size
        return self.devices.setdefault(place, tuple(range(first, first + self.size)))
