"""The launcher's part of a launch on several hosts, without input and output: it runs under any clock.

Times are seconds of a monotonic clock. The launch succeeds if every rank ends with 0 and its agent has said so.
Otherwise it ends as a whole: the first failure is named, after a moment in which its cause may become known, all agents
end their ranks, and the launch is over when they have, or when they had the time for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.runtime.agents.ends import (
    End,
    agent_ended,
    host_lost,
    launcher_unheard,
    not_copied,
    not_started,
    other_version,
    peer_unheard,
    rank_end,
    rank_stopped,
)
from distir_relax.runtime.agents.post_mortem import Record
from distir_relax.runtime.agents.wire import Message
from distir_relax.runtime.launcher_detection import AGENT

BEAT = 0.25
"""Seconds between the messages by which launcher and agents, and agents among them, show that they are there."""
LOST = 1.5
"""Seconds after which one that is not heard of is lost."""
SETTLE = 0.1
"""Seconds in which failures are collected, of which one is the cause of the others."""
GRACE = 1.0
"""Seconds that ranks have to end after SIGTERM."""
LEAVING = 10.0
"""Seconds that ranks have to end once one has ended by a forwarded signal, and the checkpoint is written."""
CONNECTING = 60.0
"""Seconds in which all agents connect."""


@dataclass
class HostState:
    """What is known of a host: its `ranks`, the exit codes of those that have `ended`, when it was `heard` of last."""

    name: str
    ranks: Sequence[int]
    heard: float | None = None
    """None before it has connected."""
    is_open: bool = True
    """Whether its agent may still say something."""
    unheard: End | None = None
    """That another host does not hear of it: a failure once the launcher does."""
    is_ready: bool = False
    """Whether it has all files of the launch."""
    ended: dict[int, int] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    """What ranks have written before they ended."""

    @property
    def is_done(self) -> bool:
        """Whether all of its ranks have ended."""
        return len(self.ended) == len(self.ranks)


@dataclass
class Supervisor:
    """The state of a launch. `hosts` are in the order of their ranks.

    What is to be sent to agents is in `outbox`, with the number of the host.
    """

    hosts: Sequence[HostState]
    started: float
    rsh: str = "ssh"
    versions: Mapping[str, str] = field(default_factory=dict)
    """Those of this machine, by the name of the package: all hosts must have the same."""
    failures: list[End] = field(default_factory=list)
    reported: End | None = None
    """The failure that the launch ends with, once it is known."""
    signal: int = 0
    """The signal by which the user has ended the launch."""
    forwarded: int = 0
    """The signal that ranks were sent, after which they end by themselves."""
    outbox: list[tuple[int, Message]] = field(default_factory=list)
    _first_failure: float | None = None
    _leaving: float | None = None
    """When the first rank ended by the forwarded signal."""
    _ending: float | None = None
    _beat: float = field(init=False)

    def __post_init__(self) -> None:
        self._beat = self.started

    @property
    def is_connected(self) -> bool:
        """Whether all agents have connected, and none has ended."""
        return all(host.heard is not None and host.is_open for host in self.hosts)

    @property
    def is_ready(self) -> bool:
        """Whether all hosts have all files of the launch."""
        return all(host.is_ready and host.is_open for host in self.hosts)

    def told(self, number: int, message: Message, now: float) -> None:
        """A host's agent has said something."""
        host = self.hosts[number]
        host.heard = now
        if message.get("is") == "unheard" and type(seconds := message.get("seconds")) is float:
            other = message.get("host")
            if other is None:
                self._fail(launcher_unheard(host.name, seconds), now)
            elif type(other) is int and 0 <= other < len(self.hosts):
                self.hosts[other].unheard = peer_unheard(host.name, self.hosts[other].name, seconds)
        elif message.get("is") == "here":
            self._compare(host, message.get("versions"), now)
        elif message.get("is") == "ready":
            host.is_ready = True
        elif message.get("is") == "uncopied":
            self._fail(not_copied(host.name, str(message.get("error"))), now)
        elif message.get("is") == "beat" and host.unheard is not None and not host.is_done:
            # It is there, and the link is not. A host that is lost, or whose ranks have ended, says nothing any more.
            self._fail(host.unheard, now)
        rank = message.get("rank")
        if type(rank) is int and rank in host.ranks and rank not in host.ended:
            self._told_of(host, rank, message, now)

    def _told_of(self, host: HostState, rank: int, message: Message, now: float) -> None:
        """A host's agent has said something of a rank."""
        if message.get("is") == "record" and isinstance(record := message.get("record"), dict):
            host.records[rank] = record
        elif message.get("is") == "stopped":
            self._fail(rank_stopped(host.name, rank), now)
        elif message.get("is") == "ended" and type(status := message.get("status")) is int:
            host.ended[rank] = status
            if self.forwarded and status == 128 + self.forwarded:
                self._leaving = now if self._leaving is None else self._leaving
            elif self.forwarded and status == -self.forwarded:
                # It was still starting, so that the others would wait for it.
                self._abandon(now)
            elif status:
                self._fail(rank_end(host.name, rank, status, message.get("out_of_memory") is True), now)

    def closed(self, number: int, now: float) -> None:
        """A host's agent has closed its connection."""
        host = self.hosts[number]
        host.is_open = False
        if not host.is_done:
            self._fail(agent_ended(host.name), now)

    def exited(self, number: int, code: int, now: float) -> None:
        """The command that started a host's agent has ended."""
        host = self.hosts[number]
        if host.heard is None and host.is_open:
            host.is_open = False
            self._fail(not_started(host.name, code, self.rsh), now)

    def interrupt(self, number: int, now: float) -> None:
        """The user ends the launch by a signal."""
        self.signal = self.signal or number
        self._end(now)

    def forward(self, number: int, now: float) -> None:
        """Send a signal to all ranks, after which they end by themselves, with 128 plus its number.

        Before there are ranks it ends the launch.
        """
        self.forwarded = number
        if all(host.is_ready for host in self.hosts):
            self._send_all({"is": "signal", "number": number})
        else:
            self._abandon(now)

    def tick(self, now: float) -> None:
        """Go on in time."""
        self._look(now)
        if self._first_failure is not None and self.reported is None and now >= self._first_failure + SETTLE:
            self.reported = min(self.failures, key=lambda end: end.order)
            self._end(now)
        if self._leaving is not None and now > self._leaving + LEAVING:
            self._abandon(now)
        if now >= self._beat:
            self._beat = now + BEAT
            self._send_all({"is": "beat"})

    def is_over(self, now: float) -> bool:
        """Whether there is nothing left to wait for."""
        if all(host.is_done for host in self.hosts):
            return self._first_failure is None or self.reported is not None or bool(self.signal)
        if self._ending is None:
            return False
        is_late = now > self._ending + GRACE + LOST
        return is_late or all(host.is_done or not host.is_open for host in self.hosts)

    @property
    def code(self) -> int:
        """The exit code of a launch that is over."""
        if self.signal:
            return 128 + self.signal
        if self.reported is not None:
            return self.reported.code
        return 0 if self._leaving is None else 128 + self.forwarded

    def next_tick(self) -> float:
        """When `tick` is to be called at the latest."""
        return self._beat if self._first_failure is None else min(self._beat, self._first_failure + SETTLE)

    def _compare(self, host: HostState, versions: object, now: float) -> None:
        """Compare the versions of a host with those of this machine."""
        theirs = versions if isinstance(versions, dict) else {}
        for package, version in self.versions.items():
            if (other := theirs.get(package, "unknown")) != version:
                self._fail(other_version(host.name, package, str(other), version), now)

    def _look(self, now: float) -> None:
        for host in self.hosts:
            if not host.is_open or host.is_done:
                continue
            if host.heard is None:
                if now > self.started + CONNECTING:
                    host.is_open = False
                    self._fail(host_lost(host.name, CONNECTING), now)
            elif now > host.heard + LOST:
                host.is_open = False
                self._fail(host_lost(host.name, now - host.heard), now)

    def _fail(self, end: End, now: float) -> None:
        # What ends after that is no failure of its own.
        if self.reported is None and not self.signal:
            self.failures.append(end)
            self._first_failure = self._first_failure if self._first_failure is not None else now

    def _abandon(self, now: float) -> None:
        """End the launch by the forwarded signal; ranks that lose their peers are no failures."""
        if self.reported is None:
            self.failures.clear()
            self._first_failure = None
            self.interrupt(self.forwarded, now)

    def _end(self, now: float) -> None:
        if self._ending is None:
            self._ending = now
            self._send_all({"is": "end"})

    def _send_all(self, message: Message) -> None:
        open_hosts = (number for number, host in enumerate(self.hosts) if host.heard is not None and host.is_open)
        self.outbox += [(number, message) for number in open_hosts]


def launch_environments(hosts: Sequence[HostState], address: str, port: int) -> list[list[Mapping[str, str]]]:
    """Return the variables of each rank of each host, as torchrun sets them; the store is at `address` and `port`."""
    world = sum(len(host.ranks) for host in hosts)
    return [
        [
            {
                "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(host.ranks)), "MASTER_ADDR": address, "MASTER_PORT": str(port),
                AGENT: "distir",
            }
            for local, rank in enumerate(host.ranks)
        ]
        for host in hosts
    ]  # fmt: skip
