"""Stage placement: assign pipeline stages to places, groups of devices that hold the weights of their stages.

The input is laid out on the devices of one place, with the stage of each task. A task runs at the place of its stage,
and so do the producers of its weights and the users of their gradients. Values computed only from inputs are computed
wherever needed; all others are sent from place to place, shard by shard::

    mesh of 2 devices, 3 places       =>   one mesh of 3 x 2, with `pipeline` as its first axis
    %h = call @stage(…) {stage=0, …}  =>   %h @ {0,1} = call @stage(…) on {0,1} {stage=0, …}
                                           %h_1 @ {2,3} = send(%h) {stream="up"}
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.ir import CachedState, Function, Module, Op, RepeatedMicrobatches, Value, producers
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.placement_builder import PlacementBuilder
from distir_relax.ops import Trait, lookup

AXIS = "pipeline"
"""The mesh axis of the places."""


def place_stages(module: Module, place_of: Sequence[int]) -> Module:
    """Place the stages of a distributed program; ``place_of[s]`` is the place of stage s."""
    mesh = module.meshes[0]
    full_mesh = DeviceMesh((max(place_of) + 1, *mesh.shape), (AXIS, *mesh.axes))
    states = {record.input for record in module.records if isinstance(record, CachedState)}
    placement = _StagePlacement(module.main, place_of, states)
    builder = PlacementBuilder(module.main, placement.place, placement.use_places(), mesh.size, full_mesh.devices)
    main = builder.function()
    records = tuple(r.renamed(builder.copies) if isinstance(r, RepeatedMicrobatches) else r for r in module.records)
    return replace(module, functions=(main, *module.functions[1:]), meshes=(full_mesh,), records=records)


def _is_gather(op: Op) -> bool:
    """Return whether an op collects more on each device than it had there."""
    if op.callee or Trait.COMMUNICATES not in lookup(op.name, op.location).traits:
        return False
    before, after = (sum(v.placed.local(0).bytes for v in values) for values in (op.operands, op.results))
    return after > before


@dataclass(slots=True)
class _StagePlacement:
    """The place at which each value of a function is computed."""

    main: Function
    place_of: Sequence[int]
    states: Collection[str]
    """The inputs with what earlier calls have left: the place of such a state is that of its next value."""
    place: dict[str, int] = field(default_factory=dict)
    """The places of the values in `_single`."""
    producers: dict[str, Op] = field(init=False)
    _single: set[str] = field(default_factory=set)
    """Values computed at one place only: they depend on weights or states, or on tasks."""

    def __post_init__(self) -> None:
        self.producers = producers(self.main)
        self._single.update(i.value.name for i in self.main.inputs if i.role in ("parameter", "state"))
        self._single.update(self.states)
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
        if not op.task and _is_gather(op):
            # It is computed where it is used first: parts are sent there, rather than the whole.
            return
        if op.task or placed:
            place = self.place_of[op.task["stage"]] if op.task else self._choose(op, placed)  # type: ignore[index]
            self.place.update((v.name, place) for v in op.results)
            for value in single:
                self._pull_to(value.name, place)

    def _choose(self, op: Op, placed: Sequence[Value]) -> int:
        """Return the place of an op with operands at several places: that of the one it updates, or of the largest."""
        if not op.callee and lookup(op.name, op.location).updates:
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

    def use_places(self) -> dict[str, set[int]]:
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
