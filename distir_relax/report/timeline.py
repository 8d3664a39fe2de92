"""Timeline of the report page: a lane of bars for each device class and each of its streams.

To bound the size of a page, bars that would be narrower than a pixel are merged with their neighbours; a merged bar has
the number of its ops and their compute and communication times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distir_relax.ir import Op
from distir_relax.report.trace import stream_name
from distir_relax.simulation.class_names import class_name, shown_classes
from distir_relax.simulation.critical_path import CriticalPath
from distir_relax.simulation.events import Event
from distir_relax.simulation.op_timer import COMPUTE, FEMTOSECONDS
from distir_relax.simulation.simulation import Simulation

LANES = 32
"""Maximum number of device classes that are drawn."""

BARS = 40_000
"""Maximum number of bars of a page: about 2 MB. Full lanes still have more of them than a screen has pixels."""


class Bar(NamedTuple):
    """One op, or merged neighbours of which `op` takes the longest; times in femtoseconds.

    It is `critical` if some of its ops are on the critical path.
    """

    start: int
    end: int
    op: int
    call: int
    longest: int
    compute: int
    communicate: int
    ops: int = 1
    critical: bool = False


@dataclass
class Timeline:
    """Lanes of bars that refer to `ops` and `calls`; `joined` ops shorter than `threshold` share bars."""

    lanes: list[tuple[str, list[Bar]]]
    ops: list[Op]
    calls: list[tuple[Op, ...]]
    threshold: int = 0
    joined: int = 0


def timeline(simulation: Simulation, limit: int = BARS, path: CriticalPath | None = None) -> Timeline:
    """Return the lanes of a simulation, with at most `limit` bars in total, but one in each lane.

    The bars of the steps of `path` are marked.
    """
    shown = shown_classes(simulation, LANES)
    steps = () if path is None else path.steps
    collector = _BarCollector(set(shown), {(step.start, step.stream, step.classes) for step in steps})
    for event, start, calls in simulation.events_in_calls():
        if event.duration:
            collector.add(event, start, calls)
            collector.streams.setdefault(event.stream, stream_name(event))
    lanes = collector.lanes
    threshold = 0
    while sum(map(len, lanes.values())) > max(limit, len(lanes)):
        threshold = 2 * threshold or max(max(simulation.clocks) >> 20, 1)
        lanes = {key: _join(bars, threshold) for key, bars in lanes.items()}
    named_lanes = []
    for c in shown:
        for stream in sorted(s for k, s in lanes if k == c):
            name = class_name(simulation, c) + (f", {collector.streams[stream]}" if stream else "")
            named_lanes.append((name, lanes[c, stream]))
    joined = sum(bar.ops for bars in lanes.values() for bar in bars if bar.ops > 1)
    return Timeline(named_lanes, collector.ops, collector.calls, threshold, joined)


def as_data(line: Timeline, makespan: int) -> dict[str, Any]:
    """Return a timeline as data of the page's script: times in multiples of `unit` seconds, starts as gaps."""
    unit = max(makespan // 10**9, 1)
    texts = _TextTable()
    lanes = []
    for name, bars in line.lanes:
        columns: dict[str, list[Any]] = {
            "gap": [], "length": [], "kind": [], "op": [], "call": [], "joined": [], "critical": [],
        }  # fmt: skip
        previous_end = 0
        for number, bar in enumerate(bars):
            start, end = bar.start // unit, bar.end // unit
            columns["gap"].append(start - previous_end)
            columns["length"].append(end - start)
            columns["kind"].append(2 if bar.ops > 1 else 0 if bar.compute else 1)
            columns["op"].append(texts.of("op", bar.op, _op_text(line.ops[bar.op])))
            columns["call"].append(texts.of("call", bar.call, _call_text(line.calls[bar.call])))
            if bar.ops > 1:
                columns["joined"].append([bar.ops, bar.compute // unit, bar.communicate // unit])
            if bar.critical:
                columns["critical"].append(number)
            previous_end = end
        lanes.append({"name": name, **columns})
    return {"unit": unit / FEMTOSECONDS, "span": max(makespan // unit, 1), "lanes": lanes, "texts": texts.texts}


@dataclass
class _BarCollector:
    """Bars of the classes `classes_shown`, one per op, by class and stream.

    `critical` has start, stream and classes of the steps of the critical path.
    """

    classes_shown: set[int]
    critical: set[tuple[int, int, tuple[int, ...]]]
    lanes: dict[tuple[int, int], list[Bar]] = field(default_factory=dict)
    streams: dict[int, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    calls: list[tuple[Op, ...]] = field(default_factory=list)
    _op_numbers: dict[int, int] = field(default_factory=dict)
    _call_numbers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, event: Event, start: int, calls: tuple[Op, ...]) -> None:
        """Add the bars of an event, one for each class."""
        number = self._op_numbers.setdefault(id(event.op), len(self.ops))
        if number == len(self.ops):
            self.ops.append(event.op)
        path = self._call_numbers.setdefault(tuple(map(id, calls)), len(self.calls))
        if path == len(self.calls):
            self.calls.append(calls)
        duration = event.duration
        split = (duration, 0) if event.kind == COMPUTE else (0, duration)
        is_critical = (start, event.stream, event.classes) in self.critical
        bar = Bar(start, start + duration, number, path, duration, *split, critical=is_critical)
        for c in event.classes:
            if c in self.classes_shown:
                self.lanes.setdefault((c, event.stream), []).append(bar)


@dataclass
class _TextTable:
    """Table of distinct texts."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[tuple[str, int], int] = field(default_factory=dict)

    def of(self, kind: str, number: int, text: str) -> int:
        index = self._numbers.setdefault((kind, number), len(self.texts))
        if index == len(self.texts):
            self.texts.append(text)
        return index


def _join(bars: list[Bar], threshold: int) -> list[Bar]:
    """Merge neighbours shorter than `threshold`, with gaps below it, until a bar reaches `threshold`."""
    merged: list[Bar] = []
    for bar in bars:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.end - last.start < threshold
            and bar.end - bar.start < threshold
            and bar.start - last.end < threshold
        ):
            longest = last if last.longest >= bar.longest else bar
            merged[-1] = Bar(
                last.start, bar.end, longest.op, longest.call, longest.longest,
                last.compute + bar.compute, last.communicate + bar.communicate, last.ops + bar.ops,
                last.critical or bar.critical,
            )  # fmt: skip
        else:
            merged.append(bar)
    return merged


def _op_text(op: Op) -> str:
    results = ", ".join(map(str, op.results))
    text = f"{f'{results} = ' if results else ''}{op.name}({', '.join(map(str, op.operands))})"
    return f"{text}\n{op.location}" if op.location else text


def _call_text(calls: tuple[Op, ...]) -> str:
    return "\n".join(
        f"{f'{op.results[0]} = ' if op.results else ''}call @{op.attrs['callee']}"
        f"{f' ({op.location})' if op.location else ''}"
        for op in reversed(calls)
    )
