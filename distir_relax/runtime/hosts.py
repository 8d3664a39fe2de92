"""Hosts of a launch: `a:2,b:1` read, and the torchrun command of each."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
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
        """Whether it is this machine, by a name that it has for itself."""
        return self.name in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


def read_hosts(text: str, ranks: int) -> tuple[Host, ...]:
    """The hosts of ``a:2,b:1`` or ``a,b`` (one rank each), which must have `ranks` ranks together.

    Raises RunError for other texts and other numbers.
    """
    found = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        counts = slots.isascii() and slots.isdecimal() and 0 < int(slots) < _MOST
        if not _NAME.fullmatch(name) or (colon and not counts):
            raise RunError(f"expected HOST or HOST:RANKS, found {part.strip()!r}", "--host", "for example a:2,b:1")
        found.append(Host(name, int(slots) if colon else 1))
    names = [host.name for host in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RunError(f"{twice!r} stands there twice", "--host", f"add its ranks up: {twice}:2")
    total = sum(host.slots for host in found)
    if total != ranks:
        raise RunError(f"expected hosts with {ranks} ranks together, found {total}", "--host", "give each as HOST:N")
    return tuple(found)


def hosts_text(hosts: Sequence[Host]) -> str:
    """``a:2,b:1``, as mpirun takes it."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def torchrun_commands(
    hosts: Sequence[Host], program: Sequence[str], environment: Mapping[str, str], rsh: str, port: int
) -> list[list[str]]:
    """The command that starts the ranks of each host: torchrun here, through the remote shell `rsh` elsewhere.

    The store is on the first host, at `port`. On other hosts this Python, and the folder, must have the same path.
    """
    commands = []
    for number, host in enumerate(hosts):
        command = [
            sys.executable, "-P", "-m", "torch.distributed.run",
            "--nnodes", str(len(hosts)), "--node-rank", str(number),
            "--nproc-per-node", str(host.slots), "--master-addr", hosts[0].name, "--master-port", str(port),
            "--no-python", *program,
        ]  # fmt: skip
        if not host.is_this:
            variables = [f"{name}={value}" for name, value in environment.items()]
            text = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *variables, *command])}"
            command = [*shlex.split(rsh), host.name, text]
        commands.append(command)
    return commands


def local_torchrun(ranks: int, program: Sequence[str]) -> list[str]:
    """The torchrun command of a launch on this machine alone."""
    return [
        sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "--no-python", *program,
    ]  # fmt: skip
