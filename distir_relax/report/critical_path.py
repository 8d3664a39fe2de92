"""Critical path of a simulation as text, JSON and HTML: totals by line of the model and by op, and the steps in order.

Steps that repeat, as those of equal layers and microbatches do, are one group with a count (`group_steps`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, TypeVar

import numpy as np

from distir_relax.report.text_table import align_columns
from distir_relax.simulation.class_names import class_name
from distir_relax.simulation.critical_path import HOST, KIND_NAMES, CriticalPath, PathStep
from distir_relax.simulation.op_timer import COMMUNICATION, COMPUTE, FEMTOSECONDS
from distir_relax.simulation.simulation import Simulation
from distir_relax.support.units import count, listed, seconds

ROWS = 24
"""Number of steps and groups that are printed."""

PAGE_ROWS = 14
"""Number of steps and groups on the report page."""

LINES = 10
"""Number of lines of the model that are printed."""

_INDENT = "  "

LONGEST_PERIOD = 512
"""Maximum number of steps and groups that repeat together."""

_Key = tuple[object, ...]
_Name = TypeVar("_Name", str, int)


@dataclass(frozen=True, slots=True)
class Group:
    """`times` repetitions of the same `body` or, if that is empty, of a `step`, of which it has the first.

    `duration` in femtoseconds is the sum over all repetitions, those of the groups around it included; the durations of
    a body add up to that of its group. `number` is the same for groups of equal steps.
    """

    number: int
    start: int
    duration: int
    times: int
    body: tuple[Group, ...]
    step: PathStep | None = None

    @property
    def steps(self) -> int:
        """The number of steps, within one repetition of the groups around it."""
        return self.times * (sum(item.steps for item in self.body) or 1)


@dataclass(frozen=True, slots=True)
class Total:
    """The steps of an op or of a line of the model: seconds, share of the path, number, kind of most of their time.

    `others` are the lines of an op, or the ops of a line, longest first.
    """

    name: str
    seconds: float
    share: float
    steps: int
    kind: int
    others: tuple[str, ...]


def group_steps(path: CriticalPath) -> list[Group]:
    """Group the steps of a path: repeated neighbours become one, those of repeated groups too.

    Steps are equal if op, line and devices are. Short periods are found first, so layers are grouped before the
    microbatches that contain them.
    """
    numbers: dict[_Key, int] = {}
    groups = [
        Group(numbers.setdefault(_step_key(step), len(numbers)), step.start, step.duration, 1, (), step)
        for step in path.steps
    ]
    before = -1
    while len(groups) != before:
        before = len(groups)
        for period in range(1, LONGEST_PERIOD + 1):
            if 2 * period > len(groups):
                break
            groups = _collapse(groups, period, numbers)
    return groups


def totals(path: CriticalPath, by: Callable[[PathStep], str], other: Callable[[PathStep], str]) -> list[Total]:
    """Return the time of the steps by a name of theirs, longest first, each with the names by `other`."""
    steps: dict[str, list[PathStep]] = {}
    for step in path.steps:
        steps.setdefault(by(step), []).append(step)
    rows = []
    for name, members in steps.items():
        time = sum(step.duration for step in members)
        kinds = _by_time(members, lambda step: step.kind)
        others = tuple(_by_time(members, other))
        rows.append(Total(name, time / FEMTOSECONDS, time / path.makespan, len(members), kinds[0], others))
    return sorted(rows, key=lambda row: (-row.seconds, row.name))


def by_line(path: CriticalPath) -> list[Total]:
    """Return the time of each line of the user's model, with its ops."""
    return totals(path, _line, lambda step: step.name)


def by_op(path: CriticalPath) -> list[Total]:
    """Return the time of each op, with its lines."""
    return totals(path, lambda step: step.name, _line)


def critical_path_text(simulation: Simulation, path: CriticalPath, rows: int = ROWS) -> str:
    """Return the summary, the totals by line and by op, and the `rows` longest steps and groups in order of time."""
    lines = [summary(path)]
    if not path.steps:
        return lines[0]
    for title, other, items in (("line", "ops", by_line(path)), ("op", "lines", by_op(path))):
        table = [(title, "share", "time", "steps", other), *(_total_row(item) for item in items[:LINES])]
        if rest := items[LINES:]:
            table.append(_rest_row(rest))
        lines += ["", *align_columns(table, left=(0, 4))]
    head = ("from", "time", "device", "step", "line")
    return "\n".join([*lines, "", *align_columns([head, *_cells(simulation, path, rows)], left=(2, 3, 4))])


def summary(path: CriticalPath) -> str:
    """Return one line: the length of the path, its steps, and the share of each kind."""
    if not path.steps:
        return "critical path: nothing takes time"
    names = {COMPUTE: "compute", COMMUNICATION: "communication", HOST: "waiting for the host"}
    shares = [(name, path.of_kind(kind) / path.makespan) for kind, name in names.items()]
    kinds = ", ".join(f"{name} {share:.1%}" for name, share in shares if share)
    return f"critical path: {seconds(path.seconds)}, {count(len(path.steps), 'step')}: {kinds}"


