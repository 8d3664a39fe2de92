"""Rules of the code base: public names have docstrings, linters see every file, the layer diagram is current."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from mypy.modulefinder import FindModuleCache, SearchPaths

from scripts import layers

ROOT = Path(__file__).parent.parent

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _lines_of(*command: str) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# What git tracks, and what it would: a new module counts before it is added.
FILES = sorted(
    name
    for name in set(_lines_of("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"))
    if (ROOT / name).is_file()
)
PACKAGE = [name for name in FILES if name.startswith("distir_relax/")]


def tree_of(name: str) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), name)


def public_names(node: ast.Module | ast.ClassDef, within: str = "") -> Iterator[tuple[str, Definition]]:
    """The public functions and classes of a module or class with their names, those of public classes included."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield f"{within}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public_names(child, f"{within}{child.name}.")


def test_there_are_files_of_every_tree() -> None:
    assert {name.split("/")[0] for name in FILES} >= {"distir_relax", "benchmarks", "examples", "scripts", "tests"}


def test_public_names_have_docstrings() -> None:
    missing = []
    for name in PACKAGE:
        tree = tree_of(name)
        named: list[tuple[str, ast.Module | Definition]] = [("the module", tree), *public_names(tree)]
        missing += [f"{name}: {public}" for public, node in named if not ast.get_docstring(node)]
    assert missing == []


def test_ruff_sees_every_file() -> None:
    seen = _lines_of(sys.executable, "-m", "ruff", "check", "--show-files", ".")
    assert sorted(str(Path(path).relative_to(ROOT)) for path in seen if path.endswith(".py")) == FILES


def test_mypy_sees_every_file_of_the_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["packages"]
    finder = FindModuleCache(SearchPaths((str(ROOT),), (), (), ()), fscache=None, options=None)
    found = [source.path for package in packages for source in finder.find_modules_recursive(package)]
    assert sorted(str(Path(path).relative_to(ROOT)) for path in found if path) == PACKAGE


def test_the_layer_diagram_is_current() -> None:
    assert layers.main(["--check"]) == 0


def test_a_diagram_shows_packages_from_the_top_down_and_their_imports() -> None:
    names = ("top", "left", "right", "bottom")
    packages = {name: layers.Component(name, (Path(__file__),), "<text>") for name in names}
    plan = [[packages["top"]], [packages["left"], packages["right"]], [packages["bottom"]]]
    picture = layers.draw(plan, {("top", "right"): 2, ("top", "bottom"): 1})
    assert layers.structure(picture) == ["title", "desc", "tip", *names, "top-right", "top-bottom"]
    assert "top imports right: 2 imports" in picture
    assert "&lt;text&gt;" in picture
    tops = [position.top for position in layers.positions_of(plan).values()]
    above, within, below = (after - before for before, after in pairwise(tops))
    assert above == below > within
