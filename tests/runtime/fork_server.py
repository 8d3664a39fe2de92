"""A Python that has imported what takes seconds to import, and runs each program it is asked for in a fork of itself.

``python fork_server.py SOCKET`` serves ``forked.py`` until its standard input is closed. Nothing of the package under
test is imported here: a fork imports that itself, as a new process does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch

LIBRARIES = (
    "numpy", "onnx", "psutil", "pydantic.fields", "rich.console", "scipy.optimize", "tvm.relax", "typer",
)  # fmt: skip


def main(address: str) -> None:
    """Serve; in a fork, run what it was made for."""
    for name in LIBRARIES:
        importlib.import_module(name)
    # The first export imports as much again.
    torch.export.export(torch.nn.Identity(), (torch.zeros(3),))
    # What a collector writes into each object, a fork would have to copy first.
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        signal.signal(signal.SIGCHLD, _reap)
        while sys.stdin not in (ready := select.select([listening, sys.stdin], [], [])[0]):
            assert ready == [listening]
            client = listening.accept()[0]
            if os.fork() == 0:
                listening.close()
                break
            client.close()
        else:
            return
    arguments = _fork_again(client)
    safe_path = arguments[0] == "-P"
    if safe_path:
        del arguments[0]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[:1] = [] if safe_path else [os.getcwd()]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_again(client: socket.socket) -> list[str]:
    """Arguments of the program, in the process that runs it; its parent waits, and ends it when the client is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = socket.recv_fds(client, 1, 3)[1]
    request = json.loads(client.makefile().readline())
    program = os.fork()
    if program == 0:
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        return list(request["arguments"])
    for number in (*files, 0, 1, 2):
        os.close(number)
    ended = os.pidfd_open(program)
    if ended not in select.select([client, ended], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(OSError):
        client.sendall(f"{status}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
