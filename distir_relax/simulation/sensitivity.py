"""Sensitivity of a step to each resource of the machine: its time if the resource were faster, by simulating again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distir_relax.cost.profile import Profile
from distir_relax.cost.scaling import faster, has
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulation_plan import SimulationPlan
from distir_relax.simulation.simulator import simulate_module

RESOURCES = {
    "flops": "device.flops",
    "memory bandwidth": "device.bandwidth",
    "op overhead": "device.overhead",
    "host": "runtime.times",
    "network bandwidth": "network.bandwidth",
    "network latency": "network.latency",
}
"""The families of figures that are scaled; those of the network for each of its levels too."""

UNLIMITED = 1e12
"""The factor that stands for infinitely fast: the time that remains of a second is a picosecond."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Seconds of a step if a resource, the family or figures `name`, were twice as fast, and infinitely fast."""

    resource: str
    name: str
    twice: float
    unlimited: float


@dataclass(frozen=True)
class Sensitivity:
    """The gains of each resource, largest first; `seconds` is the time of a step on the machine as it is."""

    seconds: float
    gains: tuple[Gain, ...]

    @property
    def bound_by(self) -> str | None:
        """The resource that saves most if it is twice as fast; None if none saves anything."""
        return self.gains[0].resource if self.gains and self.gains[0].unlimited < self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain numbers and lists, for JSON."""
        return {
            "makespan_s": self.seconds,
            "bound_by": self.bound_by,
            "resources": [
                {"resource": g.resource, "figure": g.name, "twice_s": g.twice, "unlimited_s": g.unlimited}
                for g in self.gains
            ],
        }


def sensitivity(simulation: Simulation) -> Sensitivity:
    """Simulate the program again with each resource faster; its plan is shared.

    A family of the network is divided into its levels where there are several and the family saves time.
    """
    return _gains(_Repeated(simulation))


def sensitivity_within(simulation: Simulation, limit: float) -> Sensitivity | None:
    """Return the sensitivity, None if one simulation takes more than `limit` seconds."""
    start = time.perf_counter()
    repeated = _Repeated(simulation)
    return _gains(repeated) if time.perf_counter() - start <= limit else None


@dataclass
class _Repeated:
    """Simulates a program on faster machines."""

    simulation: Simulation
    plan: SimulationPlan = field(init=False)
    base: float = field(init=False)
    """The seconds of a step on the machine as it is."""

    def __post_init__(self) -> None:
        self.plan = SimulationPlan(self.simulation.module, self.simulation.profile)
        self.base = simulate_module(self.simulation.module, self.simulation.profile, self.plan).makespan

    def gain(self, resource: str, name: str) -> Gain:
        """Return the times with a faster resource."""
        module, profile = self.simulation.module, self.simulation.profile
        times = [simulate_module(module, faster(profile, (name,), f), self.plan).makespan for f in (2.0, UNLIMITED)]
        return Gain(resource, name, *times)


def _gains(repeated: _Repeated) -> Sensitivity:
    profile, base, gains = repeated.simulation.profile, repeated.base, []
    for resource, name in RESOURCES.items():
        if not has(profile, name):
            continue
        gains.append(repeated.gain(resource, name))
        if gains[-1].unlimited < base:
            gains += [repeated.gain(*item) for item in _levels(profile, resource, name)]
    return Sensitivity(base, tuple(sorted(gains, key=lambda gain: (gain.twice, gain.unlimited))))


def _levels(profile: Profile, resource: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a family of the network, one for each level, if there are several."""
    table, _, figure = name.partition(".")
    if table == "network" and len(profile.levels) > 1:
        figures = (figure, "uplink") if figure == "bandwidth" else (figure,)
        names = [(f"{level.name} {f}", f"level.{level.name}.{f}") for level in profile.levels for f in figures]
        yield from (item for item in names if has(profile, item[1]))
