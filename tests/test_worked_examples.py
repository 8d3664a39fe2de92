"""The worked examples of the documents run as they stand, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.processes import python

ROOT = Path(__file__).parent.parent


EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples" / "extend").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = python(ROOT / name, limit=240)
    assert done.returncode == 0, done.stderr
