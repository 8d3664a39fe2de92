"""Host lists such as `a:2,b:1`, and the network to them."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from distir_relax.errors import RunError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_MOST = 1 << 16


@dataclass(frozen=True)
class Host:
    """A host, by name or IPv4 address, with the number of its ranks."""

    name: str
    slots: int

    @property
    def is_this(self) -> bool:
        """Whether the host is this machine, by one of the machine's own names."""
        return self.name in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


@dataclass(frozen=True)
class HostList:
    """The hosts of a launch, and the remote shell to them; empty for a launch on this machine alone."""

    hosts: tuple[Host, ...] = ()
    rsh: str = ""

    def __bool__(self) -> bool:
        return bool(self.hosts)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(host.slots for host in self.hosts)


THIS_MACHINE = HostList()


def read_hosts(text: str, ranks: int | None = None) -> tuple[Host, ...]:
    """Parse ``a:2,b:1`` or ``a,b`` (one rank each); the hosts must have `ranks` ranks in total, if it is given.

    Raises RunError for invalid text and other numbers of ranks.
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        counts = slots.isascii() and slots.isdecimal() and 0 < int(slots) < _MOST
        if not _NAME.fullmatch(name) or (colon and not counts):
            raise RunError(f"expected HOST or HOST:RANKS, found {part.strip()!r}", "--host", "for example a:2,b:1")
        hosts.append(Host(name, int(slots) if colon else 1))
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RunError(f"{twice!r} is listed twice", "--host", f"add its ranks up: {twice}:2")
    total = sum(host.slots for host in hosts)
    if ranks is not None and total != ranks:
        raise RunError(f"expected hosts with {ranks} ranks together, found {total}", "--host", "give each as HOST:N")
    return tuple(hosts)


def local_torchrun(ranks: int, program: Sequence[str]) -> list[str]:
    """Return the torchrun command of a launch on this machine alone."""
    return [
        sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "--no-python", *program,
    ]  # fmt: skip


def interface_to(host: str) -> tuple[str, str] | None:
    """Return the network interface that routes to a host, and this machine's address on it; None without a route."""
    import psutil

    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next(((name, own) for name, ends in interfaces if any(end.address == own for end in ends)), None)
