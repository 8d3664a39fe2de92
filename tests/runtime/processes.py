"""Starting real launches for tests, each with a time limit and one thread a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distir_relax.runtime.launch import find_mpirun, mpirun_command

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60


def environment() -> dict[str, str]:
    """This environment, as a shell that starts a launch would have it."""
    clean = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI", "PRTE_")) and name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    }  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), str(Path(__file__).parent), clean.get("PYTHONPATH", "")]))
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}


def start(command: list[str], limit: int = LIMIT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end with these environment variables too; past `limit` seconds, end it and its ranks and
    fail with what they printed."""
    with subprocess.Popen(
        command, env={**environment(), **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # A launcher that is asked to end takes its ranks with it; one that is killed leaves them behind.
            process.terminate()
            out, err = process.communicate(timeout=20)
            raise AssertionError(f"no end within {limit} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def mpirun(n: int, *arguments: object, limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    """`mpirun -n <n> python <arguments>`."""
    return start(mpirun_command(find_mpirun(), n, [sys.executable, *map(str, arguments)], "1"), limit)


def torchrun(n: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node <n> <arguments>`."""
    flags = ["--nproc-per-node", str(n), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return start([sys.executable, "-m", "torch.distributed.run", *flags, *map(str, arguments)])


def python(*arguments: object, limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    """`python <arguments>`, outside any launch."""
    return start([sys.executable, *map(str, arguments)], limit)
