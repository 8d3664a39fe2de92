"""A Python that has imported what takes seconds to import, and runs each program it is asked for in a fork of itself.

``python fork_server.py SOCKET`` serves ``forked.py`` until its standard input is closed. Modules of the package that
ranks import are imported here, too; a fork imports the rest itself, as a new process does.
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
from typing import Any

import torch

LIBRARIES = (
    "numpy", "onnx", "psutil", "pydantic.fields", "rich.console", "scipy.optimize", "tvm.relax", "typer",
    "distir_relax.cli.app", "distir_relax.compiler.training", "distir_relax.runtime.backends.torch",
    "distir_relax.runtime.execute", "distir_relax.runtime.launched",
    "distir_relax.runtime.process_session.handlers", "distir_relax.runtime.training.train",
    "distir_relax.runtime.transports.mpi",
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
        arguments = _serve(listening)
    if arguments is None:
        return
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


def _serve(listening: socket.socket) -> list[str] | None:
    """Return a program's arguments in the fork that is to run it, and None in the server once its input is closed.

    A program whose client is gone is killed.
    """
    programs: dict[int, tuple[int, socket.socket]] = {}  # by the file that says that it has ended
    while True:
        clients = {client.fileno(): ended for ended, (_, client) in programs.items()}
        ready: list[Any] = select.select([listening, sys.stdin, *programs, *clients], [], [])[0]
        if sys.stdin in ready:
            for program, _ in programs.values():
                os.kill(program, signal.SIGKILL)
            return None
        for ended in {*ready} & {*programs} | {clients[file] for file in ready if file in clients}:
            program, client = programs.pop(ended)
            if ended not in ready:
                os.kill(program, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            with suppress(OSError):
                client.sendall(f"{status}\n".encode())
            client.close()
            os.close(ended)
        if listening not in ready:
            continue
        client = listening.accept()[0]
        files = socket.recv_fds(client, 1, 3)[1]
        text = client.makefile().readline()
        if text and (program := os.fork()) == 0:
            for ended, (_, other) in programs.items():
                os.close(ended)
                other.close()
            client.close()
            return _become(json.loads(text), files)
        for file in files:
            os.close(file)
        if text:
            programs[os.pidfd_open(program)] = program, client
        else:
            client.close()


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Take over a client's standard files, folder and environment; return its arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = os.environ.get("FORKING_PYTHON", sys.executable)
    return list(request["arguments"])


if __name__ == "__main__":
    main(sys.argv[1])
