"""Starting the ranks of a bundle with this machine's mpirun."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distir_relax.errors import RunError
from distir_relax.runtime.launchers import check_connected

# Seconds that an mpirun has to end its ranks in its own order.
_GRACE = 1.0


@dataclass(frozen=True)
class Launcher:
    """An mpirun: where it is, whose it is ("Open MPI" or "MPICH"), and how it names its version."""

    path: str
    family: str
    version: str


def launch(n: int, arguments: Sequence[str], threads: int | None = None, graceful: bool = False) -> int:
    """Run `distir <arguments>` on `n` ranks, having printed the command; the exit code of the launch.

    A rank has `threads` threads, by default what OMP_NUM_THREADS says, or its share of the cores. When this process is
    interrupted, the launch and its ranks are ended first. A `graceful` launch is sent SIGUSR1, which mpirun forwards to
    the ranks, where this process is sent SIGTERM for the first time; the exit code is then SIGTERM's.

    Raises RunError when there is no mpirun, or a launcher started several tasks of this process.
    """
    check_connected()
    launcher = find_mpirun()
    each = str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, _cores() // n))
    command = mpirun_command(launcher, n, [sys.executable, "-m", "distir_relax", *arguments], each)
    print(shlex.join(command), file=sys.stderr, flush=True)
    with subprocess.Popen(command, env=launch_environment(each)) as process:
        try:
            with _forwarding(process) if graceful else nullcontext(()) as sent:
                code = process.wait()
            return 128 + signal.SIGTERM if sent and code else code
        except BaseException:
            _end(process)
            raise


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[Sequence[int]]:
    """While it is open, the first SIGTERM becomes a SIGUSR1 of `process`; gives those that came.

    mpirun kills its ranks a fraction of a second after a SIGTERM of its own.
    """
    sent: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def forward(number: int, frame: FrameType | None) -> None:
        sent.append(number)
        signal.signal(signal.SIGTERM, before)
        process.send_signal(signal.SIGUSR1)

    signal.signal(signal.SIGTERM, forward)
    try:
        yield sent
    finally:
        signal.signal(signal.SIGTERM, before)


def find_mpirun() -> Launcher:
    """The mpirun beside this Python, else the first in PATH. Raises RunError when there is none or it does not run."""
    beside = Path(sys.prefix) / "bin" / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        raise RunError(
            "there is no mpirun here",
            hint="pip install 'distir-relax[mpi]', or load your cluster's MPI; without it, distir run uses threads",
        )
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as wrong:
        raise RunError(f"mpirun does not run: {wrong}", path, "reinstall it, or put another first in PATH") from None
    text = (answer.stdout + answer.stderr).strip()
    if any(word in text for word in ("Open MPI", "OpenRTE", "prte")):
        family = "Open MPI"
    elif any(word in text for word in ("HYDRA", "MPICH", "Intel(R) MPI")):
        family = "MPICH"
    else:
        raise RunError(f"an mpirun of neither Open MPI nor MPICH: {text[:80]!r}", path, "start the ranks by hand")
    return Launcher(path, family, text.splitlines()[0])


def mpirun_command(launcher: Launcher, n: int, program: Sequence[str], threads: str) -> list[str]:
    """The command that starts `program` on `n` ranks, unbound, each with `threads` threads."""
    if launcher.family == "MPICH":
        return [launcher.path, "-bind-to", "none", "-genv", "OMP_NUM_THREADS", threads, "-n", str(n), *program]
    flags = ["--bind-to", "none", "-x", "OMP_NUM_THREADS"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if n > _cores():
        flags.append("--oversubscribe")
    return [launcher.path, *flags, "-n", str(n), *program]


def launch_environment(threads: str) -> dict[str, str]:
    """This process's environment with the number of threads per rank."""
    return {**os.environ, "OMP_NUM_THREADS": threads}


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End a launch and all of its ranks within a second, whatever they do."""
    import psutil

    try:
        ranks = psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    launcher.terminate()
    psutil.wait_procs([*ranks, psutil.Process(launcher.pid)], timeout=_GRACE)
    for process in ranks:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.kill()


def _cores() -> int:
    return len(os.sched_getaffinity(0))
