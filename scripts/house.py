"""Draws docs/house.svg: the rooms of the package on the floors of its layers contract, and what imports what.

``python scripts/house.py`` draws it anew; ``--check`` exits 1 where the committed picture has other rooms, floors or
arrows than the code. What each room says about itself, and how large it is, may be older: that changes every day.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = "distir_relax"
PICTURE = ROOT / "docs" / "house.svg"

WIDTH, BOX, HEIGHT = 960, 540, 26
GAP, WALL = 10, 3  # between floors, and between rooms of one floor
MARGIN, LANE = 10, 12
WORDS = 44  # letters, in the widest of usual typefaces

STYLE = """
    .package { fill: #234a70; stroke: #6fa3d6 }
    .module { fill: #4a5560; stroke: #94a1ad }
    .name { fill: #ffffff; font-size: 14px; font-weight: 600 }
    .says { fill: #d3dde8; font-size: 12px }
    .size { fill: #d3dde8; font-size: 11px; text-anchor: end }
    .note { fill: #7b848e; font-size: 13px }
    .out path, .in { stroke: #7b848e; stroke-width: 1; fill: none }
    .in { marker-end: url(#tip) }
    .out circle { fill: #7b848e; stroke: transparent; stroke-width: 8 }
    .out:hover path { stroke: #d9822b; stroke-width: 2.5 }
    .out:hover circle { fill: #d9822b }
""".strip("\n")


@dataclass(frozen=True)
class Room:
    """A package or module right inside the package: its files, and what it says about itself."""

    name: str
    files: tuple[Path, ...]
    says: str

    @property
    def lines(self) -> int:
        """How many lines its files have."""
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in self.files)


@dataclass(frozen=True)
class Place:
    """Where a room is drawn: the top of its box, and its lane, beside the boxes, by which its imports go down."""

    room: Room
    top: int
    lane: int

    @property
    def leaves(self) -> int:
        """Where its own imports leave the box."""
        return self.top + HEIGHT // 2 - 5

    @property
    def enters(self) -> int:
        """Where imports of it arrive."""
        return self.top + HEIGHT // 2 + 5


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first, as the layers contract has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and "containers" not in contract
    )
    return [
        [name.strip(" ()").removeprefix(f"{PACKAGE}.") for name in re.split(r"[|:]", layer)]
        for layer in contract["layers"]
    ]


def room(name: str) -> Room:
    """The room of that name; its docstring's first words, up to a stop or a colon, are what it says."""
    folder = ROOT / PACKAGE / name
    files = tuple(sorted(folder.rglob("*.py"))) if folder.is_dir() else (folder.with_suffix(".py"),)
    front = folder / "__init__.py" if folder.is_dir() else files[0]
    text = ast.get_docstring(ast.parse(front.read_text(encoding="utf-8"))) or ""
    says = re.split(r"[:.](?=\s|$)|\n", text, maxsplit=1)[0].replace("`", "")
    return Room(name, files, textwrap.shorten(says, WORDS, placeholder=" …"))


def imports() -> dict[tuple[str, str], int]:
    """How many modules of a room import how many of another, added up: by (room that imports, room imported)."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=False, cache_dir=None)
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules - {PACKAGE, f"{PACKAGE}.__main__"}:
        for imported in graph.find_modules_directly_imported_by(module) - {PACKAGE}:
            found[module.split(".")[1], imported.split(".")[1]] += 1
    return {pair: count for pair, count in sorted(found.items()) if pair[0] != pair[1]}


def placed(plan: Sequence[Sequence[Room]]) -> dict[str, Place]:
    """The rooms by name, from the top of the house down; the higher a room, the farther out its lane."""
    places: dict[str, Place] = {}
    top, lane = MARGIN, WIDTH - MARGIN
    for floor in plan:
        for one in floor:
            places[one.name] = Place(one, top, lane)
            top, lane = top + HEIGHT + WALL, lane - LANE
        top += GAP - WALL
    return places


def _boxes(places: Mapping[str, Place]) -> Iterator[str]:
    for name, place in places.items():
        files, base = len(place.room.files), place.top + HEIGHT // 2 + 5
        kind = "package" if files > 1 else "module"
        size = f"{files} files, {place.room.lines:,} lines" if files > 1 else f"{place.room.lines:,} lines"
        yield f'  <g id="{name}">'
        yield f'    <rect class="{kind}" x="{MARGIN}" y="{place.top}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
        yield f'    <text class="name" x="{MARGIN + 12}" y="{base}">{name}</text>'
        yield f'    <text class="says" x="{MARGIN + 130}" y="{base}">{escape(place.room.says)}</text>'
        yield f'    <text class="size" x="{MARGIN + BOX - 10}" y="{base}">{size}</text>'
        yield "  </g>"


def _lines(places: Mapping[str, Place], arrows: Mapping[tuple[str, str], int]) -> Iterator[str]:
    side = MARGIN + BOX
    for name, place in places.items():
        lanes = [places[source].lane for source, target in arrows if target == name]
        if lanes:
            yield f'  <path class="in" d="M{max(lanes)} {place.enters} H{side + 1}"/>'
    for name, place in places.items():
        targets = [to for to in places if (name, to) in arrows]
        if not targets:
            continue
        lowest = max(places[to].enters for to in targets)
        yield '  <g class="out">'
        yield f'    <path d="M{side} {place.leaves} H{place.lane - 6} q6 0 6 6 V{lowest}"/>'
        for to in targets:
            count = arrows[name, to]
            title = f"{name} imports {to}: {count} {'import' if count == 1 else 'imports'}"
            dot = f'<circle id="{name}-{to}" cx="{place.lane}" cy="{places[to].enters}" r="3">'
            yield f"    {dot}<title>{title}</title></circle>"
        yield "  </g>"


def draw(plan: Sequence[Sequence[Room]], arrows: Mapping[tuple[str, str], int]) -> str:
    """The picture. The ids in it are the rooms from the top down, and the imports; no two houses have the same ids."""
    places = placed(plan)
    height = max(place.top for place in places.values()) + HEIGHT + 34
    note = "Each room's line goes right, then down; a dot is an import of the room that the arrow there points to."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'aria-labelledby="title desc" font-family="system-ui, -apple-system, \'Segoe UI\', Helvetica, Arial, '
            'sans-serif">',
            f'  <title id="title">The house: the rooms of {PACKAGE} and what imports what</title>',
            f'  <desc id="desc">From the top floor to the lowest: {", ".join(places)}. Each imports only those below '
            "it.</desc>",
            f"  <style>\n{STYLE}\n  </style>",
            '  <defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="#7b848e"/></marker></defs>',
            *_boxes(places),
            *_lines(places, arrows),
            f'  <text class="note" x="{MARGIN}" y="{height - 12}">{note}</text>',
            "</svg>\n",
        ]
    )


def structure(picture: str) -> list[str]:
    """The rooms of a picture, from the top floor down, and its arrows."""
    return re.findall(r' id="([^"]+)"', picture)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture, or check the one that is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the picture is current")
    check = parser.parse_args(arguments).check
    plan, arrows = floors(), imports()
    if lost := {name for pair in arrows for name in pair} - {name for floor in plan for name in floor}:
        print(f"no floor in the layers contract of pyproject.toml for {', '.join(sorted(lost))}")
        return 1
    picture = draw([[room(name) for name in floor] for floor in plan], arrows)
    if not check:
        PICTURE.write_text(picture, encoding="utf-8")
        return 0
    if PICTURE.is_file() and structure(PICTURE.read_text(encoding="utf-8")) == structure(picture):
        return 0
    print("docs/house.svg shows other rooms, floors or imports than the code: run python scripts/house.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
