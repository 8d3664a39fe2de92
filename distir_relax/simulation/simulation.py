"""Result of a simulation: makespan, timeline, and memory of each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import error_kind
from distir_relax.ir import Module, Op
from distir_relax.ops import lookup
from distir_relax.simulation.events import WAIT, Called, Change, Event
from distir_relax.simulation.memory_categories import CATEGORIES
from distir_relax.simulation.op_timer import COMMUNICATION, COMPUTE, FEMTOSECONDS
from distir_relax.simulation.reserved_memory import AllocatorReplays, ReservedMemory
from distir_relax.support.units import count, seconds, size

TIGHT = 0.6
"""The share of a device's memory from which on a peak of live bytes may not fit as its allocator reserves them."""

MemoryCurve = list[tuple[float, tuple[int, ...]]]
"""Times in seconds, with live bytes by category from then on."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak live memory: bytes, split by category, and the op that causes it.

    `ops` is the path from the entry function through calls to the op; it is empty if the peak is that of the inputs, or
    occurs after the last op (`note`).
    """

    bytes: int
    split: tuple[int, ...]
    ops: tuple[Op, ...]
    note: str = "the inputs"

    def __str__(self) -> str:
        if not self.ops:
            return self.note
        path = " in ".join(_op_text(op) for op in reversed(self.ops))
        return f"{path}{f' ({self.ops[-1].location})' if self.ops[-1].location else ''}"


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another strategy for a program that does not fit: the nearest one that does, or the one that needs least memory.

    Its `peak` is in bytes, on the fullest device; `times` is its makespan relative to that of the program. `tried` is
    the number of strategies simulated.
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
    """Predicted run of a program on a machine. Times are seconds, sizes bytes.

    `class_of[d]` is the class of device `d`; devices of a class do the same at the same times. `samples` is the number
    of samples that the program processes, `strategy` (D/T/P/K) its parallel strategy, if known; if it does not fit,
    `alternative` is a strategy that does. If figures of the machine are scaled, `scale` says which, and `before` is the
    simulation on the machine as it is. It prints as a summary of four to eight lines.
    """

    module: Module
    profile: Profile
    class_of: npt.NDArray[Any]
    members: list[npt.NDArray[Any]]
    clocks: list[int]
    busy: list[list[int]]
    streamed: list[int]
    peaks: list[Peak]
    _events: list[Event | Called]
    _changes: list[Change | Called]
    device_ops: int = 0
    hosted: Sequence[int] = ()
    samples: int | None = None
    strategy: str | None = None
    alternative: Alternative | None = None
    scale: str | None = None
    before: Simulation | None = None
    allocators: AllocatorReplays | None = None
    _reserved: ReservedMemory | None = None

    def __repr__(self) -> str:
        strategy = f", strategy {self.strategy}" if self.strategy else ""
        speed = f", {self.throughput:,.4g} samples/s" if self.throughput is not None else ""
        device = self.fullest
        peak = self.peak(device)
        parts = ", ".join(f"{name} {size(n)}" for name, n in zip(CATEGORIES, peak.split, strict=True) if n)
        verdict = f"does not fit: {size(peak.bytes)} of {size(self.memory[device])} on device {device}"
        alternative = f"; {self.alternative}" if self.alternative is not None else ""
        streamed = f"streams are busy for {seconds(float(self.overlapped.mean()))} a device"
        hosted = f" ({self.host_bound:.1%} for the host)" if self.host_bound >= 0.0005 else ""
        return "\n".join(
            [
                f"on {self.profile.name}{strategy}: {seconds(self.makespan)} on {count(self.devices, 'device')}{speed}",
                *([] if (ends := self.interval) is None else [f"90 %      {interval_text(ends)}"]),
                *([] if self.before is None else [_change_text(self.before.makespan, self.makespan)]),
                *([f"devices   {heterogeneity}"] if (heterogeneity := self.heterogeneity) else []),
                f"time      compute {self.computing:.1%}, "
                f"communication {self.communication:.1%}, idle {self.bubble:.1%}{hosted}",
                *([f"          beside it, {streamed}"] if self.overlapped.any() else []),
                f"memory    peak {size(peak.bytes)} on device {device}: {parts}",
                f"          at {peak}",
                *([] if self.fits else [verdict + alternative]),
            ]
        )

    @property
    def makespan(self) -> float:
        """The time from the start to the end of the last op on any device."""
        return max(self.clocks) / FEMTOSECONDS

    @property
    def interval(self) -> tuple[float, float] | None:
        """The seconds between which the makespan is with a probability of 90 %; None if the profile has no
        uncertainties.

        Its errors are propagated over the seconds of each kind of op on the busiest device.
        """
        errors = self.profile.uncertainty
        return None if errors is None else errors.interval(self.makespan, self.seconds_by_kind())

    def seconds_by_kind(self) -> dict[str, float]:
        """Return the busy seconds of the busiest device by kind of op, those of `OP_KINDS`, streams left out."""
        busiest = max(range(len(self.members)), key=lambda c: self.busy[COMPUTE][c] + self.busy[COMMUNICATION][c])
        kinds: dict[str, str] = {}
        totals: dict[str, int] = {}
        for event, _ in self.events():
            if busiest in event.classes and not event.stream:
                name = event.op.name
                kind = kinds.get(name)
                if kind is None:
                    kind = kinds[name] = error_kind(self.profile, lookup(name))
                totals[kind] = totals.get(kind, 0) + event.duration
        return {kind: total / FEMTOSECONDS for kind, total in totals.items()}

    @property
    def throughput(self) -> float | None:
        """Samples per second; None if the number of samples is unknown."""
        return self.samples / self.makespan if self.samples and self.makespan else None

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.class_of)

    @property
    def compute(self) -> npt.NDArray[Any]:
        """Compute time per device."""
        return self._by_device(self.busy[COMPUTE])

    @property
    def communicate(self) -> npt.NDArray[Any]:
        """Exposed communication time per device, not overlapped with computation."""
        return self._by_device(self.busy[COMMUNICATION])

    @property
    def idle(self) -> npt.NDArray[Any]:
        """Idle time per device: compute + communicate + idle is the makespan."""
        # Computed in integers: a device that never waits has exactly 0.
        end = max(self.clocks)
        return self._by_device([end - a - b for a, b in zip(self.busy[COMPUTE], self.busy[COMMUNICATION], strict=True)])

    @property
    def overlapped(self) -> npt.NDArray[Any]:
        """Busy time of streams per device, overlapped with its own order of ops."""
        return self._by_device(self.streamed)

    @property
    def awaiting_host(self) -> npt.NDArray[Any]:
        """Time per device in which it waits for its host to issue the next op: a part of `idle`."""
        return self._by_device(list(self.hosted) or [0] * len(self.members))

    @property
    def host_bound(self) -> float:
        """Time waiting for the host as a fraction of the devices' time."""
        return float(self.awaiting_host.mean() / self.makespan) if self.makespan else 0.0

    @property
    def bubble(self) -> float:
        """Idle time as a fraction of the devices' time."""
        return float(self.idle.mean() / self.makespan) if self.makespan else 0.0

    @property
    def computing(self) -> float:
        """Compute time as a fraction of the devices' time."""
        return float(self.compute.mean() / self.makespan) if self.makespan else 0.0

    @property
    def communication(self) -> float:
        """Exposed communication time as a fraction of the devices' time."""
        return float(self.communicate.mean() / self.makespan) if self.makespan else 0.0

    @property
    def peak_memory(self) -> npt.NDArray[Any]:
        """Peak live bytes per device."""
        result: npt.NDArray[Any] = np.array([peak.bytes for peak in self.peaks])[self.class_of]
        return result

    @property
    def fits(self) -> bool:
        """Whether every device's peak is within its memory, as live bytes and as its allocator reserves them."""
        if not (self.peak_memory <= self.memory).all():
            return False
        tight = [c for c, (_, memory) in enumerate(self._device_specs) if self.peaks[c].bytes > TIGHT * memory]
        return all(self.reserved(int(self.members[c][0])) is not None for c in tight)

    def reserved(self, device: int) -> int | None:
        """Return the peak of the bytes that the allocator of a device reserves, None if it has not enough.

        The live bytes, if the profile's runtime has no caching allocator.
        """
        c = int(self.class_of[device])
        if not self.profile.caching_allocator:
            return self.peaks[c].bytes
        self._reserved = self._reserved or ReservedMemory(self._changes, self.allocators or AllocatorReplays())
        reserved = self._reserved.peak(c, self._device_specs[c][1])
        return None if reserved is None else max(reserved, self.peaks[c].bytes)

    @property
    def memory(self) -> npt.NDArray[Any]:
        """Memory size in bytes per device."""
        result: npt.NDArray[Any] = np.array([memory for _, memory in self._device_specs])[self.class_of]
        return result

    @property
    def speed(self) -> npt.NDArray[Any]:
        """Speed factor per device, relative to the machine's rates."""
        result: npt.NDArray[Any] = np.array([speed for speed, _ in self._device_specs])[self.class_of]
        return result

    @property
    def fullest(self) -> int:
        """The device with the largest peak relative to its memory."""
        return int((self.peak_memory / self.memory).argmax())

    @property
    def heterogeneity(self) -> str:
        """The number of devices of each speed and memory, if these differ: ``1 of speed 1, 1 of 0.5``."""
        if not self.profile.groups:
            return ""
        counts = Counter(dict.fromkeys(self._device_specs, 0))
        for spec, members in zip(self._device_specs, self.members, strict=True):
            counts[spec] += len(members)
        by_speed = len({speed for speed, _ in counts}) > 1
        by_memory = len({memory for _, memory in counts}) > 1
        parts = []
        for (speed, memory), number in sorted(counts.items(), reverse=True):
            words = [f"speed {speed:g}"] * by_speed + [f"with {size(memory)}"] * by_memory
            parts.append(f"{number:,} {'of ' * by_speed}{' '.join(words)}")
        return ", ".join(parts) if by_speed or by_memory else ""

    def peak(self, device: int) -> Peak:
        """Return the memory peak of a device."""
        return self.peaks[int(self.class_of[device])]

    def events(self) -> Iterator[tuple[Event, int]]:
        """Yield all events in program order, with their start in femtoseconds from the beginning."""
        return ((event, start) for event, start, _ in self.events_in_calls())

    def events_in_calls(self) -> Iterator[tuple[Event, int, tuple[Op, ...]]]:
        """As `events`, with the path of calls from the entry function to the op."""
        return (item for item in _walk_events(self._events, 0, ()) if item[0].kind != WAIT)

    @property
    def steps(self) -> list[Event | Called]:
        """The events of the entry function, those of kind `WAIT` included, in program order.

        Equal calls share one list of events.
        """
        return self._events

    def called(self) -> Iterator[Called]:
        """Yield the calls of the entry function, in program order."""
        return (event for event in self._events if isinstance(event, Called))

    def memory_curve(self, device: int) -> MemoryCurve:
        """Return the live memory of a device by category (`CATEGORIES`) at each change, in program order."""
        return self.memory_curves()[int(self.class_of[device])]

    def memory_curves(self) -> list[MemoryCurve]:
        """Return the memory curve of each device class."""
        live = [[0] * len(CATEGORIES) for _ in self.members]
        curves: list[MemoryCurve] = [[] for _ in self.members]
        for change, base in _changes(self._changes, 0):
            if not change.bytes:
                continue
            live_here, curve = live[change.device_class], curves[change.device_class]
            live_here[change.category] += change.bytes
            time = (base + change.time) / FEMTOSECONDS
            if curve and curve[-1][0] == time and change.bytes > 0:
                curve.pop()
            curve.append((time, tuple(live_here)))
        return curves

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain numbers and lists, for JSON."""
        return {
            "makespan_s": self.makespan,
            "interval_s": None if (ends := self.interval) is None else list(ends),
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
            "awaiting_host_s": self.awaiting_host.tolist(),
            "overlapped_s": self.overlapped.tolist(),
            "peak": [
                {"op": str(peak), **dict(zip(CATEGORIES, peak.split, strict=True))}
                for peak in (self.peaks[c] for c in self.class_of)
            ],
            "device_ops": self.device_ops,
        }

    @property
    def _device_specs(self) -> list[tuple[float, float]]:
        """Speed and memory of each class."""
        firsts = [int(members[0]) for members in self.members]
        return [(self.profile.speed_of(device), self.profile.memory_of(device)) for device in firsts]

    def _by_device(self, by_class: list[int]) -> npt.NDArray[Any]:
        result: npt.NDArray[Any] = (np.array(by_class, dtype=float) / FEMTOSECONDS)[self.class_of]
        return result


def interval_text(ends: tuple[float, float]) -> str:
    """Return an interval of seconds as text."""
    return f"{seconds(ends[0])} to {seconds(ends[1])}"


def _change_text(before: float, after: float) -> str:
    ratio = f", {after / before:.3f}x" if before else ""
    return f"before    {seconds(before)} on the machine as it is{ratio}"


def _op_text(op: Op) -> str:
    name = f"call @{op.callee}" if op.callee else op.name
    return f"{op.results[0]} = {name}" if op.results else name


def _walk_events(
    events: list[Event | Called], base: int, calls: tuple[Op, ...]
) -> Iterator[tuple[Event, int, tuple[Op, ...]]]:
    for event in events:
        if isinstance(event, Called):
            yield from _walk_events(event.events, base + event.base, (*calls, event.op))
        else:
            yield event, base + event.start, calls


def _changes(changes: list[Change | Called], base: int) -> Iterator[tuple[Change, int]]:
    for change in changes:
        if isinstance(change, Called):
            yield from _changes(change.changes, base + change.base)
        else:
            yield change, base
