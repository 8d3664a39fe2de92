"""The switch of a laboratory: a bridge of the kernel, or a relay if links have a delay or losses.

Both connect a device `eth0` in the network namespace of each host, and cut a host off on the side of the switch: the
host itself sees no error, as with a cable that is pulled at the other end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from tests.hosts.relay import hardware_address
from tests.hosts.shell import run

BRIDGE = "sw"
"""The network namespace of the bridge."""


class Switch(Protocol):
    """Connects the network namespaces of hosts."""

    def connect(self) -> None:
        """Make a device `eth0` in the namespace of each host."""

    def cut(self, name: str) -> None:
        """Drop all that a host sends, and all that is for it."""

    def mend(self, name: str) -> None:
        """Undo `cut`."""

    def close(self) -> None:
        """End the switch."""


class Bridge:
    """A bridge of the kernel, in a namespace of its own: no delay, and the rate of the machine's memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def connect(self) -> None:
        """Make a pair of devices for each host, one of them a port of the bridge."""
        run("ip", "netns", "add", BRIDGE)
        run("ip", "-n", BRIDGE, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", BRIDGE, "link", "set", "br0", "up")
        for name in self.names:
            run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", f"p{name}")
            _move(name)
            run("ip", "link", "set", f"p{name}", "netns", BRIDGE)
            run("ip", "-n", BRIDGE, "link", "set", f"p{name}", "master", "br0", "up")

    def cut(self, name: str) -> None:
        """Take the port of a host down."""
        run("ip", "-n", BRIDGE, "link", "set", f"p{name}", "down")

    def mend(self, name: str) -> None:
        """Undo `cut`."""
        run("ip", "-n", BRIDGE, "link", "set", f"p{name}", "up")

    def close(self) -> None:
        """Do nothing: the bridge ends with its namespace."""


class RelayedSwitch:
    """A `tests.hosts.relay` process. `delay` is in seconds, `loss` the probability of a frame's loss."""

    def __init__(self, names: Sequence[str], delay: float, gbit: float, loss: float, seed: int) -> None:
        self.names = names
        self._options = [f"--delay={delay}", f"--gbit={gbit}", f"--loss={loss}", f"--seed={seed}"]
        self._process: subprocess.Popen[str] | None = None

    def connect(self) -> None:
        """Start the relay and move its devices into the namespaces of the hosts."""
        command = [sys.executable, "-m", "tests.hosts.relay", *self.names, *self._options]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the relay does not start: {self._process.communicate()[1].strip()}")
        for number, name in enumerate(self.names):
            _move(name)
            run("ip", "-n", name, "link", "set", "eth0", "address", hardware_address(number).hex(":"))

    def cut(self, name: str) -> None:
        """Let the relay drop the host's frames, and those for it."""
        self._command(f"cut {name}")

    def mend(self, name: str) -> None:
        """Undo `cut`."""
        self._command(f"mend {name}")

    def statistics(self) -> dict[str, float]:
        """Return `Relay.statistics`."""
        return self._command("statistics")

    def close(self) -> None:
        """End the relay, and with it the devices of the hosts."""
        if self._process is not None:
            self._process.communicate()

    def _command(self, text: str) -> dict[str, float]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer


def _move(name: str) -> None:
    """Move the device ``vNAME`` into the namespace of a host, as its `eth0`."""
    run("ip", "link", "set", f"v{name}", "netns", name)
    run("ip", "-n", name, "link", "set", f"v{name}", "name", "eth0")
