"""The launcher of a session on several hosts: ``python -m distir_relax.runtime.agents.launch_command``.

It reads a line of JSON from its standard input: the hosts, the program, the variables of its ranks, the bundle that
they read, and the token of the launch. Its exit code is that of the launch.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from distir_relax.errors import DistIRError
from distir_relax.runtime.agents.file_copies import LaunchFile
from distir_relax.runtime.agents.launch_hosts import HostsLaunch
from distir_relax.runtime.hosts import Host, HostList

COMMAND = (sys.executable, "-P", "-m", "distir_relax.runtime.agents.launch_command")


def launch_line(hosts: HostList, program: list[str], variables: dict[str, str], bundle: str, token: bytes) -> bytes:
    """Return what the command reads. `bundle` is an argument of the program, or empty."""
    content = {
        "hosts": [[host.name, host.slots] for host in hosts.hosts], "rsh": hosts.rsh, "program": program,
        "variables": variables, "bundle": bundle, "token": token.hex(),
    }  # fmt: skip
    return json.dumps(content).encode() + b"\n"


def main() -> int:
    """Launch, and return the exit code."""
    from distir_relax.bundle import read_bundle
    from distir_relax.bundle.host_slices import host_files

    spec = json.loads(sys.stdin.readline())
    hosts = [Host(name, slots) for name, slots in spec["hosts"]]
    try:
        bundle = read_bundle(spec["bundle"], verify_weights=False)
        files = [LaunchFile(spec["bundle"], partial(host_files, bundle))]
        token = bytes.fromhex(spec["token"])
        return HostsLaunch(hosts, spec["program"], spec["variables"], spec["rsh"], files, token).run()
    except DistIRError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
