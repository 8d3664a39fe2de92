"""Launch of the ranks of a bundle with mpirun or torchrun, on this machine or on several hosts."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distir_relax.errors import RunError
from distir_relax.runtime.agents.file_copies import LaunchFile
from distir_relax.runtime.agents.launch_hosts import HostsLaunch
from distir_relax.runtime.agents.post_mortem import RANK, RECORD, missing_ranks, read_record, write_post_mortem
from distir_relax.runtime.exit_codes import of_launch
from distir_relax.runtime.hosts import Host, local_torchrun
from distir_relax.runtime.launcher_detection import check_connected

# Seconds that mpirun has to end its ranks itself.
_GRACE = 1.0
# Variables that are also set for ranks on other hosts.
_FORWARDED = ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DISTIR_VERIFY")


@dataclass(frozen=True)
class Launcher:
    """An mpirun: its path, implementation ("Open MPI" or "MPICH") and version text."""

    path: str
    family: str
    version: str


def launch(n: int, arguments: Sequence[str], threads: int | None = None, graceful: bool = False) -> int:
    """Run `distir <arguments>` on `n` ranks with mpirun, after printing the command; return the launch's exit code.

    A rank has `threads` threads, by default OMP_NUM_THREADS or its share of the cores. When this process is
    interrupted, it ends the launch and its ranks first. In a `graceful` launch the first SIGTERM of this process is
    sent to mpirun as SIGUSR1, which it forwards to the ranks; the exit code is then SIGTERM's.

    Raises RunError when there is no mpirun, or a launcher started several tasks of this process.
    """
    check_connected()
    launcher = find_mpirun()
    each = _threads(n, threads)
    command = mpirun_command(launcher, n, _program(arguments), each)
    print(shlex.join(command), file=sys.stderr, flush=True)
    with _recording(n, each) as environment, subprocess.Popen(command, env=environment) as process:
        try:
            with _forwarding(process.send_signal) if graceful else nullcontext(()) as sent:
                code = process.wait()
            return 128 + signal.SIGTERM if sent and code else of_launch(code)
        except BaseException:
            end_launch(process)
            raise


def launch_with_torchrun(n: int, arguments: Sequence[str]) -> int:
    """`launch` with torchrun."""
    check_connected()
    command = local_torchrun(n, _program(arguments))
    print(shlex.join(command), file=sys.stderr, flush=True)
    with _recording(n, _threads(n, None)) as environment, subprocess.Popen(command, env=environment) as process:
        try:
            return of_launch(process.wait())
        except BaseException:
            end_launch(process)
            raise


def launch_on_hosts(
    hosts: Sequence[Host], arguments: Sequence[str], rsh: str = "", threads: int | None = None,
    files: Sequence[LaunchFile] = (), *, graceful: bool = False,
) -> int:  # fmt: skip
    """Run `distir <arguments>` on the ranks of hosts; return the launch's exit code, 0 only if every rank succeeded.

    An agent on each host, which `rsh` (ssh by default) starts, starts the ranks and watches them: the first rank or
    host that is lost is named, and ends the launch (`agents.supervisor`). torch.distributed connects the ranks, each
    with a number of `threads`, by default OMP_NUM_THREADS or its share of its host's cores. Hosts that lack one of the
    `files` get a copy. A `graceful` launch treats the first SIGTERM as that of `launch` does.
    """
    check_connected()
    variables = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    if number := threads or os.environ.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(number)
    launched = HostsLaunch(hosts, _program(arguments), variables, rsh, files)
    with _forwarding(launched.forward) if graceful else nullcontext(()) as sent:
        code = launched.run()
    return 128 + signal.SIGTERM if sent and code else code


@contextmanager
def _recording(n: int, threads: str) -> Iterator[Mapping[str, str]]:
    """Write the post-mortem file of a launch on this machine, if ranks have left records; yield its environment."""
    with tempfile.TemporaryDirectory(prefix="distir-launch-") as folder:
        yield {**launch_environment(threads, folder), RECORD: f"{folder}/{RANK}"}
        records = {rank: record for rank in range(n) if (record := read_record(Path(folder, str(rank))))}
        if records:
            collective, missing = missing_ranks(records, range(n))
            if missing:
                print(f"  missing from {collective}: rank {', '.join(map(str, missing))}", file=sys.stderr)
            silent = [str(rank) for rank in range(n) if rank not in records]
            failure = "the launch has failed" + bool(silent) * f"; rank {', '.join(silent)} left no record"
            path = write_post_mortem(failure, {platform.node(): range(n)}, records)
            print(f"  post-mortem: {path}", file=sys.stderr, flush=True)


@contextmanager
def _forwarding(send: Callable[[int], None]) -> Iterator[Sequence[int]]:
    """Call `send` with SIGUSR1 at the first SIGTERM while the block runs; yield the signals received.

    mpirun kills its ranks a fraction of a second after a SIGTERM of its own.
    """
    sent: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def forward(number: int, frame: FrameType | None) -> None:
        sent.append(number)
        signal.signal(signal.SIGTERM, before)
        send(signal.SIGUSR1)

    signal.signal(signal.SIGTERM, forward)
    try:
        yield sent
    finally:
        signal.signal(signal.SIGTERM, before)


def find_mpirun() -> Launcher:
    """Return the mpirun next to this Python, else the first in PATH. Raises RunError if none runs."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    path = str(own) if os.access(own, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
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
    """Return the command for `program` on `n` unbound ranks, each with `threads` threads."""
    if launcher.family == "MPICH":
        return [launcher.path, "-bind-to", "none", "-genv", "OMP_NUM_THREADS", threads, "-n", str(n), *program]
    flags = ["--bind-to", "none", "-x", "OMP_NUM_THREADS"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if n > _cores():
        flags.append("--oversubscribe")
    return [launcher.path, *flags, "-n", str(n), *program]


def local_launch(
    n: int, program: Sequence[str], launcher: str | None, threads: int | None, folder: str
) -> tuple[str, list[str], dict[str, str]]:
    """Return the launcher, command and environment that start `n` ranks of a Python `program` on this machine.

    `launcher` is "mpirun", "torchrun", or None for mpirun if there is one. A rank has `threads` threads, by default as
    by `launch`; `folder` is as for `launch_environment`. Raises RunError for another launcher, and as `find_mpirun`
    does.
    """
    if launcher not in (None, "mpirun", "torchrun"):
        raise RunError(f"expected the launcher 'mpirun' or 'torchrun', found {launcher!r}")
    each = _threads(n, threads)
    # Ranks of Open MPI that wait leave the core to others: this process is one more than there are ranks. On two busy
    # cores a token of SmolLM2-135M on two ranks took 95 ms instead of 200.
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1", **launch_environment(each, folder)}
    command = [sys.executable, "-P", *program]
    try:
        if launcher != "torchrun":
            return "mpirun", mpirun_command(find_mpirun(), n, command, each), environment
    except RunError:
        if launcher == "mpirun":
            raise
    return "torchrun", local_torchrun(n, command), environment


def launch_environment(threads: str, folder: str) -> dict[str, str]:
    """Return this process's environment with the number of threads per rank, and a `folder` of this launch alone.

    Open MPI writes files into a folder named after the process of mpirun. In /tmp one is left of each mpirun that was
    killed, and a later mpirun of the same number fails: "The PMIx server's listener thread failed to start".
    """
    return {**os.environ, "OMP_NUM_THREADS": threads, "PRTE_MCA_prte_tmpdir_base": folder}


def end_launch(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launch and all of its ranks within a second."""
    import psutil

    if launcher.poll() is not None:
        return
    try:
        own = psutil.Process(launcher.pid)
        ranks = own.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    launcher.terminate()
    psutil.wait_procs([*ranks, own], timeout=_GRACE)
    for process in ranks:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.kill()


def _program(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "distir_relax", *arguments]


def _threads(n: int, threads: int | None) -> str:
    """Return the threads of each of `n` ranks of this machine."""
    return str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, _cores() // n))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
