"""Calls of functions in a child process, which may abort, crash or hang without ending this one.

A compiler that meets code it cannot lower ends its process, and so does machine code for another processor. The child
stays for later calls: it pays once for imports that take seconds. It ends when it has had no call for `IDLE_SECONDS`,
and with this process.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import TypeVar

T = TypeVar("T")
IDLE_SECONDS = 20.0
"""Seconds after which a child that has no calls ends: it holds the memory of its imports."""
_GRACE_SECONDS = 10
"""Seconds after a time limit when the child ends by itself, since this process may be gone."""


class IsolatedCallError(RuntimeError):
    """The child process has ended during a call, or exceeded its time limit."""


def call_isolated(function: Callable[..., T], *arguments: object, seconds: float) -> T:
    """Return ``function(*arguments)``, computed by the child process within `seconds`.

    The function is one of a module; arguments and result can be pickled. An exception of the function is raised here.
    Raises IsolatedCallError if the child ends or takes longer.
    """
    global _child
    request = pickle.dumps((function, arguments, math.ceil(seconds) + _GRACE_SECONDS))
    with _lock:
        if _child is not None and not _child.is_ready():
            _child.stop()
            _child = None
        _child = _child or _Child()
        try:
            answer = _child.call(request, seconds)
        except IsolatedCallError:
            _child = None
            raise
    is_result, value = pickle.loads(answer)
    if is_result:
        return value  # type: ignore[no-any-return]
    raise value


class _Child:
    """The child process, with connections for requests and answers, and a file for its errors."""

    def __init__(self) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115 - open as long as the child runs
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(IDLE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()

    def is_ready(self) -> bool:
        """Return whether the child still runs; one without calls ends by itself."""
        # An idle child closes its end of the connection: that is something to read.
        return self._process.poll() is None and not self._answers.poll()

    def call(self, request: bytes, seconds: float) -> bytes:
        try:
            self._requests.send_bytes(request)
            if not self._answers.poll(seconds):
                self.stop()
                raise IsolatedCallError(f"no result within {seconds:g} s")
            return self._answers.recv_bytes()
        except (EOFError, OSError):
            message = f"{_description(self._process.wait())}{self._last_line()}"
            self.close()
            raise IsolatedCallError(message) from None

    def stop(self) -> None:
        self.close()
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close this process's ends of the connections, and the file."""
        self._requests.close()
        self._answers.close()
        self._errors.close()

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        return next((f": {line}" for line in reversed(lines) if line), "")


def _description(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with exit code {status}"


def _stop() -> None:
    if _child is not None:
        _child.stop()


def _forget() -> None:
    """In a fork, leave the child to the process that started it."""
    global _child, _lock
    if _child is not None:
        _child.close()
    _child, _lock = None, threading.Lock()


_child: _Child | None = None
_lock = threading.Lock()
atexit.register(_stop)
os.register_at_fork(after_in_child=_forget)


def _serve() -> None:
    """Answer requests on standard input and output, which are no longer those of the functions."""
    requests, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while requests.poll(float(sys.argv[1])):
        try:
            request = requests.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments, limit = pickle.loads(request)
            # The signal ends the process in the midst of native code, too.
            signal.alarm(limit)
            answer = pickle.dumps((True, function(*arguments)))
        except Exception as error:
            answer = _pickled(error)
        signal.alarm(0)
        answers.send_bytes(answer)


def _pickled(error: Exception) -> bytes:
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:  # of a library's own pickling
        answer = pickle.dumps((False, RuntimeError(str(error))))
    return answer


if __name__ == "__main__":
    _serve()
    # Libraries' own ends of a process may crash.
    os._exit(0)