def critical_path_json(simulation: Simulation, path: CriticalPath) -> dict[str, Any]:
    """Return the path as plain values: each step, the groups, and the totals by line and by op. Times are seconds.

    A group has its `times` and the steps of its `body`, or the number of one in `steps`.
    """
    numbers = {id(step): number for number, step in enumerate(path.steps)}
    return {
        "makespan_s": path.seconds,
        **{f"{name}_s": path.of_kind(kind) / FEMTOSECONDS for kind, name in KIND_NAMES.items()},
        "by_line": [_total_json(total, "line", "ops") for total in by_line(path)],
        "by_op": [_total_json(total, "op", "lines") for total in by_op(path)],
        "groups": [_group_json(group, numbers) for group in group_steps(path)],
        "steps": [
            {
                "start_s": step.start / FEMTOSECONDS,
                "duration_s": step.duration / FEMTOSECONDS,
                "device": int(simulation.members[step.device_class][0]),
                "kind": KIND_NAMES[step.kind],
                "op": step.name,
                "result": str(step.op.results[0]) if step.op is not None and step.op.results else None,
                "location": step.location,
                "calls": [f"@{call.callee}" for call in step.calls],
            }
            for step in path.steps
        ],
    }


def critical_path_section(simulation: Simulation, path: CriticalPath) -> str:
    """Return the section of the report page; empty if nothing takes time."""
    if not path.steps:
        return ""
    lines = "".join(_total_html(total) for total in by_line(path)[:LINES])
    rest = len(by_line(path)) - LINES
    note = f"{summary(path).removeprefix('critical path: ')}. A step begins when the one before it ends, so only a "
    note += "shorter step on the path makes the program faster. Its bars are underlined in the timeline."
    steps = "".join(
        f'<tr><td>{escape(start)}</td><td>{escape(time)}</td><td class="words">{escape(device)}</td><td class="words">'
        f'<code>{escape(step).replace(_INDENT, "&emsp;")}</code></td><td class="words">{escape(line)}</td></tr>'
        for start, time, device, step, line in _cells(simulation, path, PAGE_ROWS)
    )
    more = f'<p class="note">{count(rest, "line")} more in distir simulate --critical-path --json.</p>' * (rest > 0)
    return (
        f'<section>\n<h2>Critical path</h2>\n<p class="note">{escape(note)}</p>\n<div class="scrolls">'
        "<table><thead><tr><th>line of the model</th><th>time</th><th>share</th><th>steps</th>"
        f'<th class="share"></th><th class="words">ops</th></tr></thead><tbody>{lines}</tbody></table></div>{more}\n'
        '<div class="scrolls"><table class="path"><thead><tr><th>from</th><th>time</th><th class="words">device</th>'
        f'<th class="words">step</th><th class="words">line</th></tr></thead><tbody>{steps}</tbody></table></div>'
        "\n</section>"
    )


def _step_key(step: PathStep) -> _Key:
    calls = tuple(call.callee for call in step.calls)
    return step.kind, step.name, step.location, step.device_class, step.classes, step.stream, calls


def _collapse(groups: list[Group], period: int, numbers: dict[_Key, int]) -> list[Group]:
    """Replace each run of two or more equal stretches of `period` groups by one."""
    keys = np.array([group.number for group in groups])
    equal = np.concatenate(([0], (keys[:-period] == keys[period:]).astype(np.int8), [0]))
    edges = np.flatnonzero(np.diff(equal))
    result: list[Group] = []
    done = 0
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        start = max(start, done)
        times = (stop - start) // period + 1
        if times < 2:
            continue
        result += groups[done:start]
        done = start + times * period
        result.append(_repeated(groups[start:done], period, numbers))
    return [*result, *groups[done:]] if done else groups


def _repeated(groups: Sequence[Group], period: int, numbers: dict[_Key, int]) -> Group:
    times = len(groups) // period
    number = numbers.setdefault(("times", times, *(group.number for group in groups[:period])), len(numbers))
    body = tuple(_added([groups[n] for n in range(position, len(groups), period)]) for position in range(period))
    first = body[0]
    duration = sum(group.duration for group in groups)
    if period == 1:
        return Group(number, first.start, duration, times * first.times, first.body, first.step)
    return Group(number, first.start, duration, times, body, None)


def _added(equal: Sequence[Group]) -> Group:
    """Return the first of equal groups with the durations of all."""
    first = equal[0]
    body = tuple(_added([group.body[n] for group in equal]) for n in range(len(first.body)))
    return replace(first, duration=sum(group.duration for group in equal), body=body)


