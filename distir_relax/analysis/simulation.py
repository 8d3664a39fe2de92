"""What a simulation found: makespan, each device's time line, memory and where it peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.analysis.memory_categories import CATEGORIES
from distir_relax.analysis.op_timer import COMMUNICATION, COMPUTE, FEMTOSECONDS
from distir_relax.cost.profile import Profile
from distir_relax.ir import Module, Op
from distir_relax.support.units import count, seconds, size

MemoryCurve = list[tuple[float, tuple[int, ...]]]
"""Live bytes by category, from a time in seconds on."""


@dataclass(frozen=True, slots=True)
class Event:
    """An op that keeps classes of devices busy, in femtoseconds from the start of its function."""

    op: Op
    classes: tuple[int, ...]
    start: int
    duration: int
    kind: int
    stream: int


@dataclass(frozen=True, slots=True)
class Change:
    """Memory taken (bytes > 0) or given back on one class, at a time from the start of its function."""

    time: int
    device_class: int
    bytes: int
    category: int


@dataclass(frozen=True, slots=True)
class Called:
    """A call: the events and changes of its function, from `base` on."""

    op: Op
    events: list[Event | Called]
    changes: list[Change | Called]
    base: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory live at once: its bytes, how it splits into categories, and the op at which it stands.

    `ops` leads from the entry function through calls to the op; it is empty where the inputs alone are the peak, or
    what happens after the last op (`note`).
    """

    bytes: int
    split: tuple[int, ...]
    ops: tuple[Op, ...]
    note: str = "the inputs"

    def __str__(self) -> str:
        if not self.ops:
            return self.note
        path = " in ".join(_named(op) for op in reversed(self.ops))
        return f"{path}{f' ({self.ops[-1].location})' if self.ops[-1].location else ''}"


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another strategy for a program that does not fit: the nearest that does, or what needs least of those tried.

    Its `peak` is in bytes, on the device that it fills most; `times` is its makespan by that of the program. `tried` is
    how many strategies were simulated.
    """

    strategy: str
    devices: int
    fits: bool
    peak: int
    times: float
    tried: int

    def __str__(self) -> str:
        change = self.times - 1.0
        speed = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}" if abs(change) >= 0.005 else "as fast"
        if self.fits:
            return f"{self.strategy} would ({size(self.peak)}, {speed})"
        which = "the other strategy tried" if self.tried == 1 else f"none of {self.tried} other strategies tried"
        return f"{which} would{' not' if self.tried == 1 else ''}; {self.strategy} needs least ({size(self.peak)})"


@dataclass(repr=False)
class Simulation:
    """A program's run on a machine, as predicted. Times are seconds, sizes bytes.

    `class_of[d]` is the class of device `d`; devices of a class do the same at the same times. `samples` is how many
    samples the program processes, `strategy` (D/T/P/K) how it is parallel, where that is known; where it does not fit,
    `alternative` is what would. It prints as a summary of four to six lines.
    """

    module: Module
    profile: Profile
    class_of: npt.NDArray[Any]
    members: list[npt.NDArray[Any]]
    clocks: list[int]
    busy: list[list[int]]
    beside: list[int]
    peaks: list[Peak]
    _events: list[Event | Called]
    _changes: list[Change | Called]
    device_ops: int = 0
    samples: int | None = None
    strategy: str | None = None
    alternative: Alternative | None = None

    def __repr__(self) -> str:
        chosen = f", strategy {self.strategy}" if self.strategy else ""
        speed = f", {self.throughput:,.4g} samples/s" if self.throughput is not None else ""
        device = self.fullest
        peak = self.peak(device)
        parts = ", ".join(f"{name} {size(n)}" for name, n in zip(CATEGORIES, peak.split, strict=True) if n)
        verdict = f"does not fit: {size(peak.bytes)} of {size(self.memory[device])} on device {device}"
        instead = f"; {self.alternative}" if self.alternative is not None else ""
        beside = f"streams are busy for {seconds(float(self.overlapped.mean()))} a device"
        return "\n".join(
            [
                f"on {self.profile.name}{chosen}: {seconds(self.makespan)} on {count(self.devices, 'device')}{speed}",
                *([f"devices   {unlike}"] if (unlike := self.unlike) else []),
                f"time      compute {self.computing:.1%}, "
                f"communication {self.communication:.1%}, idle {self.bubble:.1%}",
                *([f"          beside it, {beside}"] if self.overlapped.any() else []),
                f"memory    peak {size(peak.bytes)} on device {device}: {parts}",
                f"          at {peak}",
                *([] if self.fits else [verdict + instead]),
            ]
        )

    @property
    def makespan(self) -> float:
        """From the start to the end of the last op on any device."""
        return max(self.clocks) / FEMTOSECONDS

    @property
    def throughput(self) -> float | None:
        """Samples per second; None where the number of samples is not known."""
        return self.samples / self.makespan if self.samples and self.makespan else None

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.class_of)

    @property
    def compute(self) -> npt.NDArray[Any]:
        """For each device, how long it computes."""
        return self._by_device(self.busy[COMPUTE])

    @property
    def communicate(self) -> npt.NDArray[Any]:
        """For each device, how long it communicates while it does nothing else."""
        return self._by_device(self.busy[COMMUNICATION])

    @property
    def idle(self) -> npt.NDArray[Any]:
        """For each device, how long it waits: compute + communicate + idle is the makespan."""
        # Whole numbers: a device that never waits has 0, not a little less.
        end = max(self.clocks)
        return self._by_device([end - a - b for a, b in zip(self.busy[COMPUTE], self.busy[COMMUNICATION], strict=True)])

    @property
    def overlapped(self) -> npt.NDArray[Any]:
        """For each device, how long its streams are busy beside its own order of ops."""
        return self._by_device(self.beside)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait."""
        return float(self.idle.mean() / self.makespan) if self.makespan else 0.0

    @property
    def computing(self) -> float:
        """The share of the devices' time in which they compute."""
        return float(self.compute.mean() / self.makespan) if self.makespan else 0.0

    @property
    def communication(self) -> float:
        """The share of the devices' time in which they communicate and do nothing else."""
        return float(self.communicate.mean() / self.makespan) if self.makespan else 0.0

    @property
    def peak_memory(self) -> npt.NDArray[Any]:
        """For each device, the most bytes that are live at once."""
        found: npt.NDArray[Any] = np.array([peak.bytes for peak in self.peaks])[self.class_of]
        return found

    @property
    def fits(self) -> bool:
        """Whether every device's peak is within its memory."""
        return bool((self.peak_memory <= self.memory).all())

    @property
    def memory(self) -> npt.NDArray[Any]:
        """For each device, the bytes that it has."""
        found: npt.NDArray[Any] = np.array([memory for _, memory in self._kinds])[self.class_of]
        return found

    @property
    def speed(self) -> npt.NDArray[Any]:
        """For each device, by what the machine's rates are multiplied for it."""
        found: npt.NDArray[Any] = np.array([speed for speed, _ in self._kinds])[self.class_of]
        return found

    @property
    def fullest(self) -> int:
        """The device whose peak is the largest part of its memory."""
        return int((self.peak_memory / self.memory).argmax())

    @property
    def unlike(self) -> str:
        """How many devices there are of each kind, where speed or memory differ: ``1 of speed 1, 1 of 0.5``."""
        if not self.profile.groups:
            return ""
        kinds = Counter(dict.fromkeys(self._kinds, 0))
        for kind, members in zip(self._kinds, self.members, strict=True):
            kinds[kind] += len(members)
        by_speed = len({speed for speed, _ in kinds}) > 1
        by_memory = len({memory for _, memory in kinds}) > 1
        shown = []
        for (speed, memory), number in sorted(kinds.items(), reverse=True):
            what = [f"speed {speed:g}"] * by_speed + [f"with {size(memory)}"] * by_memory
            shown.append(f"{number:,} {'of ' * by_speed}{' '.join(what)}")
        return ", ".join(shown) if by_speed or by_memory else ""

    def peak(self, device: int) -> Peak:
        """Where the memory of a device peaks."""
        return self.peaks[int(self.class_of[device])]

    def events(self) -> Iterator[tuple[Event, int]]:
        """Every op that keeps devices busy, in program order, with its start in femtoseconds from the beginning."""
        return ((event, start) for event, start, _ in _flat(self._events, 0, ()))

    def events_in_calls(self) -> Iterator[tuple[Event, int, tuple[Op, ...]]]:
        """As `events`, with the calls that lead from the entry function to the op."""
        return _flat(self._events, 0, ())

    @property
    def steps(self) -> list[Event | Called]:
        """What the entry function does, in program order. The steps of calls that do the same are one object."""
        return self._events

    def called(self) -> Iterator[Called]:
        """The calls of the entry function, in program order."""
        return (event for event in self._events if isinstance(event, Called))

    def memory_curve(self, device: int) -> MemoryCurve:
        """The live memory of a device by category (`CATEGORIES`), each time it changes, in program order."""
        return self.memory_curves()[int(self.class_of[device])]

    def memory_curves(self) -> list[MemoryCurve]:
        """For each class of devices, what `memory_curve` gives for each of its devices."""
        live = [[0] * len(CATEGORIES) for _ in self.members]
        curves: list[MemoryCurve] = [[] for _ in self.members]
        for change, base in _changes(self._changes, 0):
            if not change.bytes:
                continue
            mine, curve = live[change.device_class], curves[change.device_class]
            mine[change.category] += change.bytes
            time = (base + change.time) / FEMTOSECONDS
            if curve and curve[-1][0] == time and change.bytes > 0:
                curve.pop()
            curve.append((time, tuple(mine)))
        return curves

    def as_json(self) -> dict[str, Any]:
        """The result as plain numbers and lists, for machines."""
        return {
            "makespan_s": self.makespan,
            "throughput": self.throughput,
            "samples": self.samples,
            "peak_memory_bytes": self.peak_memory.tolist(),
            "bubble": self.bubble,
            "communication": self.communication,
            "fits": self.fits,
            "alternative": None if self.alternative is None else asdict(self.alternative),
            "profile": self.profile.name,
            "strategy": self.strategy,
            "devices": self.devices,
            "speed": self.speed.tolist(),
            "memory_bytes": self.memory.tolist(),
            "compute_s": self.compute.tolist(),
            "communication_s": self.communicate.tolist(),
            "idle_s": self.idle.tolist(),
            "overlapped_s": self.overlapped.tolist(),
            "peak": [
                {"op": str(peak), **dict(zip(CATEGORIES, peak.split, strict=True))}
                for peak in (self.peaks[c] for c in self.class_of)
            ],
            "device_ops": self.device_ops,
        }

    @property
    def _kinds(self) -> list[tuple[float, float]]:
        """Speed and memory of each class."""
        firsts = [int(members[0]) for members in self.members]
        return [(self.profile.speed_of(device), self.profile.memory_of(device)) for device in firsts]

    def _by_device(self, by_class: list[int]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = (np.array(by_class, dtype=float) / FEMTOSECONDS)[self.class_of]
        return found


def _named(op: Op) -> str:
    name = f"call @{op.callee}" if op.callee else op.name
    return f"{op.results[0]} = {name}" if op.results else name


def _flat(
    events: list[Event | Called], base: int, calls: tuple[Op, ...]
) -> Iterator[tuple[Event, int, tuple[Op, ...]]]:
    for event in events:
        if isinstance(event, Called):
            yield from _flat(event.events, base + event.base, (*calls, event.op))
        else:
            yield event, base + event.start, calls


def _changes(changes: list[Change | Called], base: int) -> Iterator[tuple[Change, int]]:
    for change in changes:
        if isinstance(change, Called):
            yield from _changes(change.changes, base + change.base)
        else:
            yield change, base
