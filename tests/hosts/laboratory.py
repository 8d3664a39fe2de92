"""Hosts that are namespaces of this machine: each has a network, a name, mounts and a /tmp of its own.

Everything is within one `unshare`, which ends all processes with the test. A host is at 10.88.0.N, on one switch.

============  ==========================================================
a rate        a token bucket of the host's link (`rate`)
a cut         the link is down (`cut`), or packets to one host go nowhere (`cut_to`)
a dead host   all of its processes are killed (`kill`), or stopped (`stop`)
a slow one    a part of a core, by a cgroup (`share_of_core`)
a full disk   a small tmpfs (`small_disk`)
another time  its monotonic clock has another start (`days`)
============  ==========================================================
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
SWITCH = "sw"


def why_not() -> str:
    """Why this machine has no such hosts; empty if it has."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]:
        return f"hosts need {', '.join(missing)} (Debian: util-linux, iproute2)"
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip netns add a"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return "" if not tried.returncode else f"namespaces are not allowed here: {tried.stderr.strip()[:100]}"


def in_namespaces(module: str, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a module of the tests where it may make hosts."""
    command = [*UNSHARE, sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@dataclass(frozen=True)
class Link:
    """What was measured on a link: half of a round trip in seconds, and bytes a second."""

    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:.0f} us, {self.bandwidth * 8e-9:.2f} Gbit/s"


@dataclass
class Laboratory:
    """Hosts, by name. A context manager; it runs within `UNSHARE`."""

    folder: Path
    names: Sequence[str] = ("n0", "n1")
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Laboratory:
        Path("/run/netns").mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "netns", "add", SWITCH)
        _run("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", "br0", "up")
        for number, name in enumerate(self.names, 1):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", f"p{name}")
            _run("ip", "link", "set", f"v{name}", "netns", name)
            _run("ip", "-n", name, "link", "set", f"v{name}", "name", "eth0")
            _run("ip", "link", "set", f"p{name}", "netns", SWITCH)
            _run("ip", "-n", SWITCH, "link", "set", f"p{name}", "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"10.88.0.{number}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
        hosts = self.folder / "hosts"
        hosts.write_text("".join(f"{line}\n" for line in lines))
        _run("mount", "--bind", str(hosts), "/etc/hosts")
        shell = self.shell
        # As ssh: options, the host, a command line.
        shell.write_text(
            f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nh=$1; shift\n{_enter("$h")} sh -c "$*"\n'
        )
        shell.chmod(0o755)
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            self.kill(name)
        for process in self.processes:
            process.kill()
            process.wait()
        for mounted in ("/etc/hosts", "/run/netns"):
            _run("umount", "-l", mounted)

    @property
    def shell(self) -> Path:
        """A remote shell to the hosts."""
        return self.folder / "rsh"

    def address(self, name: str) -> str:
        """The address of a host."""
        return f"10.88.0.{self.names.index(name) + 1}"

    def start(self, name: str, *command: str, **options: object) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        process = subprocess.Popen(["sh", "-c", f'{_enter(name)} "$@"', name, *command], **options)  # type: ignore[call-overload]
        self.processes.append(process)
        return process  # type: ignore[no-any-return]

    def pids(self, name: str) -> list[int]:
        """The processes of a host."""
        return [int(text) for text in _run("ip", "netns", "pids", name).split()]

    def pids_of(self, name: str, *words: str) -> list[int]:
        """The processes of a host whose command lines have all of these words."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(word in line for word in words):
                    found.append(pid)
        return found

    def kill(self, name: str) -> None:
        """The host dies."""
        _signal(self.pids(name), signal.SIGKILL)

    def stop(self, name: str) -> None:
        """The host stops: none of its processes runs any more."""
        _signal(self.pids(name), signal.SIGSTOP)

    def cut(self, name: str) -> None:
        """Nobody reaches the host, and it reaches nobody."""
        _run("ip", "-n", SWITCH, "link", "set", f"p{name}", "down")

    def mend(self, name: str) -> None:
        """The inverse of `cut`."""
        _run("ip", "-n", SWITCH, "link", "set", f"p{name}", "up")

    def cut_to(self, name: str, other: str) -> None:
        """What a host sends to another goes nowhere; the other way is open."""
        nowhere = "02:00:00:00:00:99"
        _run(
            "ip",
            "-n",
            name,
            "neigh",
            "replace",
            self.address(other),
            "lladdr",
            nowhere,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    def rate(self, name: str, text: str) -> None:
        """What a host sends has this rate, such as 1gbit."""
        bucket = ("burst", "256kb", "latency", "20ms")
        _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", text, *bucket)

    def unlimit(self, *names: str) -> None:
        """The inverse of `rate`."""
        for name in names:
            with contextlib.suppress(RuntimeError):
                _run("tc", "-n", name, "qdisc", "del", "dev", "eth0", "root")

    def share_of_core(self, name: str, share: float) -> None:
        """The processes that the host has now, and those that they start, have a share of a core."""
        group = Path(f"/sys/fs/cgroup/cpu/distir-{os.getpid()}-{name}")
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text("5000")
        (group / "cpu.cfs_quota_us").write_text(str(round(5000 * share)))
        for pid in self.pids(name):
            (group / "cgroup.procs").write_text(str(pid))

    def measure(self, name: str, other: str) -> Link:
        """Measure the link from a host to another: 200 round trips of a byte, and 64 MB one way."""
        server = self.start(other, sys.executable, "-c", _SERVER, self.address(other))
        time.sleep(0.3)
        client = self.start(name, sys.executable, "-c", _CLIENT, self.address(other), stdout=subprocess.PIPE)
        out, _ = client.communicate(timeout=60)
        server.wait(timeout=10)
        latency, bandwidth = map(float, out.split())
        return Link(latency, bandwidth)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk of a number of megabytes."""
    folder.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "-l", str(folder))


def _enter(name: str) -> str:
    inner = f'hostname {name}; mount -t tmpfs -o size=64m tmpfs /tmp/.X11-unix 2>/dev/null; exec \\"\\$@\\"'
    return f'exec nsenter --net=/run/netns/{name} unshare --uts sh -c "{inner}" {name}'


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


_TRIPS, _BYTES = 200, 64 << 20
_SERVER = f"""
import socket, sys
s = socket.socket(); s.setsockopt(1, 2, 1); s.bind((sys.argv[1], 4711)); s.listen(); c, _ = s.accept()
c.setsockopt(6, 1, 1)
for _ in range({_TRIPS}): c.sendall(c.recv(1))
left = {_BYTES}
while left: left -= len(c.recv(min(left, 1 << 20)))
c.sendall(b"x"); c.recv(1)
"""
_CLIENT = f"""
import socket, statistics, sys, time
c = socket.create_connection((sys.argv[1], 4711), 10); c.setsockopt(6, 1, 1); t = []
for _ in range({_TRIPS}):
    a = time.perf_counter(); c.sendall(b"x"); c.recv(1); t.append(time.perf_counter() - a)
a = time.perf_counter(); c.sendall(bytes({_BYTES})); c.recv(1); b = time.perf_counter() - a
print(statistics.median(t) / 2, {_BYTES} / b)
"""


def main() -> None:
    """Print the links of three hosts as they are, and with rates."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), ("n0", "n1", "n2")) as laboratory:
        for rate in ("", "10gbit", "1gbit"):
            for name in laboratory.names if rate else ():
                laboratory.rate(name, rate)
            for one, other in (("n0", "n1"), ("n1", "n2")):
                print(f"{one} to {other}, {rate or 'no limit':9}: {laboratory.measure(one, other)}", flush=True)


if __name__ == "__main__":
    main()
