"""Stage placement: assign pipeline stages to places, groups of devices that hold the weights of their stages.

The input is laid out on the devices of one place, with the stage of each task. A task runs at the place of its stage,
and so do the producers of its weights and the users of their gradients. Values computed only from inputs are computed
wherever needed; all others are sent from place to place, shard by shard::

    mesh of 2 devices, 3 places       =>   one mesh of 3 x 2, with `pipeline` as its first axis
    %h = call @stage(…) {stage=0, …}  =>   %h @ {0,1} = call @stage(…) on {0,1} {stage=0, …}
                                           %h_1 @ {2,3} = send(%h) {stream="up"}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from distir_relax.ir import (
    CALL,
    WAIT,
    Attribute,
    Function,
    Input,
    Module,
    Op,
    PlacedType,
    RepeatedMicrobatches,
    Value,
    fresh_name,
    producers,
    value_names,
)
from distir_relax.layout import DeviceMesh
from distir_relax.ops import lookup

AXIS = "pipeline"
"""The mesh axis of the places."""

UP, DOWN = "up", "down"
"""The streams on which values are sent to places with later stages, and with earlier ones."""


def place_stages(module: Module, place_of: Sequence[int]) -> Module:
    """Place the stages of a distributed program; ``place_of[s]`` is the place of stage s."""
    mesh = module.meshes[0]
    full_mesh = DeviceMesh((max(place_of) + 1, *mesh.shape), (AXIS, *mesh.axes))
    builder = _PlacementBuilder(module.main, _StagePlacement(module.main, place_of), mesh.size, full_mesh.devices)
    main = builder.function()
    records = tuple(r.renamed(builder.copies) if isinstance(r, RepeatedMicrobatches) else r for r in module.records)
    return replace(module, functions=(main, *module.functions[1:]), meshes=(full_mesh,), records=records)


@dataclass(slots=True)
class _StagePlacement:
    """The place at which each value of a function is computed."""

    main: Function
    place_of: Sequence[int]
    place: dict[str, int] = field(default_factory=dict)
    """The places of the values in `_single`."""
    producers: dict[str, Op] = field(init=False)
    _single: set[str] = field(default_factory=set)
    """Values computed at one place only: they depend on weights, or on tasks."""

    def __post_init__(self) -> None:
        self.producers = producers(self.main)
        self._single.update(i.value.name for i in self.main.inputs if i.role in ("parameter", "state"))
        for op in self.main.ops:
            self._place_op(op)
        # Results that no task or placed value depends on are placed with their operands, above all updated state.
        for op in self.main.ops:
            if op.results[0].name in self._single and op.results[0].name not in self.place:
                placed = [v for v in op.operands if v.name in self.place]
                self._pull_to(op.results[0].name, self._choose(op, placed) if placed else 0)
        for name in self._single:
            self._pull_to(name, 0)

    def _place_op(self, op: Op) -> None:
        single = [v for v in op.operands if v.name in self._single]
        placed = [v for v in single if v.name in self.place]
        if not op.task and not single:
            return
        self._single.update(v.name for v in op.results)
        if op.task or placed:
            place = self.place_of[op.task["stage"]] if op.task else self._choose(op, placed)  # type: ignore[index]
            self.place.update((v.name, place) for v in op.results)
            for value in single:
                self._pull_to(value.name, place)

    def _choose(self, op: Op, placed: Sequence[Value]) -> int:
        """Return the place of an op with operands at several places: that of the one it updates, or of the largest."""
        if not op.callee and lookup(op.name, op.location).code.in_place:
            placed = [v for v in placed if v is op.operands[0]] or placed
        return min((-v.placed.local(0).bytes, self.place[v.name]) for v in placed)[1]

    def _pull_to(self, name: str, place: int) -> None:
        """Place a value that has no place yet, and its producers, where it is first needed."""
        worklist = [name]
        while worklist:
            name = worklist.pop()
            if name in self.place or name not in self._single:
                continue
            self.place[name] = place
            if name in self.producers:
                worklist += [v.name for v in (*self.producers[name].results, *self.producers[name].operands)]

    def needed_at(self) -> dict[str, set[int]]:
        """Return the places at which each value is computed that is computed wherever needed."""
        places: dict[str, set[int]] = {}
        ends = [(o.value.name, self.place.get(o.value.name, 0)) for o in self.main.outputs]
        uses = [(v.name, self.place[op.results[0].name]) for op in self.main.ops if op.results[0].name in self.place
                for v in op.operands]  # fmt: skip
        worklist = [*ends, *uses]
        while worklist:
            name, place = worklist.pop()
            if name in self.place or place in places.setdefault(name, set()):
                continue
            places[name].add(place)
            if name in self.producers:
                worklist += [(v.name, place) for v in self.producers[name].operands]
        return places


@dataclass(slots=True)
class _PlacementBuilder:
    main: Function
    places: _StagePlacement
    size: int
    """The number of devices of a place."""
    all_devices: tuple[int, ...]
    values: dict[tuple[str, int], Value] = field(default_factory=dict)
    """The copies of each value, by place."""
    ops: list[Op] = field(default_factory=list)
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

    def function(self) -> Function:
        main = self.main
        self.names = value_names(main)
        self.stored.update(i.value.name for i in main.inputs if i.role in ("parameter", "state"))
        for op in main.ops:
            task = op.task_name or self._last_task(op)
            self.tasks.update((v.name, task) for v in op.results if task)
            if not op.callee and op.operands and op.operands[0].name in self.stored:
                self.stored.update(v.name for v in op.results if lookup(op.name, op.location).shares_storage)
        needed = self.places.needed_at()
        inputs = tuple(self._input(item, needed.get(item.value.name, set())) for item in main.inputs)
        for op in main.ops:
            place = self.places.place.get(op.results[0].name)
            if place is not None:
                self._emit(op, place)
        outputs = tuple(
            replace(o, value=self._at(o.value, self.places.place.get(o.value.name, 0))) for o in main.outputs
        )
        return replace(main, inputs=inputs, ops=tuple(self.ops), outputs=outputs)

    def _last_task(self, op: Op) -> str:
        return next((self.tasks[v.name] for v in reversed(op.operands) if v.name in self.tasks), "")

    def _input(self, item: Input, needed: set[int]) -> Input:
        """Return an input at its place; one that several places need is on all devices."""
        name = item.value.name
        self.used.add(name)
        places = sorted(needed) or [self.places.place.get(name, 0)]
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
        shape = tuple(d if isinstance(d, int) else replace(d, values=d.values * count) for d in kind.shape)
        return Value(value.name, replace(value.placed, shape=shape))

    def _emit(self, op: Op, place: int) -> None:
        operands = tuple(self._at(v, place) for v in op.operands)
        results = []
        for value in op.results:
            name = value.name if value.name not in self.used else fresh_name(value.name, self.names)
            self.used.add(name)
            self.copies[name] = value.name
            results.append(self._at_place(value, place, name))
            self.values[value.name, place] = results[-1]
        attrs = op.attrs
        if op.name == CALL:
            attrs = {**attrs, "devices": self._map_devices(op.devices or (), place)}
        self.ops.append(replace(op, operands=operands, results=tuple(results), attrs=attrs))

    def _at(self, value: Value, place: int) -> Value:
        """Return the value at a place, sent there if it is computed elsewhere."""
        if (value.name, place) in self.values:
            return self.values[value.name, place]
        home = self.places.place.get(value.name)
        if home is None and value.name in self.places.producers:
            self._emit(self.places.producers[value.name], place)
            return self.values[value.name, place]
        if home is None:
            result = self._at_place(value, place, fresh_name(value.name, self.names))
            self.ops.append(Op("restrict", (self.inputs[value.name],), (result,)))
        else:
            result = self._send(value, home, place)
        self.values[value.name, place] = result
        self.copies[result.name] = value.name
        return result

    def _send(self, value: Value, home: int, place: int) -> Value:
        """Send a value from its place to another, overlapped with computation."""
        producer = self.places.producers.get(value.name)
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
