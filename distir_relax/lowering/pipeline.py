"""Pipelines: the stages of a program at their places, its tasks in the order of a schedule.

A schedule that looks at times and memory gets those of the program's own tasks: they are simulated before there are
places, one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.analysis.pipeline_tasks import task_times
from distir_relax.analysis.simulator import simulate_module
from distir_relax.cost.network import seconds_of
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, Op, Repeated, Scheduled
from distir_relax.layout import Collective
from distir_relax.lowering.gradient_accumulation import accumulate_in_calls, is_in_turn
from distir_relax.lowering.schedule_order import in_sequence, order_tasks
from distir_relax.lowering.stage_placement import place_stages
from distir_relax.schedules import Memory, Order, Times, order_of, schedule_named

Tasks = Mapping[tuple[int, str, int], Op]
"""The calls that are tasks, by stage, kind and microbatch."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The pass: distributed stage in and out, from the devices of one place to those of `ranks` places.

    `schedule` is the name of the schedule, `chunks` how many stages each place has. One that looks at times and memory
    is told those of the tasks on the machine of `profile`. Raises what `order_of` raises, and `DistIRError` where the
    schedule lacks a task of the program.
    """

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"
    schedule: str
    ranks: int
    microbatches: int
    chunks: int = 1
    profile: Profile | None = field(default=None, repr=False)

    def run(self, module: Module) -> Module:
        """The module with its stages at their places, in order.

        Where a `Repeated` record says that some microbatches stand for all, the order is a `Scheduled` record.
        """
        summed = accumulate_in_calls(module)
        repeated = next((record for record in module.records if isinstance(record, Repeated)), None)
        order = self._order(summed, repeated)
        placed = place_stages(summed if is_in_turn(order) else module, order.rank_of)
        if repeated is None:
            return order_tasks(placed, order)
        return replace(placed, records=(*placed.records, Scheduled(" ".join(in_sequence(order)))))

    def _order(self, module: Module, repeated: Repeated | None) -> Order:
        shape = (self.schedule, self.ranks, self.microbatches, self.chunks)
        if self.profile is None or schedule_named(self.schedule).weights != "either":
            return order_of(*shape)
        tasks: Tasks = {_key(op): op for op in module.main.ops if op.task}
        count = self.ranks * self.chunks
        parts = repeated.ranges if repeated else [range(m, m + 1) for m in range(self.microbatches)]
        part_of = {m: number for number, part in enumerate(parts) for m in part}
        place_of = order_of(*shape).rank_of if self.profile.groups else (0,) * count
        times = self._times(module, tasks, place_of, self.profile, part_of)
        try:
            return order_of(*shape, times, self._memory(module, tasks, count, self.profile))
        except DistIRError:
            # A simulation says by how much nothing fits, and what would.
            return order_of(*shape, times)

    def _times(
        self, module: Module, tasks: Tasks, place_of: Sequence[int], profile: Profile, part_of: Mapping[int, int]
    ) -> Times:
        """How long the tasks of each stage take, and their results to the next.

        `place_of` says on whose devices a stage is, where those are unlike; `part_of` which microbatch of the program
        stands for each.
        """
        taken: dict[tuple[int, str, int], float] = defaultdict(float)
        count, size = len(place_of), module.meshes[0].size
        machines = {place: profile.without(place * size) for place in set(place_of)}
        for kinds in {tuple(machine.kinds(size)) for machine in machines.values()}:
            places = [place for place, machine in machines.items() if tuple(machine.kinds(size)) == kinds]
            alone = simulate_module(replace(module, records=()), machines[places[0]])
            # Equal tasks take equal times, to the last bit: what is left of rounding would choose between equal orders.
            taken.update(
                (_key(t.op), round(t.end - t.start, 13)) for t in task_times(alone) if place_of[_key(t.op)[0]] in places
            )
        longest = {
            kind: [max(taken[s, kind, m] for m in set(part_of.values())) for s in range(count)] for kind in "FIW"
        }
        whole = sum(longest["F"])
        each = [sum(taken[s, "F", part_of[m]] for s in range(count)) for m in range(self.microbatches)]
        sends = []
        for stage in range(count - 1):
            passed = _passed(tasks.get((stage, "F", 0)), tasks.get((stage + 1, "F", 0)))
            sends.append(seconds_of(profile, Collective.SEND, (0, size), (passed, passed)) if passed else 0.0)
        factors = [part / whole for part in each] if whole else []
        return Times(longest["F"], longest["I"], longest["W"], [*sends, 0.0], factors)

    def _memory(self, module: Module, tasks: Tasks, count: int, profile: Profile) -> Memory:
        """What tasks keep, and what is left for it besides weights, their gradients and their state."""
        kept = []
        held = [0] * count
        seen: set[str] = set()
        roles = {i.value.name: i for i in module.main.inputs if i.role in ("parameter", "state")}
        lasting = sum(i.value.placed.local(0).bytes for i in roles.values())
        weights = sum(i.value.placed.local(0).bytes for i in roles.values() if i.role == "parameter")
        for stage in range(count):
            forward = tasks.get((stage, "F", 0))
            kept.append(_passed(forward, *(tasks.get((stage, kind, 0)) for kind in "IW")))
            for value in forward.operands if forward else ():
                if value.name in roles and value.name not in seen:
                    seen.add(value.name)
                    held[stage] += value.placed.local(0).bytes
        # State and gradients are as large as their weights, wherever these are.
        share = (lasting + weights) / weights if weights else 0.0
        size = module.meshes[0].size
        memory = [memory for _, memory in profile.kinds(self.ranks * size)]
        rooms = [min(memory[place * size : (place + 1) * size]) for place in range(self.ranks)]
        free = min(room - sum(held[place :: self.ranks]) * share for place, room in enumerate(rooms))
        return Memory(max(0.0, free), kept)


def _key(op: Op) -> tuple[int, str, int]:
    stage, kind, microbatch = (op.task[key] for key in ("stage", "kind", "microbatch"))
    return stage, kind, microbatch  # type: ignore[return-value]


def _passed(maker: Op | None, *users: Op | None) -> int:
    """The bytes on a device of what one call makes and others use."""
    used = {v.name for user in users if user for v in user.operands}
    return sum(v.placed.local(0).bytes for v in (maker.results if maker else ()) if v.name in used)
