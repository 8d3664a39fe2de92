"""The stages of a pipeline at their places: groups of devices, each of which holds the weights of its stages.

The program comes laid out on the devices of one place, its tasks saying of which stage they are. A task runs at the
place of its stage, and with it what its weights are made of and what becomes of their gradients. What is made of inputs
alone is made wherever it is needed; all else goes from one place to the next by `send`, shard by shard::

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
    Repeated,
    Value,
    fresh_name,
    makers,
    value_names,
)
from distir_relax.layout import DeviceMesh
from distir_relax.ops import lookup

AXIS = "pipeline"
"""The mesh axis of the places."""

UP, DOWN = "up", "down"
"""The streams on which values go to places with later stages, and with earlier ones."""


def place_stages(module: Module, place_of: Sequence[int]) -> Module:
    """A module of the distributed stage on the devices of all places; ``place_of[s]`` is that of stage s."""
    mesh = module.meshes[0]
    whole = DeviceMesh((max(place_of) + 1, *mesh.shape), (AXIS, *mesh.axes))
    writer = _Writer(module.main, _Places(module.main, place_of), mesh.size, whole.devices)
    main = writer.function()
    records = tuple(r.renamed(writer.copies) if isinstance(r, Repeated) else r for r in module.records)
    return replace(module, functions=(main, *module.functions[1:]), meshes=(whole,), records=records)


@dataclass(slots=True)
class _Places:
    """Where each value of a function is made."""

    main: Function
    place_of: Sequence[int]
    of: dict[str, int] = field(default_factory=dict)
    """The places of the values that are made once."""
    makers: dict[str, Op] = field(init=False)
    _pinned: set[str] = field(default_factory=set)
    """The values that are made once: they depend on weights, or on tasks."""

    def __post_init__(self) -> None:
        self.makers = makers(self.main)
        self._pinned.update(i.value.name for i in self.main.inputs if i.role in ("parameter", "state"))
        for op in self.main.ops:
            self._place(op)
        # Results that no task and no placed value depend on: where their operands are, state with its update above all.
        for op in self.main.ops:
            if op.results[0].name in self._pinned and op.results[0].name not in self.of:
                known = [v for v in op.operands if v.name in self.of]
                self._pull(op.results[0].name, self._choose(op, known) if known else 0)
        for name in self._pinned:
            self._pull(name, 0)

    def _place(self, op: Op) -> None:
        pinned = [v for v in op.operands if v.name in self._pinned]
        known = [v for v in pinned if v.name in self.of]
        if not op.task and not pinned:
            return
        self._pinned.update(v.name for v in op.results)
        if op.task or known:
            place = self.place_of[op.task["stage"]] if op.task else self._choose(op, known)  # type: ignore[index]
            self.of.update((v.name, place) for v in op.results)
            for value in pinned:
                self._pull(value.name, place)

    def _choose(self, op: Op, known: Sequence[Value]) -> int:
        """Where an op runs whose operands are at several places: at what it updates, or else at the largest."""
        if not op.callee and lookup(op.name, op.location).code.in_place:
            known = [v for v in known if v is op.operands[0]] or known
        return min((-v.placed.local(0).bytes, self.of[v.name]) for v in known)[1]

    def _pull(self, name: str, place: int) -> None:
        """What is placed nowhere yet, and all that it is made of, is where it is first needed."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in self.of or name not in self._pinned:
                continue
            self.of[name] = place
            if name in self.makers:
                waiting += [v.name for v in (*self.makers[name].results, *self.makers[name].operands)]

    def needed_at(self) -> dict[str, set[int]]:
        """At which places each value is that is made wherever it is needed."""
        found: dict[str, set[int]] = {}
        ends = [(o.value.name, self.of.get(o.value.name, 0)) for o in self.main.outputs]
        uses = [(v.name, self.of[op.results[0].name]) for op in self.main.ops if op.results[0].name in self.of
                for v in op.operands]  # fmt: skip
        waiting = [*ends, *uses]
        while waiting:
            name, place = waiting.pop()
            if name in self.of or place in found.setdefault(name, set()):
                continue
            found[name].add(place)
            if name in self.makers:
                waiting += [(v.name, place) for v in self.makers[name].operands]
        return found


