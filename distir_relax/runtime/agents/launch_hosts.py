"""The launcher's process of a launch on several hosts: it starts an agent on each, and ends the launch as a whole."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from distir_relax.errors import RunError
from distir_relax.runtime.agents.connection import Listener, in_real_time
from distir_relax.runtime.agents.file_copies import FileServer, LaunchFile
from distir_relax.runtime.agents.post_mortem import positions, write_post_mortem
from distir_relax.runtime.agents.supervisor import HostState, Supervisor, launch_environments
from distir_relax.runtime.agents.versions import versions
from distir_relax.runtime.agents.wire import Message
from distir_relax.runtime.hosts import Host, interface_to

AGENT = ("-P", "-m", "distir_relax.runtime.agents.host_process")
# Seconds that the commands which started the agents have to end.
_ENDING = 2.0


class HostsLaunch:
    """A launch of `program` on hosts, by agents that the remote shell `rsh` starts, with `variables` for all ranks.

    Hosts that lack one of the `files`, which are arguments of the program, get a copy. By default the token is drawn.
    """

    def __init__(
        self, hosts: Sequence[Host], program: Sequence[str], variables: Mapping[str, str], rsh: str,
        files: Sequence[LaunchFile] = (), token: bytes | None = None,
    ) -> None:  # fmt: skip
        self.program, self.variables, self.rsh = program, variables, rsh or "ssh"
        bounds = pairwise(accumulate((host.slots for host in hosts), initial=0))
        states = [HostState(host.name, range(*ends)) for host, ends in zip(hosts, bounds, strict=True)]
        self.supervisor = Supervisor(states, time.monotonic(), self.rsh, versions())
        self._token = token or secrets.token_bytes(32)
        others = [host.name for host in hosts if not host.is_this]
        route = interface_to(others[0]) if others else None
        try:
            # On the interface to the first other host, and on no other.
            address = route[1] if route else "127.0.0.1"
            self._listener = Listener(address, self._token, "launcher", range(len(hosts)))
            self._files = FileServer(address, self._token, files, [(state.name, state.ranks) for state in states])
        except OSError as error:
            raise RunError(f"the launcher cannot listen for its agents: {error}", "--host") from None
        self._agents = self._listener.connections
        self._here: dict[int, Message] = {}
        """The introduction of each host's agent."""
        self._forwarded: list[int] = []
        self._processes = [self._start(number, host) for number, host in enumerate(hosts)]

    def run(self) -> int:
        """Watch the launch until it is over; return its exit code. When interrupted, end it first."""
        with in_real_time():
            try:
                self._watch()
            except BaseException as error:
                self.supervisor.interrupt(int(getattr(error, "signal", 0)) or 2, time.monotonic())
                self._watch()
                raise
            finally:
                self._close()
        return self.supervisor.code

    def forward(self, number: int) -> None:
        """Send a signal to all ranks, as `Supervisor.forward`; a signal handler may call this."""
        self._forwarded.append(number)

    def _watch(self) -> None:
        supervisor, is_reported = self.supervisor, False
        while not supervisor.is_over(now := time.monotonic()):
            for key, _ in self._listener.selector.select(max(0.0, min(0.1, supervisor.next_tick() - now))):
                assert isinstance(key.fileobj, socket.socket)
                self._handle(key.fileobj)
            now = time.monotonic()
            while self._forwarded:
                supervisor.forward(self._forwarded.pop(0), now)
            for number, process in enumerate(self._processes):
                if (code := process.poll()) is not None:
                    supervisor.exited(number, code, now)
            if self._files.error is not None:
                raise self._files.error
            supervisor.tick(now)
            for number, message in supervisor.outbox:
                if number in self._agents:
                    self._agents[number].send(message)
            supervisor.outbox.clear()
            self._listener.tick(now)
            if supervisor.reported is not None and not is_reported:
                is_reported = True
                print(f"error: {supervisor.reported}", file=sys.stderr, flush=True)
        if supervisor.reported is not None:
            self._write_post_mortem(str(supervisor.reported))

    def _write_post_mortem(self, failure: str) -> None:
        """Print where the ranks were, and write all that is known of them to a file."""
        hosts = self.supervisor.hosts
        records = {rank: record for host in hosts for rank, record in host.records.items()}
        if not records:
            return
        for line in positions(records, [rank for host in hosts for rank in host.ranks]):
            print(f"  {line}", file=sys.stderr)
        if path := write_post_mortem(failure, {host.name: host.ranks for host in hosts}, records):
            print(f"  post-mortem: {path}", file=sys.stderr, flush=True)

    def _handle(self, ready: socket.socket) -> None:
        now = time.monotonic()
        for number, message in self._listener.receive(ready, now):
            if message is None:
                self.supervisor.closed(number, now)
                continue
            self.supervisor.told(number, message, now)
            if number not in self._here:
                self._here[number] = message
                # A second agent of this host is none of this launch.
                self._listener.expected = set(range(len(self._processes))) - self._here.keys()
                if self.supervisor.is_connected:
                    for host in self._here:
                        requests = self._files.requests(host)
                        self._agents[host].send({"is": "files", "port": self._files.port, "files": requests})
            elif message.get("is") == "ready" and self.supervisor.is_ready:
                self._start_ranks()

    def _start_ranks(self) -> None:
        """Tell all agents what to start; the store is on the first host."""
        hosts = self.supervisor.hosts
        peers = [self._here[number].get("address", ("", 0)) for number in range(len(hosts))]
        for number, of_ranks in enumerate(launch_environments(hosts, peers[0][0], self._here[0].get("port", 0))):
            environments = {
                str(rank): {**self.variables, **own} for rank, own in zip(hosts[number].ranks, of_ranks, strict=True)
            }
            start = {"is": "start", "program": self.program, "folder": os.getcwd(), "peers": peers}
            self._agents[number].send({**start, "environments": environments})

    def _start(self, number: int, host: Host) -> subprocess.Popen[bytes]:
        """Start a host's agent, which reads the token from its standard input: an argument can be seen by others."""
        address, port = self._listener.address
        command = [sys.executable, *AGENT, str(address), str(port), str(number)]
        if not host.is_this:
            path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
            variables = [f"{name}={value}" for name, value in path.items()]
            text = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *variables, *command])}"
            command = [*shlex.split(self.rsh), host.name, text]
        print(shlex.join(command), file=sys.stderr, flush=True)
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
        except OSError as error:
            self._close()
            raise RunError(
                f"{command[0]} does not run: {error}", f"host {host.name}", "--rsh chooses another"
            ) from None
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(self._token.hex().encode() + b"\n")
            process.stdin.close()
        return process

    def _close(self) -> None:
        """End everything on this machine."""
        self._listener.close()
        self._files.close()
        until = time.monotonic() + _ENDING
        for process in getattr(self, "_processes", ()):
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
