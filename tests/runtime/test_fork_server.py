"""A program in a fork of the server is to its starter what a process of its own is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.runtime.processes import environment, interpreter, python

TELL = """
import json, os, sys
told = {"arguments": sys.argv[1:], "name": __name__, "path": sys.path[0], "folder": os.getcwd(),
        "odd": os.environ["ODD"], "process": os.getpid(), "read": sys.stdin.read(),
        "package": [m for m in sys.modules if m in ("distir_relax.__main__", "mpi4py.MPI")]}
print(json.dumps(told))
print("beside", file=sys.stderr)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_it_has_its_starters_arguments_folder_environment_and_files(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "inside").mkdir()
    program = tmp_path / "inside" / "tell.py"
    program.write_text(TELL)
    named = ["-m", "inside.tell"] if as_module else ["inside/tell.py"]
    done = subprocess.run(
        [*interpreter(), *named, "one two", "-3"], cwd=tmp_path, env={**environment(), "ODD": "é=7"}, input="given",
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told.pop("process") != os.getpid()
    assert told == {
        "arguments": ["one two", "-3"], "name": "__main__", "path": str(tmp_path if as_module else program.parent),
        "folder": str(tmp_path), "odd": "é=7", "read": "given", "package": [],
    }  # fmt: skip
    assert done.stderr == "beside\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [("", 0), ("raise SystemExit(7)", 7), ("raise ValueError('odd')", 1), ("import os\nos.kill(os.getpid(), 15)", -15)],
)
def test_it_ends_as_a_process_does(tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "ends.py").write_text(text)
    forked, fresh = (python(tmp_path / "ends.py", fresh=fresh) for fresh in (False, True))
    assert forked.returncode == fresh.returncode == code
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_nothing_is_left_of_it_when_its_starter_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(77)\n")
    with subprocess.Popen([*interpreter(), tmp_path / "waits.py"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        assert psutil.pid_exists(program)
        process.send_signal(signal.SIGKILL)
    for _ in range(500):
        if not psutil.pid_exists(program):
            return
        time.sleep(0.01)
    raise AssertionError("the program still runs")
