"""Calls in a child process that aborts, crashes, hangs, raises or goes away."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import pytest

from distir_relax.kernels import isolated_calls
from distir_relax.kernels.isolated_calls import IsolatedCallError, call_isolated


def process() -> int:
    print("this goes to no caller")
    return os.getpid()


def read_nothing() -> None:
    ctypes.string_at(0)


def complain_and_abort() -> None:
    os.write(2, b"LLVM ERROR: cannot split\n\n")
    os.abort()


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail(kind: type[Exception], *arguments: int) -> None:
    raise kind(*arguments)


def test_a_child_stays_for_later_calls() -> None:
    child = call_isolated(process, seconds=60)
    assert child != os.getpid()
    assert call_isolated(process, seconds=60) == child
    assert call_isolated(os.path.join, "a", "b", seconds=60) == "a/b"


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (complain_and_abort, (), "ended by SIGABRT: LLVM ERROR: cannot split$"),
        (read_nothing, (), "ended by SIGSEGV"),
        (signal.raise_signal, (signal.SIGILL,), "ended by SIGILL"),
        (os._exit, (3,), "ended with exit code 3"),
    ],
)
def test_a_child_that_ends_is_an_error(function: object, arguments: tuple[int, ...], message: str) -> None:
    before = call_isolated(process, seconds=60)
    with pytest.raises(IsolatedCallError, match=message):
        call_isolated(function, *arguments, seconds=60)  # type: ignore[arg-type]
    assert call_isolated(process, seconds=60) != before


def test_a_child_that_hangs_is_an_error_and_is_gone() -> None:
    child = call_isolated(process, seconds=60)
    with pytest.raises(IsolatedCallError, match=r"no result within 0\.2 s"):
        call_isolated(time.sleep, 600, seconds=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_exceptions_are_raised_here() -> None:
    with pytest.raises(ZeroDivisionError, match=r"^7$"):
        call_isolated(fail, ZeroDivisionError, 7, seconds=60)
    with pytest.raises(RuntimeError, match=r"^1 and 2$"):
        call_isolated(fail, UnpicklableError, 1, 2, seconds=60)


def test_a_child_that_ended_while_idle_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    child = call_isolated(process, seconds=60)
    os.kill(child, signal.SIGTERM)
    assert isolated_calls._child is not None
    isolated_calls._child._process.wait()
    assert call_isolated(process, seconds=60) != child


def test_a_fork_starts_its_own_child() -> None:
    child = call_isolated(process, seconds=60)
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(call_isolated(process, seconds=60)).encode())
        isolated_calls._stop()
        os._exit(0)
    assert int(os.read(read, 20)) not in (child, os.getpid())
    os.wait()
    assert call_isolated(process, seconds=60) == child
    os.close(read)
    os.close(write)


def test_a_child_ends_with_its_parent() -> None:
    import subprocess

    code = (
        "from distir_relax.kernels.isolated_calls import call_isolated; import os\n"
        "print(call_isolated(os.getpid, seconds=60), flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    end = time.monotonic() + 5
    while os.path.exists(f"/proc/{ended.stdout.strip()}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{ended.stdout.strip()}")
