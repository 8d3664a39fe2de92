"""Draw docs/layers.svg: the packages of distir_relax by layer, and their imports.

``python scripts/layers.py`` draws it; ``--check`` exits 1 if the committed picture has other packages, layers or
imports than the code. Descriptions and line counts in it may be out of date: they change every day.
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
PICTURE = ROOT / "docs" / "layers.svg"

WIDTH, BOX, HEIGHT = 960, 540, 26
GAP, WALL = 10, 3  # between layers, and between packages of a layer
MARGIN, LANE = 10, 12
DESCRIPTION = 44  # letters, in the widest of usual typefaces

STYLE = """
    .package { fill: #234a70; stroke: #6fa3d6 }
    .module { fill: #4a5560; stroke: #94a1ad }
    .name { fill: #ffffff; font-size: 14px; font-weight: 600 }
    .description { fill: #d3dde8; font-size: 12px }
    .size { fill: #d3dde8; font-size: 11px; text-anchor: end }
    .note { fill: #7b848e; font-size: 13px }
    .out path, .in { stroke: #7b848e; stroke-width: 1; fill: none }
    .in { marker-end: url(#tip) }
    .out circle { fill: #7b848e; stroke: transparent; stroke-width: 8 }
    .out:hover path { stroke: #d9822b; stroke-width: 2.5 }
    .out:hover circle { fill: #d9822b }
""".strip("\n")


@dataclass(frozen=True)
class Component:
    """A subpackage or module of the package: its files, and the first words of its docstring."""

    name: str
    files: tuple[Path, ...]
    description: str

    @property
    def lines(self) -> int:
        """Number of lines of its files."""
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in self.files)


@dataclass(frozen=True)
class Position:
    """Position of a package: the top of its box, and the vertical lane of its imports."""

    component: Component
    top: int
    lane: int

    @property
    def leaves(self) -> int:
        """Height at which its imports leave the box."""
        return self.top + HEIGHT // 2 - 5

    @property
    def enters(self) -> int:
        """Height at which imports of it arrive."""
        return self.top + HEIGHT // 2 + 5


def layers() -> list[list[str]]:
    """Return the packages of each layer of the import contract, the top layer first."""
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


def component(name: str) -> Component:
    """Return the package of that name; its description is its docstring up to the first stop or colon."""
    folder = ROOT / PACKAGE / name
    files = tuple(sorted(folder.rglob("*.py"))) if folder.is_dir() else (folder.with_suffix(".py"),)
    front = folder / "__init__.py" if folder.is_dir() else files[0]
    text = ast.get_docstring(ast.parse(front.read_text(encoding="utf-8"))) or ""
    description = re.split(r"[:.](?=\s|$)|\n", text, maxsplit=1)[0].replace("`", "")
    return Component(name, files, textwrap.shorten(description, DESCRIPTION, placeholder=" …"))


def imports() -> dict[tuple[str, str], int]:
    """Count the imports between packages, by (importing package, imported package)."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=False, cache_dir=None)
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules - {PACKAGE, f"{PACKAGE}.__main__"}:
        for imported in graph.find_modules_directly_imported_by(module) - {PACKAGE}:
            found[module.split(".")[1], imported.split(".")[1]] += 1
    return {pair: count for pair, count in sorted(found.items()) if pair[0] != pair[1]}


def positions_of(plan: Sequence[Sequence[Component]]) -> dict[str, Position]:
    """Position the packages from the top down; the higher a package, the farther right its lane."""
    positions: dict[str, Position] = {}
    top, lane = MARGIN, WIDTH - MARGIN
    for layer in plan:
        for one in layer:
            positions[one.name] = Position(one, top, lane)
            top, lane = top + HEIGHT + WALL, lane - LANE
        top += GAP - WALL
    return positions


def _boxes(positions: Mapping[str, Position]) -> Iterator[str]:
    for name, position in positions.items():
        component, base = position.component, position.top + HEIGHT // 2 + 5
        files = len(component.files)
        kind = "package" if files > 1 else "module"
        size = f"{files} files, {component.lines:,} lines" if files > 1 else f"{component.lines:,} lines"
        yield f'  <g id="{name}">'
        yield f'    <rect class="{kind}" x="{MARGIN}" y="{position.top}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
        yield f'    <text class="name" x="{MARGIN + 12}" y="{base}">{name}</text>'
        yield f'    <text class="description" x="{MARGIN + 144}" y="{base}">{escape(component.description)}</text>'
        yield f'    <text class="size" x="{MARGIN + BOX - 10}" y="{base}">{size}</text>'
        yield "  </g>"


def _lines(positions: Mapping[str, Position], arrows: Mapping[tuple[str, str], int]) -> Iterator[str]:
    side = MARGIN + BOX
    for name, position in positions.items():
        lanes = [positions[source].lane for source, target in arrows if target == name]
        if lanes:
            yield f'  <path class="in" d="M{max(lanes)} {position.enters} H{side + 1}"/>'
    for name, position in positions.items():
        targets = [to for to in positions if (name, to) in arrows]
        if not targets:
            continue
        lowest = max(positions[to].enters for to in targets)
        yield '  <g class="out">'
        yield f'    <path d="M{side} {position.leaves} H{position.lane - 6} q6 0 6 6 V{lowest}"/>'
        for to in targets:
            count = arrows[name, to]
            title = f"{name} imports {to}: {count} {'import' if count == 1 else 'imports'}"
            dot = f'<circle id="{name}-{to}" cx="{position.lane}" cy="{positions[to].enters}" r="3">'
            yield f"    {dot}<title>{title}</title></circle>"
        yield "  </g>"


def draw(plan: Sequence[Sequence[Component]], arrows: Mapping[tuple[str, str], int]) -> str:
    """Draw the diagram as SVG; its element ids are the packages from the top down, and the imports."""
    positions = positions_of(plan)
    height = max(position.top for position in positions.values()) + HEIGHT + 34
    note = "Each package's line goes right, then down; a dot is an import of the package at the arrow."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'aria-labelledby="title desc" font-family="system-ui, -apple-system, \'Segoe UI\', Helvetica, Arial, '
            'sans-serif">',
            f'  <title id="title">The packages of {PACKAGE} by layer, with their imports</title>',
            f'  <desc id="desc">From the top layer down: {", ".join(positions)}. Each imports only those below '
            "it.</desc>",
            f"  <style>\n{STYLE}\n  </style>",
            '  <defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="#7b848e"/></marker></defs>',
            *_boxes(positions),
            *_lines(positions, arrows),
            f'  <text class="note" x="{MARGIN}" y="{height - 12}">{note}</text>',
            "</svg>\n",
        ]
    )


def structure(picture: str) -> list[str]:
    """Return the element ids of a diagram: its packages and imports."""
    return re.findall(r' id="([^"]+)"', picture)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the diagram, or check the committed one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only check whether the diagram is current")
    check = parser.parse_args(arguments).check
    plan, arrows = layers(), imports()
    if lost := {name for pair in arrows for name in pair} - {name for layer in plan for name in layer}:
        print(f"no layer in the layers contract of pyproject.toml for {', '.join(sorted(lost))}")
        return 1
    picture = draw([[component(name) for name in layer] for layer in plan], arrows)
    if not check:
        PICTURE.write_text(picture, encoding="utf-8")
        return 0
    if PICTURE.is_file() and structure(PICTURE.read_text(encoding="utf-8")) == structure(picture):
        return 0
    print("docs/layers.svg shows other packages, layers or imports than the code: run python scripts/layers.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