@dataclass(slots=True)
class _Writer:
    main: Function
    places: _Places
    size: int
    """The devices of one place."""
    everywhere: tuple[int, ...]
    values: dict[tuple[str, int], Value] = field(default_factory=dict)
    """Each value at the places where it is."""
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    inputs: dict[str, Value] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)
    """The last task that each value is made of."""
    lasting: set[str] = field(default_factory=set)
    """The values in whose storage the program may write: weights, and views of them."""
    devices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    """What is made again at another place, or sent there: the name of the value, by the new one."""
    kinds: dict[tuple[int, int], tuple[PlacedType, PlacedType]] = field(default_factory=dict)
    """Each type at each place, with the type itself, by which it is looked up."""

    def function(self) -> Function:
        given = self.main
        self.names = value_names(given)
        self.lasting.update(i.value.name for i in given.inputs if i.role in ("parameter", "state"))
        for op in given.ops:
            task = op.task_name or self._task_behind(op)
            self.tasks.update((v.name, task) for v in op.results if task)
            if not op.callee and op.operands and op.operands[0].name in self.lasting:
                self.lasting.update(v.name for v in op.results if lookup(op.name, op.location).shares_storage)
        needed = self.places.needed_at()
        inputs = tuple(self._input(item, needed.get(item.value.name, set())) for item in given.inputs)
        for op in given.ops:
            place = self.places.of.get(op.results[0].name)
            if place is not None:
                self._write(op, place)
        outputs = tuple(replace(o, value=self._at(o.value, self.places.of.get(o.value.name, 0))) for o in given.outputs)
        return replace(given, inputs=inputs, ops=tuple(self.ops), outputs=outputs)

    def _task_behind(self, op: Op) -> str:
        return next((self.tasks[v.name] for v in reversed(op.operands) if v.name in self.tasks), "")

    def _input(self, item: Input, needed: set[int]) -> Input:
        """An input at its place; one that several need is given to all."""
        name = item.value.name
        self.used.add(name)
        places = sorted(needed) or [self.places.of.get(name, 0)]
        if len(places) > 1:
            value = Value(name, replace(item.value.placed, devices=self.everywhere))
            value = self._spread(value, item.value.placed)
            self.inputs[name] = value
        else:
            value = self.values[name, places[0]] = self._moved(item.value, places[0], name)
        return replace(item, value=value)

    def _spread(self, value: Value, kind: PlacedType) -> Value:
        """The value with what the devices of each place hold, which is alike."""
        count = len(self.everywhere) // self.size
        shape = tuple(d if isinstance(d, int) else replace(d, values=d.values * count) for d in kind.shape)
        return Value(value.name, replace(value.placed, shape=shape))

    def _write(self, op: Op, place: int) -> None:
        operands = tuple(self._at(v, place) for v in op.operands)
        results = []
        for value in op.results:
            name = value.name if value.name not in self.used else fresh_name(value.name, self.names)
            self.used.add(name)
            self.copies[name] = value.name
            results.append(self._moved(value, place, name))
            self.values[value.name, place] = results[-1]
        attrs = op.attrs
        if op.name == CALL:
            attrs = {**attrs, "devices": self._on(op.devices or (), place)}
        self.ops.append(replace(op, operands=operands, results=tuple(results), attrs=attrs))

    def _at(self, value: Value, place: int) -> Value:
        """The value at a place: sent there, if it is made elsewhere."""
        if (value.name, place) in self.values:
            return self.values[value.name, place]
        home = self.places.of.get(value.name)
        if home is None and value.name in self.places.makers:
            self._write(self.places.makers[value.name], place)
            return self.values[value.name, place]
        if home is None:
            result = self._moved(value, place, fresh_name(value.name, self.names))
            self.ops.append(Op("restrict", (self.inputs[value.name],), (result,)))
        else:
            result = self._sent(value, home, place)
        self.values[value.name, place] = result
        self.copies[result.name] = value.name
        return result

    def _sent(self, value: Value, home: int, place: int) -> Value:
        """The value sent from its place to another, beside what both compute."""
        maker = self.places.makers.get(value.name)
        where = maker.location if maker else ""
        sent = self._moved(value, place, fresh_name(value.name, self.names))
        here = replace(sent, name=fresh_name(f"{sent.name}.here", self.names))
        attrs: dict[str, Attribute] = {"stream": UP if place > home else DOWN}
        if value.name in self.lasting:
            attrs["copy"] = True
        if value.name in self.tasks:
            attrs["task"] = self.tasks[value.name]
        self.ops.append(Op("send", (self.values[value.name, home],), (sent,), attrs, where))
        self.ops.append(Op(WAIT, (sent,), (here,), {}, where))
        return here

    def _moved(self, value: Value, place: int, name: str) -> Value:
        kind = value.placed
        key = id(kind), place
        if key not in self.kinds:
            self.kinds[key] = kind, replace(kind, devices=self._on(kind.devices, place))
        return Value(name, self.kinds[key][1])

    def _on(self, devices: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Devices of the first place, at another. Sets that are equal are one object: they are looked up by it."""
        if len(devices) != self.size:
            return tuple(d + place * self.size for d in devices)
        first = place * self.size
        return self.devices.setdefault(place, tuple(range(first, first + self.size)))
