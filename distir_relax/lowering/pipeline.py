"""Pipeline lowering: stages are placed on groups of devices, and tasks ordered by a schedule.

Schedules that depend on times and memory get those of the program's own tasks, simulated one after the other before
stages are placed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.cost.network import collective_seconds
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op, RepeatedMicrobatches, TaskOrder
from distir_relax.ir.symbols import at_sizes
from distir_relax.layout import Collective
from distir_relax.lowering.gradient_accumulation import accumulate_in_calls, is_microbatch_order
from distir_relax.lowering.schedule_order import order_tasks, task_sequence
from distir_relax.lowering.stage_placement import place_stages
from distir_relax.schedules import Memory, Order, Times, order_of, schedule_named
from distir_relax.simulation.pipeline_tasks import task_times
from distir_relax.simulation.simulator import simulate_module

Tasks = Mapping[tuple[int, str, int], Op]
"""The calls that are tasks, by stage, kind and microbatch."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Pass: distributed stage in and out, from the devices of one place to those of `ranks` places.

    `schedule` is the name of the schedule, `chunks` the number of stages per place. A schedule that depends on times
    and memory gets those of the machine `profile`. Raises the errors of `order_of`, and `DistIRError` if the schedule
    lacks a task of the program.
    """

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"
    schedule: str
    ranks: int
    microbatches: int
    chunks: int = 1
    profile: Profile | None = field(default=None, repr=False)

    def run(self, module: Module) -> Module:
        """Place the stages of the module, and order its tasks.

        If a `RepeatedMicrobatches` record says that some microbatches represent all, the order is a `TaskOrder` record.
        """
        summed = accumulate_in_calls(module)
        repeated = next((record for record in module.records if isinstance(record, RepeatedMicrobatches)), None)
        order = self._order(summed, repeated)
        placed = place_stages(summed if is_microbatch_order(order) else module, order.rank_of)
        if repeated is None:
            return order_tasks(placed, order)
        return replace(placed, records=(*placed.records, TaskOrder(task_sequence(order))))

    def _order(self, module: Module, repeated: RepeatedMicrobatches | None) -> Order:
        shape = (self.schedule, self.ranks, self.microbatches, self.chunks)
        if self.profile is None or schedule_named(self.schedule).weights != "either":
            return order_of(*shape)
        tasks: Tasks = {_key(op): op for op in module.main.ops if op.task}
        count = self.ranks * self.chunks
        ranges = repeated.ranges if repeated else [range(m, m + 1) for m in range(self.microbatches)]
        part_of = {m: number for number, microbatches in enumerate(ranges) for m in microbatches}
        place_of = order_of(*shape).rank_of if self.profile.groups else (0,) * count
        times = self._times(module, tasks, place_of, self.profile, part_of)
        try:
            return order_of(*shape, times, self._memory(module, tasks, count, self.profile))
        except DistIRError:
            # The simulation will report the excess.
            return order_of(*shape, times)

    def _times(
        self, module: Module, tasks: Tasks, place_of: Sequence[int], profile: Profile, part_of: Mapping[int, int]
    ) -> Times:
        """Return the durations of each stage's tasks and of sends to the next stage.

        `place_of` maps stages to places, whose devices may differ; `part_of` maps each microbatch to the number of the
        one in the program that represents it.
        """
        times: dict[tuple[int, str, int], float] = defaultdict(float)
        count, size = len(place_of), module.meshes[0].size
        profiles = {place: profile.without(place * size) for place in set(place_of)}
        for kinds in {tuple(machine.device_specs(size)) for machine in profiles.values()}:
            places = [place for place, machine in profiles.items() if tuple(machine.device_specs(size)) == kinds]
            run = simulate_module(at_sizes(replace(module, records=()), {}), profiles[places[0]])
            # Equal tasks get equal times, to the last bit: rounding errors would break ties between equal orders.
            times.update(
                (_key(t.op), round(t.end - t.start, 13)) for t in task_times(run) if place_of[_key(t.op)[0]] in places
            )
        longest = {
            kind: [max(times[s, kind, m] for m in set(part_of.values())) for s in range(count)] for kind in "FIW"
        }
        total = sum(longest["F"])
        per_microbatch = [sum(times[s, "F", part_of[m]] for s in range(count)) for m in range(self.microbatches)]
        sends = []
        for stage in range(count - 1):
            passed = _passed_bytes(tasks.get((stage, "F", 0)), tasks.get((stage + 1, "F", 0)))
            sends.append(collective_seconds(profile, Collective.SEND, (0, size), (passed, passed)) if passed else 0.0)
        factors = [seconds / total for seconds in per_microbatch] if total else []
        return Times(longest["F"], longest["I"], longest["W"], [*sends, 0.0], factors)

    def _memory(self, module: Module, tasks: Tasks, count: int, profile: Profile) -> Memory:
        """Return the activation memory of tasks, and the memory free for it besides weights, gradients and state."""
        activations = []
        stored = [0] * count
        counted: set[str] = set()
        stored_inputs = {i.value.name: i for i in module.main.inputs if i.role in ("parameter", "state")}
        stored_bytes = sum(i.value.placed.local(0).bytes for i in stored_inputs.values())
        weight_bytes = sum(i.value.placed.local(0).bytes for i in stored_inputs.values() if i.role == "parameter")
        for stage in range(count):
            forward = tasks.get((stage, "F", 0))
            activations.append(_passed_bytes(forward, *(tasks.get((stage, kind, 0)) for kind in "IW")))
            for value in forward.operands if forward else ():
                if value.name in stored_inputs and value.name not in counted:
                    counted.add(value.name)
                    stored[stage] += value.placed.local(0).bytes
        # State and gradients are proportional to weights, on every place.
        share = (stored_bytes + weight_bytes) / weight_bytes if weight_bytes else 0.0
        size = module.meshes[0].size
        memory = [memory for _, memory in profile.device_specs(self.ranks * size)]
        capacities = [min(memory[place * size : (place + 1) * size]) for place in range(self.ranks)]
        free = min(capacity - sum(stored[place :: self.ranks]) * share for place, capacity in enumerate(capacities))
        return Memory(max(0.0, free), activations)


def _key(op: Op) -> tuple[int, str, int]:
    stage, kind, microbatch = (op.task[key] for key in ("stage", "kind", "microbatch"))
    return stage, kind, microbatch  # type: ignore[return-value]


def _passed_bytes(producer: Op | None, *users: Op | None) -> int:
    """Return the bytes per device of results of one call that others use."""
    used = {v.name for user in users if user for v in user.operands}
    return sum(v.placed.local(0).bytes for v in (producer.results if producer else ()) if v.name in used)
