"""The rules of the house: modules and functions are short, what is public says what it is, linters see everything."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from mypy.modulefinder import FindModuleCache, SearchPaths

from scripts import house

ROOT = Path(__file__).parent.parent
LINES, FUNCTION_LINES = 400, 60

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


def outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods; those inside another belong to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outermost_functions(child)


def public_names(node: ast.Module | ast.ClassDef, within: str = "") -> Iterator[tuple[str, Definition]]:
    """The public functions and classes of a module or class with their names, those of public classes included."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield f"{within}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public_names(child, f"{within}{child.name}.")


def test_there_are_files_of_every_tree() -> None:
    assert {name.split("/")[0] for name in FILES} >= {"distir_relax", "benchmarks", "examples", "scripts", "tests"}


def test_modules_are_short() -> None:
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in FILES}
    assert {name: count for name, count in lengths.items() if count > LINES} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{name}:{function.lineno} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name in FILES
        for function in outermost_functions(tree_of(name))
    }
    assert {where: count for where, count in lengths.items() if count > FUNCTION_LINES} == {}


def test_what_is_public_says_what_it_is() -> None:
    silent = []
    for name in PACKAGE:
        tree = tree_of(name)
        named: list[tuple[str, ast.Module | Definition]] = [("the module", tree), *public_names(tree)]
        silent += [f"{name}: {public}" for public, node in named if not ast.get_docstring(node)]
    assert silent == []


def test_ruff_sees_every_file() -> None:
    seen = _lines_of(sys.executable, "-m", "ruff", "check", "--show-files", ".")
    assert sorted(str(Path(path).relative_to(ROOT)) for path in seen if path.endswith(".py")) == FILES


def test_mypy_sees_every_file_of_the_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["packages"]
    finder = FindModuleCache(SearchPaths((str(ROOT),), (), (), ()), fscache=None, options=None)
    found = [source.path for package in packages for source in finder.find_modules_recursive(package)]
    assert sorted(str(Path(path).relative_to(ROOT)) for path in found if path) == PACKAGE


def test_the_picture_of_the_house_is_current() -> None:
    assert house.main(["--check"]) == 0


def test_a_picture_shows_rooms_from_the_top_down_and_their_imports() -> None:
    rooms = {name: house.Room(name, (Path(__file__),), "<says>") for name in ("roof", "left", "right", "cellar")}
    plan = [[rooms["roof"]], [rooms["left"], rooms["right"]], [rooms["cellar"]]]
    picture = house.draw(plan, {("roof", "right"): 2, ("roof", "cellar"): 1})
    assert house.structure(picture) == ["title", "desc", "tip", *rooms, "roof-right", "roof-cellar"]
    assert "roof imports right: 2 imports" in picture
    assert "&lt;says&gt;" in picture
    tops = [place.top for place in house.placed(plan).values()]
    above, beside, below = (after - before for before, after in pairwise(tops))
    assert above == below > beside
