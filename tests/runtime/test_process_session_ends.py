"""How sessions of processes end: ranks that die, stop or stall, Ctrl-C, a driver that is killed. No process is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from handmade import DEADLOCK, SUM_COLUMNS, example_input, expected_outputs, mlp_bundle

import distir_relax as dr
from distir_relax.bundle import write_bundle
from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime import launch as launching
from distir_relax.runtime.session import SessionClosed
from tests.runtime.processes import environment

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(60), pytest.mark.usefixtures("quick_launches")]
SLEEPS = SUM_COLUMNS.replace("    z =", "    import time\n    time.sleep(1 if x[0, 0] > 100 else 0)\n    z =")
PYTHON = sys.executable
SLOW = example_input() + 1000


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Launch a handmade bundle; at the end, nothing of it is left."""
    sessions: list[dr.ProcessSession] = []

    def launch(text: str = SUM_COLUMNS, **options: Any) -> dr.ProcessSession:
        write_bundle(mlp_bundle([2, 1], text), tmp_path / "m.dist", overwrite=True)
        sessions.append(dr.launch(tmp_path / "m.dist", **{"timeout": 20, "trust_code": True, **options}))
        return sessions[-1]

    yield launch
    for session in sessions:
        session.close()
        assert not any(map(alive, (session._processes.launch.pid, *ranks_of(session))))


def ranks_of(session: Any) -> list[int]:
    return [process.pid for process in session._processes.processes]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        # It may end between two looks at it.
        return False


