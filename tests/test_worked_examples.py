"""The worked examples of the documents run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples" / "extend").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / name)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
