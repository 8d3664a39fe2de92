"""Users' files are imported as scripts are, and replace no other module."""

from __future__ import annotations

import builtins
import importlib
import json
import sys
from pathlib import Path

import pytest

from distir_relax.support.user_function import find_function


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules)


@pytest.mark.parametrize("name", ["json", "torch", "wave", "mpi4py"])
def test_a_file_named_like_a_module_does_not_replace_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text("class Model:\n    pass\n\n\ndef build():\n    return Model\n", encoding="utf-8")
    made = find_function(f"{file}:build")()
    # Its classes can be found by name, as pickle does.
    assert sys.modules[made.__module__].Model is made
    assert sys.modules["json"] is json
    assert json.loads("[1]") == [1]
    if name in sys.stdlib_module_names:
        assert importlib.import_module(name).__file__ != str(file)


def test_a_file_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "some_neighbour.py").write_text("NUMBER = 127\n", encoding="utf-8")
    file = tmp_path / "main_file.py"
    file.write_text("import some_neighbour\n\n\ndef build():\n    return some_neighbour.NUMBER\n", encoding="utf-8")
    assert find_function(f"{file}:build")() == 127
    assert find_function(f"{file}:build").__module__ == "main_file"


def test_a_file_is_imported_once_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "counted_imports.py"
    file.write_text("import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\ndef f(): return times\n")
    paths = len(sys.path)
    try:
        assert [find_function(f"{file}:f")() for _ in range(3)] == [1, 1, 1]
        assert len(sys.path) == paths + 1
        file.write_text(file.read_text() + "# changed\n")
        assert find_function(f"{file}:f")() == 2
        assert len(sys.path) == paths + 1
    finally:
        del builtins.times  # type: ignore[attr-defined]
        sys.path.remove(str(tmp_path))