@pytest.fixture(autouse=True)
def _temporary(quick_launches: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of sessions, which are gone at the end."""
    folder = tmp_path / "temporary, with a long name".ljust(100, "-")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not any(folder.iterdir())


def check(session: Any, **options: float) -> None:
    found = session(example_input(), **options)["z"]
    np.testing.assert_allclose(
        found.numpy(), expected_outputs(session.bundle, example_input())["z"], rtol=1e-5, atol=1e-5
    )


def repeat(act: Callable[[Any], None], value: Any) -> None:
    while True:
        act(value)


def after(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_killed_rank_is_named(launched: Any, launcher: str) -> None:
    session = launched(SLEEPS, launcher=launcher)
    check(session)
    pid = ranks_of(session)[1]
    after(0.3, lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(RunError, match=rf"rank 1 has ended \(process {pid}\): killed, or crashed\n  hint: signal 9"):
        session(SLOW)
    with pytest.raises(SessionClosed, match="this session is closed: rank 1 has ended"):
        check(session)


def test_a_rank_that_is_killed_between_calls(launched: Any) -> None:
    session = launched()
    os.kill(ranks_of(session)[0], signal.SIGKILL)
    with pytest.raises(RunError, match="rank 0 has ended"):
        check(session)


def test_a_killed_launcher(launched: Any) -> None:
    session = launched()
    session._processes.launch.kill()
    # The ranks serve until they see its end.
    with pytest.raises(RunError, match="has ended"):
        repeat(check, session)


def test_ranks_that_stop_or_stall(launched: Any) -> None:
    session = launched(DEADLOCK)
    with pytest.raises(RunError, match=r"waited for more than 2 s\n  rank 0 waits in step #1 .* \(model.py:3\)"):
        session(example_input(), timeout=2)
    assert session.closed.startswith("a rank has waited for more than 2 s")


@pytest.mark.parametrize(("stopped", "message"), [
    ((1,), r"rank 1 does not answer: it is stopped \(process"),
    ((0, 1), r"rank 0 is stopped \(process \d+\)\n  rank 1 is stopped"),
])  # fmt: skip
def test_stopped_ranks_are_named(
    launched: Any, stopped: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(stopped) == 1:
        # Ranks that find each other among the children of mpirun.
        monkeypatch.setattr(sys, "executable", PYTHON)
    session = launched()
    for rank in stopped:
        os.kill(ranks_of(session)[rank], signal.SIGSTOP)
    with pytest.raises(RunError, match=r"a rank has waited for more than 1 s") as caught:
        check(session, timeout=1)
    assert re.search(message, str(caught.value))


def test_an_interrupt_leaves_the_session_usable(launched: Any) -> None:
    session = launched(SLEEPS)
    for seconds in (0.2, 0.6):
        after(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            session(SLOW)
        check(session)


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    write_bundle(mlp_bundle([2, 1]), tmp_path / "m.dist")
    before = set(psutil.Process().children(recursive=True))
    after(0.4, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        dr.launch(tmp_path / "m.dist")
    assert not set(psutil.Process().children(recursive=True)) - before


def test_closing_during_a_call(launched: Any) -> None:
    session = launched(SLEEPS)
    after(0.3, session.close)
    begin = time.monotonic()
    with pytest.raises(DistIRError, match=r"close\(\) was called"):
        session(SLOW)
    assert time.monotonic() - begin < 5


DRIVER = """
import os, sys, time
import distir_relax as dr
sys.executable = sys.argv[2]
if __name__ == "__main__":
    session = dr.launch(sys.argv[1], trust_code=True)
    if os.fork() == 0:
        time.sleep(40)
        os._exit(0)
    print(*(process.pid for process in session._processes.processes), flush=True)
    {}
"""


@pytest.mark.parametrize("then", [
    "time.sleep(40)", "session(__import__('numpy').full((4, 6), 1000, 'float32'))",
])  # fmt: skip
def test_a_driver_that_is_killed(tmp_path: Path, then: str) -> None:
    """A fork of it is still there."""
    import subprocess

    write_bundle(mlp_bundle([2, 1], SLEEPS.replace("sleep(1 if", "sleep(40 if")), tmp_path / "m.dist")
    (tmp_path / "driver.py").write_text(DRIVER.format(then))
    with subprocess.Popen(
        [PYTHON, tmp_path / "driver.py", tmp_path / "m.dist", sys.executable], env=environment(),
        stdout=subprocess.PIPE, text=True,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        ranks = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(ranks) == 2
        time.sleep(0.3)
        children = psutil.Process(driver.pid).children()
        driver.kill()
        begin = time.monotonic()
        while any(map(alive, ranks)) and time.monotonic() - begin < 10:
            time.sleep(0.02)
        assert not any(map(alive, ranks))
        assert time.monotonic() - begin < 4
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue


def test_what_ranks_print_is_not_on_standard_output(launched: Any, capfd: pytest.CaptureFixture[str]) -> None:
    # One after the other: pytest's file is not one to append to.
    prints = "    import time\n    time.sleep(0.1 * comm.rank)\n    print('from rank', comm.rank, flush=True)\n    z ="
    check(launched(SUM_COLUMNS.replace("    z =", prints)))
    shown = capfd.readouterr()
    assert shown.out == ""
    assert sorted(re.findall(r"from rank \d", shown.err)) == ["from rank 0", "from rank 1"], shown.err


@pytest.mark.parametrize(("script", "message"), [
    ("echo not enough >&2; exit 3", r"ranks 0, 1 ended before the session was ready; mpirun printed:\n  not enough"),
    ("exec sleep 30", r"the ranks have not connected within 1 s: ranks 0, 1 did not start"),
])  # fmt: skip
def test_launchers_that_start_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    write_bundle(mlp_bundle([2, 1]), tmp_path / "m.dist")
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Open MPI" && exit\n{script}\n')
    mpirun.chmod(0o755)
    monkeypatch.setattr(launching.sys, "prefix", str(tmp_path))
    with pytest.raises(RunError, match=message):
        dr.launch(tmp_path / "m.dist", timeout=1)


def test_a_rank_that_ends_while_it_starts(launched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, python = sys.executable, tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exit 3\nexec {before} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RunError, match="ended before the session was ready"):
        launched(timeout=5)
    monkeypatch.setattr(sys, "executable", before)
    with pytest.raises(NameError, match="nothing"):
        launched("nothing")
