"""Of the cases of a test the suite runs a drawn part, which is always the same and has values of all parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drawn_cases import draw

FILE = """
import pytest

@pytest.mark.drawn(4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt"])
def test_products(model, ranks):
    pass

@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(9))
def test_seeds(seed):
    pass

def test_one():
    pass
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return _run(tmp_path_factory.mktemp("suite"))


def test_every_value_of_a_parameter_is_drawn_before_others_are_drawn_twice(cases: list[str]) -> None:
    products = [case[:-1].split("[")[1].split("-") for case in cases if case.startswith("test_products")]
    assert len(products) == 4
    assert {ranks for _, ranks in products} == {"1", "2", "3", "5"}
    assert {model for model, _ in products} == {"mlp", "cnn", "gpt"}


def test_others_run_as_they_are(cases: list[str]) -> None:
    assert sum(case.startswith("test_seeds") for case in cases) == 2
    assert cases.count("test_one") == 1


def test_what_is_drawn_is_always_the_same(cases: list[str], tmp_path: Path) -> None:
    assert _run(tmp_path) == cases


@pytest.mark.parametrize("arguments", [["--every-case"], ["-k", "test_"], ["test_them.py::test_products"]])
def test_all_cases_are_there_for_who_asks(arguments: list[str], tmp_path: Path) -> None:
    cases = _run(tmp_path, *arguments)
    assert len([case for case in cases if case.startswith("test_products")]) == 12


def test_without_marks_nothing_is_left_out(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.path == request.path]
    assert draw(items) == (items, [])


def _run(folder: Path, *arguments: str) -> list[str]:
    """The names of the tests that a run in the folder has, in order."""
    (folder / "test_them.py").write_text(FILE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n drawn(number): so many\n mpirun: none\n shares: none\n")
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *plugins, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True
    )  # fmt: skip
    return [line.partition("::")[2].partition("@")[0] for line in done.stdout.splitlines() if "::" in line]
