"""Print properties of hosts of a laboratory as JSON: ``python -m tests.hosts.inspect_hosts``, in namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.clocks import Clocks, has_compiler
from tests.hosts.laboratory import Laboratory
from tests.hosts.limits import has_memory_limits
from tests.hosts.switches import RelayedSwitch

DELAY, MONOTONIC, WALL = 2e-3, 864_000, -8_640_000
_CLOCKS = "import time, datetime; print(time.monotonic(), time.time(), datetime.datetime.now().timestamp())"
_CONNECT = "import socket, sys; s = socket.socket(); s.settimeout(0.4); print(s.connect_ex((sys.argv[1], 9)))"


def python(laboratory: Laboratory, name: str, *arguments: str) -> list[float]:
    """Run a program on a host; return the numbers that it prints."""
    process = laboratory.start(name, sys.executable, "-S", "-c", *arguments, stdout=subprocess.PIPE)
    return list(map(float, process.communicate(timeout=30)[0].split()))


def connect(laboratory: Laboratory, name: str, other: str) -> int:
    """Connect a host to a closed port of another; return the number of the error."""
    return int(python(laboratory, name, _CONNECT, laboratory.address(other))[0])


def main() -> None:
    """Print the line."""
    seen: dict[str, object] = {}
    clocks = {"n1": Clocks(MONOTONIC, WALL if has_compiler() else 0)}
    with (
        tempfile.TemporaryDirectory() as folder,
        Laboratory(Path(folder), ("n0", "n1", "n2"), delay=DELAY, clocks=clocks) as laboratory,
    ):
        assert isinstance(laboratory.switch, RelayedSwitch)
        (laboratory.hosts["n0"].root / "tmp" / "own").touch()
        seen["own"] = {name: (host.root / "tmp" / "own").exists() for name, host in laboratory.hosts.items()}
        seen["shared"] = {name: Path(f"{host.root}{folder}").exists() for name, host in laboratory.hosts.items()}
        command = [str(laboratory.shell), "-x", "n2", "hostname"]
        seen["name"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        now = (time.monotonic(), time.time(), time.time())
        for name in ("n0", "n1"):
            there = python(laboratory, name, _CLOCKS)
            seen[f"clocks {name}"] = [clock - here for clock, here in zip(there, now, strict=True)]
        link = laboratory.measure("n0", "n1")
        seen["link"] = [link.latency, link.bandwidth]
        seen["statistics"] = laboratory.switch.statistics()
        seen["connected"] = connect(laboratory, "n0", "n2")
        laboratory.cut("n2")
        seen["cut"] = connect(laboratory, "n0", "n2")
        laboratory.mend("n2")
        seen["mended"] = connect(laboratory, "n0", "n2")
        laboratory.cut_to("n2", "n0")
        seen["cut one way"] = connect(laboratory, "n0", "n2")
        groups = []
        if has_memory_limits():
            laboratory.share_of_core("n0", 0.5)
            laboratory.memory_of("n0", 64)
            groups = [link.resolve() for link in laboratory.hosts["n0"].limits.folder.iterdir()]
        seen["groups"] = [group.is_dir() for group in groups]
        disk = laboratory.full_disk("n2")
        try:
            Path(f"{laboratory.hosts['n2'].root}{disk}/file").write_bytes(bytes(10))
        except OSError as error:
            seen["disk"] = error.errno
    seen["groups left"] = [str(group) for group in groups if group.exists()]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
