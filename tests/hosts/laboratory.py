"""Hosts that are namespaces of this machine: each has a network, a name, mounts and a /tmp of its own.

Everything is within one `unshare`, which ends all processes with the test. A host is at 10.88.0.N, on one switch.

============  ========================================================================================
a rate        a token bucket of the host's link (`rate`)
a delay       a relay as the switch, also with a rate and with random losses (`delay`, `gbit`, `loss`)
a cut         the port of the switch is closed (`cut`), or packets to one host go nowhere (`cut_to`)
a dead host   all of its processes are killed (`kill`), or stopped (`stop`)
a slow one    a part of a core, by a control group (`share_of_core`)
little memory a limit, by a control group: the kernel kills who needs more (`memory_of`)
a full disk   a small tmpfs without room (`full_disk`)
another time  other monotonic and wall clocks (`clocks`)
============  ========================================================================================

``python -m tests.hosts.laboratory`` measures the links, and the CPU time of the relay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.clocks import VARIABLE, Clocks, wall_clock_library
from tests.hosts.links import BYTES, CLIENT, SERVER, Link
from tests.hosts.namespaces import NamespaceHost
from tests.hosts.shell import run
from tests.hosts.switches import Bridge, RelayedSwitch, Switch

UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
NOWHERE = "02:00:00:00:00:99"
"""A hardware address that no host has."""


def why_not() -> str:
    """Return the reason why this machine has no such hosts; empty if it has."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]:
        return f"hosts need {', '.join(missing)} (Debian: util-linux, iproute2)"
    if not Path("/dev/net/tun").exists():
        return "hosts need /dev/net/tun"
    makes = "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip netns add a && unshare --time true"
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", makes],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return "" if not tried.returncode else f"namespaces are not allowed here: {tried.stderr.strip()[:100]}"


