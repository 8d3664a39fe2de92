"""Starting real launches for tests, each with a time limit and one thread a rank."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from distir_relax.runtime.launch import find_mpirun, mpirun_command

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60
PYTHON = sys.executable
_HERE = Path(__file__).resolve().parent
_OF_LAUNCHERS = ("OMPI_", "PMI", "PRTE_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_ADDR")


def environment() -> dict[str, str]:
    """This environment, as a shell that starts a launch would have it."""
    clean = {
        name: value for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS)
    }  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), str(_HERE), clean.get("PYTHONPATH", "")]))
    # Ranks of Open MPI that wait leave the core to the others, and to the tests of another worker.
    more = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {**clean, **more, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"}


def start(command: list[str], limit: int = LIMIT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end with these environment variables too; past `limit` seconds, end it and its ranks and
    fail with what they printed."""
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        command, env={**environment(), "PRTE_MCA_prte_tmpdir_base": folder, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # A launcher that is asked to end takes its ranks with it; one that is killed leaves them behind.
            process.terminate()
            out, err = process.communicate(timeout=20)
            raise AssertionError(f"no end within {limit} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def mpirun(n: int, *arguments: object, limit: int = LIMIT, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """`mpirun -n <n> python <arguments>`; see `interpreter`."""
    return start(mpirun_command(find_mpirun(), n, [*interpreter(fresh), *map(str, arguments)], "1"), limit)


def torchrun(n: int, *arguments: object, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node <n> python <arguments>`; see `interpreter`."""
    flags = ["--nproc-per-node", str(n), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--no-python"]
    python = interpreter(fresh)
    return start([*python, "-m", "torch.distributed.run", *flags, *python, *map(str, arguments)])


def torch_ranks(hosts: Sequence[int], *arguments: object, limit: int = LIMIT) -> list[str]:
    """Start the ranks of several hosts, of which each has a number of them, as agents do; return the printed texts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [(sum(hosts[:number]) + local, local, here) for number, here in enumerate(hosts) for local in range(here)]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(places))}
    started = [
        subprocess.Popen(
            [*interpreter(), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={
                **environment(), **variables, "RANK": str(rank), "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(here), "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        for rank, local, here in places
    ]  # fmt: skip
    deadline = time.monotonic() + limit
    try:
        texts = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in started), texts
    return texts


def python(*arguments: object, limit: int = LIMIT, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """`python <arguments>`, outside any launch; see `interpreter`."""
    return start([*interpreter(fresh), *map(str, arguments)], limit)


def interpreter(fresh: bool = False) -> list[str]:
    """The command of a Python: one that has torch and TVM loaded already, unless it is to be a `fresh` one.

    Loading them takes longer than most of what tests run. A fresh one is for tests of what is imported, of how much
    memory processes have, and of what they find out about each other.
    """
    return [PYTHON] if fresh else [PYTHON, "-I", "-S", str(_HERE / "forked.py"), _fork_server()]


def command(path: Path, *arguments: str) -> Path:
    """Write the command `path`: `interpreter()` with these arguments before those that it is given."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*interpreter(), *arguments])} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


@functools.cache
def _fork_server() -> str:
    """The address of a `fork_server.py` that lives as long as this process."""
    folder = tempfile.TemporaryDirectory()
    address = Path(folder.name) / "socket"
    server = subprocess.Popen([PYTHON, _HERE / "fork_server.py", address], env=environment(), stdin=subprocess.PIPE)
    assert server.stdin is not None
    for end in (folder.cleanup, server.wait, server.stdin.close):
        atexit.register(end)
    while not address.exists():
        assert server.poll() is None, "the fork server has ended"
        time.sleep(0.01)
    return str(address)