def _cells(simulation: Simulation, path: CriticalPath, rows: int) -> list[tuple[str, ...]]:
    """Return the rows of the table of steps; those left out are counted where they would be."""
    nested = list(_nested(group_steps(path)))
    longest = sorted(range(len(nested)), key=lambda n: (-nested[n].group.duration, n))
    shown = {-1, *longest[:rows]}
    cells: list[tuple[str, ...]] = []
    left_out: list[_Row] = []

    def count_left_out() -> None:
        if left_out:
            steps, time = sum(row.steps for row in left_out), sum(row.group.duration for row in left_out)
            text = f"{_INDENT * left_out[0].depth}... {count(steps, 'shorter step')}"
            cells.append(("", seconds(time / FEMTOSECONDS), "", text, ""))
            left_out.clear()

    for number, row in enumerate(nested):
        if number not in shown and row.parent not in shown:
            # It is counted with the group that contains it.
            continue
        if left_out and (number in shown or left_out[0].parent != row.parent):
            count_left_out()
        if number in shown:
            cells.append(_row_cells(simulation, row))
        else:
            left_out.append(row)
    count_left_out()
    return cells


@dataclass(frozen=True, slots=True)
class _Row:
    """A group at a depth, within the one of number `parent`, -1 at the top; `outer` is how often that repeats."""

    group: Group
    depth: int
    outer: int
    parent: int

    @property
    def steps(self) -> int:
        return self.outer * self.group.steps


def _nested(groups: Sequence[Group]) -> Iterator[_Row]:
    """Yield groups and those within them, in order."""
    number = itertools.count()

    def rows(items: Sequence[Group], depth: int, outer: int, parent: int) -> Iterator[_Row]:
        for group in items:
            own = next(number)
            yield _Row(group, depth, outer, parent)
            yield from rows(group.body, depth + 1, outer * group.times, own)

    return rows(groups, 0, 1, -1)


def _row_cells(simulation: Simulation, row: _Row) -> tuple[str, ...]:
    group, step = row.group, row.group.step
    start = seconds(group.start / FEMTOSECONDS) if group.start else "0"
    text = f"{_INDENT * row.depth}{f'{group.times} x ' if group.times > 1 else ''}"
    device = "" if step is None else class_name(simulation, step.device_class)
    text += f"these {len(group.body)}:" if step is None else _step_text(step)
    return start, seconds(group.duration / FEMTOSECONDS), device, text, "" if step is None else step.location


def _step_text(step: PathStep) -> str:
    name = "waiting for the host" if step.kind == HOST else step.name
    within = f" in {' in '.join(f'@{call.callee}' for call in reversed(step.calls))}" if step.calls else ""
    stream = f" on stream {step.op.attrs['stream']}" if step.stream and step.op is not None else ""
    return f"{name}{stream}{within}"


def _line(step: PathStep) -> str:
    if step.kind == HOST:
        return "waiting for the host"
    return step.location or "no line"


def _by_time(steps: Sequence[PathStep], by: Callable[[PathStep], _Name]) -> list[_Name]:
    """Return the distinct names of steps, those of the longest time first."""
    durations: dict[_Name, int] = {}
    for step in steps:
        durations[by(step)] = durations.get(by(step), 0) + step.duration
    return sorted(durations, key=lambda name: -durations[name])


def _total_row(total: Total) -> tuple[str, ...]:
    return total.name, f"{total.share:.1%}", seconds(total.seconds), f"{total.steps:,}", listed(total.others, 3)


def _rest_row(rest: Sequence[Total]) -> tuple[str, ...]:
    time, steps = sum(total.seconds for total in rest), sum(total.steps for total in rest)
    return f"{len(rest)} others", f"{sum(total.share for total in rest):.1%}", seconds(time), f"{steps:,}", ""


def _total_json(total: Total, name: str, others: str) -> dict[str, Any]:
    return {
        name: total.name, "seconds": total.seconds, "share": total.share, "steps": total.steps,
        others: list(total.others),
    }  # fmt: skip


def _group_json(group: Group, numbers: dict[int, int]) -> dict[str, Any]:
    plain = {"times": group.times, "start_s": group.start / FEMTOSECONDS, "duration_s": group.duration / FEMTOSECONDS}
    if group.body:
        return {**plain, "body": [_group_json(item, numbers) for item in group.body]}
    return {**plain, "step": numbers[id(group.step)]}


def _total_html(total: Total) -> str:
    kind = KIND_NAMES[total.kind]
    return (
        f"<tr><td>{escape(total.name)}</td><td>{escape(seconds(total.seconds))}</td><td>{total.share:.1%}</td>"
        f'<td>{total.steps:,}</td><td class="share"><i class="{kind}" style="width:{min(total.share, 1):.2%}"></i></td>'
        f'<td class="words"><code>{escape(listed(total.others, 4))}</code></td></tr>'
    )
