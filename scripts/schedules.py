"""Draws docs/schedules/: a picture of each pipeline schedule, on 4 ranks with 8 microbatches.

``python scripts/schedules.py`` draws them anew; ``--check`` exits 1 where the committed ones are others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from html import escape
from pathlib import Path

from distir_relax.schedules import Order, Timeline, Times, order_of, timeline
from distir_relax.schedules.task_times import Number

FOLDER = Path(__file__).parent.parent / "docs" / "schedules"
RANKS, MICROBATCHES = 4, 8

WIDTH, MARGIN, HEIGHT, GAP = 960, 52, 26, 4
AXIS, LEGEND = 22, 26
COLOURS = {"F": "#4c86c6", "B": "#3d8f5f", "I": "#3d8f5f", "W": "#c98a2b"}
DEEPER = {"F": "#234a70", "B": "#1f5236", "I": "#1f5236", "W": "#7d5210"}
"""Of further stages of a rank."""
SAYS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}

UNEQUAL = Times(forward=(3, 1, 1, 2), inputs=(3, 1, 1, 2), weights=(2, 1, 1, 2), send=Fraction(1, 2))
"""The first stage has an embedding, the last a head, and sends take half as long as the shortest tasks."""

STYLE = """
    text { font-family: system-ui, sans-serif }
    .name { fill: #7b848e; font-size: 13px }
    .task { fill: #ffffff; font-size: 11px; text-anchor: middle }
    .tick { fill: #7b848e; font-size: 11px; text-anchor: middle }
    .axis { stroke: #7b848e; stroke-width: 1 }
""".strip("\n")


def pictures() -> dict[str, str]:
    """The text of each picture, by file name."""
    found = {}
    for name, chunks in [
        *(("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2)),
        ("streaming", 1),
    ]:
        times = Times(*(Fraction(1, chunks),) * 3)
        order = order_of(name, RANKS, MICROBATCHES, chunks)
        found[f"{name}.svg"] = draw(name, timeline(order, times))
    for name in ("1f1b", "auto"):
        order = order_of(name, RANKS, MICROBATCHES, times=UNEQUAL)
        found[f"{name}-unequal.svg"] = draw(f"{name}, unequal stages", timeline(order, UNEQUAL))
    return found


def draw(title: str, found: Timeline) -> str:
    """One picture: ranks downwards, time to the right, each task with its microbatch; what it comes to, underneath."""
    order, scale = found.order, (WIDTH - MARGIN - 8) / float(found.makespan)
    below = order.ranks * (HEIGHT + GAP)
    height = below + AXIS + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}: {escape(summary(found))}</title>",
        f"<style>\n{STYLE}\n</style>",
    ]
    for rank in range(order.ranks):
        top = rank * (HEIGHT + GAP)
        parts.append(f'<text class="name" x="0" y="{top + 18}">rank {rank}</text>')
        for task, start, end in zip(order.tasks[rank], found.starts[rank], found.ends[rank], strict=True):
            left, wide = MARGIN + float(start) * scale, float(end - start) * scale
            colour = (DEEPER if task.stage != order.stages_of(rank)[0] else COLOURS)[task.kind]
            box = f'x="{left:.1f}" y="{top}" width="{wide - 1:.1f}" height="{HEIGHT}"'
            parts.append(f'<rect {box} rx="2" fill="{colour}"><title>{task}</title></rect>')
            if wide >= 9:
                middle = f'x="{left + (wide - 1) / 2:.1f}" y="{top + 17}"'
                parts.append(f'<text class="task" {middle}>{task.microbatch}</text>')
    parts += [*_axis(found.makespan, scale, below), *_legend(order, summary(found), below + AXIS), "</svg>"]
    return "\n".join(parts) + "\n"


def summary(found: Timeline) -> str:
    """The end, how long ranks are idle until then, and what they keep."""
    idle, peak = map(_numbers, (found.idle, found.peak))
    ends = f"ends at {_number(found.makespan)}, idle {idle}"
    return f"{ends}, keeps {peak} stage activations" if found.order.trains else ends


def main(arguments: Sequence[str]) -> int:
    """Draw, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where the committed pictures are others")
    check = parser.parse_args(arguments).check
    FOLDER.mkdir(exist_ok=True)
    found = pictures()
    if check:
        there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
        if found != there:
            names = sorted(name for name in found | there if found.get(name) != there.get(name))
            print(f"docs/schedules: {', '.join(names)} are others by now: run python scripts/schedules.py")
        return int(found != there)
    for name, text in found.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def _axis(makespan: Number, scale: float, top: int) -> list[str]:
    step = 5 if makespan > 20 else 2
    parts = [f'<line class="axis" x1="{MARGIN}" y1="{top}" x2="{WIDTH - 8}" y2="{top}"/>']
    for time in range(0, int(makespan) + 1, step):
        x = MARGIN + time * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{top + 16}">{time}</text>')
    return parts


def _legend(order: Order, words: str, top: int) -> list[str]:
    kinds = {task.kind for tasks in order.tasks for task in tasks}
    left, parts = MARGIN, []
    for kind in (kind for kind in COLOURS if kind in kinds):
        parts.append(f'<rect x="{left}" y="{top + 6}" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text class="name" x="{left + 17}" y="{top + 17}">{SAYS[kind]}</text>')
        left += 31 + round(6.7 * len(SAYS[kind]))
    if order.chunks > 1:
        parts.append(f'<rect x="{left}" y="{top + 6}" width="12" height="12" rx="2" fill="{DEEPER["F"]}"/>')
        parts.append(f'<text class="name" x="{left + 17}" y="{top + 17}">2nd stage</text>')
    parts.append(f'<text class="name" x="{WIDTH - 8}" y="{top + 17}" text-anchor="end">{escape(words)}</text>')
    return parts


def _numbers(numbers: Sequence[Number]) -> str:
    """One for each rank, or one for all."""
    shown = [_number(number) for number in numbers]
    return shown[0] if len(set(shown)) == 1 else " ".join(shown)


def _number(number: Number) -> str:
    return f"{float(number):g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