def in_namespaces(module: str, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a module of the tests where it may make hosts."""
    command = [*UNSHARE, sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@dataclass
class Laboratory:
    """Hosts, by name. A context manager; it runs within `UNSHARE`.

    With a `delay`, in seconds and one way, or a `loss`, the probability of a frame's loss drawn by `seed`, hosts are
    connected by a relay, whose links have `gbit`; otherwise by a bridge. Folders of /tmp that are `shared` are visible
    on all hosts, as are `folder`, the working directory, and the folders of Python's modules. `clocks` are those of
    hosts whose clocks differ from the machine's.
    """

    folder: Path
    names: Sequence[str] = ("n0", "n1")
    shared: Sequence[Path] = ()
    delay: float = 0.0
    gbit: float = 1.0
    loss: float = 0.0
    seed: int = 0
    clocks: Mapping[str, Clocks] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    hosts: dict[str, NamespaceHost] = field(default_factory=dict)

    def __enter__(self) -> Laboratory:
        Path("/run/netns").mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        run("ip", "link", "set", "lo", "up")
        for name in self.names:
            run("ip", "netns", "add", name)
        self.switch.connect()
        for name in self.names:
            run("ip", "-n", name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
        names = self.folder / "names"
        names.write_text("".join(f"{line}\n" for line in lines))
        run("mount", "--bind", str(names), "/etc/hosts")
        shared = [self.folder, Path.cwd(), Path(sys.prefix), *self.shared, *map(Path, filter(None, sys.path))]
        preload = self._preload()
        for name in self.names:
            clocks = self.clocks.get(name, Clocks())
            # A process that another host starts inherits the variables of that host.
            variables = {**preload, VARIABLE: str(clocks.wall)} if preload else {}
            self.hosts[name] = NamespaceHost(name, self.folder / name, shared, clocks, variables)
        # As ssh: options, the host, a command line.
        self.shell.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nh=$1; shift\n'
            f'exec "{self.folder}/$h/enter" sh -c "$*"\n'
        )
        self.shell.chmod(0o755)
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.hosts:
            self.kill(name)
        for process in self.processes:
            process.kill()
            process.wait()
        for host in self.hosts.values():
            host.close()
        self.switch.close()
        for mounted in ("/etc/hosts", "/run/netns"):
            run("umount", "-l", mounted)

    def __post_init__(self) -> None:
        is_relayed = bool(self.delay or self.loss)
        self.switch: Switch = (
            RelayedSwitch(self.names, self.delay, self.gbit, self.loss, self.seed) if is_relayed else Bridge(self.names)
        )

    @property
    def shell(self) -> Path:
        """A remote shell to the hosts."""
        return self.folder / "rsh"

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"10.88.0.{self.names.index(name) + 1}"

    def start(self, name: str, *command: str, **options: object) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        process = subprocess.Popen([str(self.hosts[name].entrance), *command], **options)  # type: ignore[call-overload]
        self.processes.append(process)
        return process  # type: ignore[no-any-return]

    def pids(self, name: str) -> list[int]:
        """Return the processes of a host."""
        return self.hosts[name].pids()

    def pids_of(self, name: str, *words: str) -> list[int]:
        """Return the processes of a host whose command lines have all of these words."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(word in line for word in words):
                    found.append(pid)
        return found

    def kill(self, name: str) -> None:
        """Kill all processes of a host."""
        _signal(self.pids(name), signal.SIGKILL)

    def stop(self, name: str) -> None:
        """Stop all processes of a host."""
        _signal(self.pids(name), signal.SIGSTOP)

    def cut(self, name: str) -> None:
        """Cut a host off: nobody reaches it, and it reaches nobody."""
        self.switch.cut(name)

    def mend(self, name: str) -> None:
        """Undo `cut` and `cut_to`."""
        self.switch.mend(name)
        run("ip", "-n", name, "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def cut_to(self, name: str, other: str) -> None:
        """Lose the packets of a host to another; the other way is open."""
        neighbor = (self.address(other), "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
        run("ip", "-n", name, "neigh", "replace", *neighbor)

    def rate(self, name: str, text: str) -> None:
        """Limit the rate at which a host sends, such as 1gbit."""
        bucket = ("burst", "256kb", "latency", "20ms")
        run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", text, *bucket)

    def unlimit(self, *names: str) -> None:
        """Undo `rate`."""
        for name in names:
            with contextlib.suppress(RuntimeError):
                run("tc", "-n", name, "qdisc", "del", "dev", "eth0", "root")

    def share_of_core(self, name: str, share: float) -> None:
        """Limit the processor time of a host's processes to a share of a core."""
        self.hosts[name].limits.share_of_core(share, self.pids(name))

    def memory_of(self, name: str, megabytes: int) -> None:
        """Limit the memory of a host's processes."""
        self.hosts[name].limits.memory(megabytes, self.pids(name))

    def full_disk(self, name: str) -> Path:
        """Mount a disk without room on a host; return its folder there."""
        disk = self.folder / f"disk-{name}"
        disk.mkdir()
        script = 'mount -t tmpfs -o size=64k tmpfs "$0" && ! cat /dev/zero > "$0/filled" 2>/dev/null'
        if self.start(name, "sh", "-c", script, str(disk)).wait(10):
            raise RuntimeError(f"there is no full disk on {name}")
        return disk

    def fill_disk(self) -> None:
        """Fill the disk of `folder`."""
        with contextlib.suppress(OSError), self._filling.open("wb", buffering=0) as file:
            while file.write(bytes(65_536)):
                pass

    def empty_disk(self) -> None:
        """Undo `fill_disk`."""
        self._filling.unlink(missing_ok=True)

    def bytes_received(self, name: str) -> int:
        """Return the bytes that have arrived at a host."""
        return int(run("ip", "netns", "exec", name, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))

    def measure(self, name: str, other: str) -> Link:
        """Measure the link from a host to another: 200 round trips of a byte, and 64 MB one way."""
        server = self.start(other, sys.executable, "-c", SERVER, self.address(other), stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        client = self.start(name, sys.executable, "-c", CLIENT, self.address(other), stdout=subprocess.PIPE)
        out, _ = client.communicate(timeout=60)
        server.communicate(timeout=10)
        latency, bandwidth = map(float, out.split())
        return Link(latency, bandwidth)

    @property
    def _filling(self) -> Path:
        return self.folder / "filling"

    def _preload(self) -> dict[str, str]:
        """Return the variable that loads the library of the wall clock, if a host has another one."""
        if not any(clocks.wall for clocks in self.clocks.values()):
            return {}
        return {"LD_PRELOAD": str(wall_clock_library(self.folder))}


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def main() -> None:
    """Print the links of hosts as they are, with rates, and with a relay, and the CPU time of the relay."""
    import tempfile

    names = ("n0", "n1", "n2")
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), names) as laboratory:
        for rate in ("", "10gbit", "1gbit"):
            for name in names if rate else ():
                laboratory.rate(name, rate)
            for one, other in (("n0", "n1"), ("n1", "n2")):
                print(f"{one} to {other}, {rate or 'no limit':28}: {laboratory.measure(one, other)}", flush=True)
    for delay, gbit, loss in ((0.15e-3, 1.0, 0.0), (0.15e-3, 10.0, 0.0), (5e-3, 1.0, 0.0), (0.15e-3, 1.0, 0.01)):
        kind = f"{delay * 1e3:g} ms, {gbit:g} Gbit/s, {loss:.0%} lost"
        with (
            tempfile.TemporaryDirectory() as folder,
            Laboratory(Path(folder), names, delay=delay, gbit=gbit, loss=loss) as laboratory,
        ):
            switch = laboratory.switch
            assert isinstance(switch, RelayedSwitch)
            for one, other in (("n0", "n1"), ("n1", "n2")):
                before = switch.statistics()
                link = laboratory.measure(one, other)
                after = switch.statistics()
                cpu = (after["cpu"] - before["cpu"]) * (100 << 20) / BYTES
                lost = (after["dropped"] - before["dropped"]) / (after["frames"] - before["frames"])
                print(f"{one} to {other}, {kind:28}: {link}, {lost:5.1%} lost, {cpu:.2f} CPU s per 100 MiB", flush=True)


if __name__ == "__main__":
    main()
