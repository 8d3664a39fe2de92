"""Launches under a virtual clock and a simulated network: the launcher's and the agents' state machines as they are.

A seed draws hosts, ranks, delays, and what happens: ranks that end, are killed or stopped, agents and hosts that die or
stop, cuts in one or both directions, between the launcher's network and a host or between two hosts, also several at
once and while agents connect. The launcher is on a machine of its own. The same seed gives the same run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from distir_relax.runtime.agents.agent import MEETING, STOPPED, Agent
from distir_relax.runtime.agents.supervisor import BEAT, CONNECTING, GRACE, LOST, SETTLE, HostState, Supervisor
from distir_relax.runtime.agents.wire import Message

STEP = 0.01
HOURS = 400.0


@dataclass
class Rank:
    number: int
    ends_at: float
    status: int = 0
    stopped_at: float | None = None
    goes_on_at: float | None = None
    ended: bool = False

    def is_stopped(self, now: float) -> bool:
        return self.stopped_at is not None and self.stopped_at <= now and not (
            self.goes_on_at is not None and self.goes_on_at <= now
        )  # fmt: skip


@dataclass
class SimulatedHost:
    """A host: its agent, its ranks, and what is on the way in both directions."""

    number: int
    ranks: list[Rank]
    connects_at: float
    starts_after: float
    """Seconds after which it starts its ranks, once all agents have connected."""
    agent: Agent | None = None
    to_launcher: list[tuple[float, Message | None]] = field(default_factory=list)
    to_agent: list[tuple[float, Message | None]] = field(default_factory=list)
    dead: bool = False
    stopped: bool = False
    cut_out: bool = False
    cut_in: bool = False
    cut_to: set[int] = field(default_factory=set)
    """The hosts to which nothing arrives from this one."""
    met: set[int] = field(default_factory=set)
    """The hosts whose agents are connected to this one's."""
    to_peers: list[tuple[float, int]] = field(default_factory=list)
    """When beats arrive at other agents."""
    told_end: bool = False
    terminated_at: float | None = None


@dataclass
class Run:
    """A run of a seed, and what it came to."""

    seed: int
    code: int = -1
    over_at: float = 0.0
    length: float = 0.0
    """When the ranks end, if nothing happens."""
    is_connected: bool = False
    started_at: float = HOURS
    """When all agents have connected."""
    reported: str = ""
    reported_at: float = HOURS
    events: list[tuple[float, str, int]] = field(default_factory=list)
    hurt: set[int] = field(default_factory=set)
    """The hosts to which something happened, or on which a rank failed."""
    left: list[tuple[int, int]] = field(default_factory=list)
    """The ranks that have not ended, on hosts that can still do something."""
    all_succeeded: bool = False


EVENTS = (
    "kill rank",
    "exit rank",
    "stop rank",
    "pause rank",
    "kill agent",
    "kill host",
    "stop host",
    "cut",
    "cut out",
    "cut in",
    "cut link",
    "cut link one way",
)


def simulate(seed: int) -> Run:
    """Run a seed until everything has ended that can."""
    draw = random.Random(seed)
    run = Run(seed)
    counts = [draw.randint(1, 3) for _ in range(draw.randint(2, 5))]
    length = draw.uniform(1.0, 20.0)
    hosts, first = [], 0
    for number, count in enumerate(counts):
        ranks = [Rank(first + n, length + draw.uniform(0.0, 0.3)) for n in range(count)]
        hosts.append(SimulatedHost(number, ranks, draw.uniform(0.05, 2.0), draw.uniform(0.0, BEAT)))
        first += count
    run.events = sorted(
        (draw.uniform(0.0, length), draw.choice(EVENTS), draw.randrange(len(hosts)))
        for _ in range(draw.choice([0, 1, 1, 1, 2, 3]))
    )
    events = list(run.events)
    delay = draw.choice([0.0002, 0.002, 0.03])
    supervisor = Supervisor([HostState(f"n{h.number}", [r.number for r in h.ranks]) for h in hosts], 0.0)
    now, over_at, started = 0.0, None, False
    while now < HOURS and (over_at is None or now < over_at + LOST + GRACE + 2.0):
        now += STEP
        while events and events[0][0] <= now:
            _, what, number = events.pop(0)
            _happen(what, hosts[number], hosts, now, draw, run)
        for host in hosts:
            _connect(host, supervisor, now, over_at)
        if supervisor.is_connected and not started:
            started, run.started_at = True, now
        _pass_beats([host for host in hosts if now >= run.started_at + host.starts_after], hosts, now)
        for host in hosts:
            _step(host, supervisor, now, delay, now >= run.started_at + host.starts_after, over_at is not None)
        if over_at is None:
            supervisor.tick(now)
            if supervisor.reported is not None and run.reported_at == HOURS:
                run.reported_at = now
            for number, message in supervisor.outbox:
                hosts[number].to_agent.append((now + delay, message))
            supervisor.outbox.clear()
            if supervisor.is_over(now):
                over_at = now
                # The launcher's process ends: its connections close.
                for host in hosts:
                    host.to_agent.append((now + delay, None))
    run.code, run.over_at = supervisor.code, over_at if over_at is not None else HOURS
    run.reported = "" if supervisor.reported is None else str(supervisor.reported)
    run.left = [
        (h.number, r.number) for h in hosts for r in h.ranks
        if not r.ended and h.agent is not None and started and not (h.dead or h.stopped)
    ]  # fmt: skip
    run.all_succeeded = all(r.ended and r.status == 0 for h in hosts for r in h.ranks)
    run.length, run.is_connected = length + 0.3, started
    return run


def bound(run: Run) -> float:
    """When a launch with these events is over at the latest."""
    last = max([when for when, *_ in run.events], default=0.0)
    begin = max(last, run.length, run.started_at + MEETING) if run.is_connected else CONNECTING
    return begin + STOPPED + LOST + 2 * BEAT + SETTLE + GRACE + LOST + 0.2


def _happen(
    what: str, host: SimulatedHost, hosts: list[SimulatedHost], now: float, draw: random.Random, run: Run
) -> None:
    rank = draw.choice(host.ranks)
    if what == "pause rank":
        # Shorter than what is taken for the end.
        rank.stopped_at, rank.goes_on_at = now, now + STOPPED / 2
        return
    run.hurt.add(host.number)
    match what:
        case "kill rank":
            rank.ends_at, rank.status, rank.stopped_at = now, -9, None
        case "exit rank":
            rank.ends_at, rank.status = now, draw.choice([1, 2, 75])
        case "stop rank":
            rank.stopped_at, rank.goes_on_at = now, None
        case "kill agent" | "kill host":
            host.dead = True
            if host.agent is not None and not host.cut_out:
                host.to_launcher.append((now, None))
            for other in host.ranks:
                other.ended, other.status = True, -9
        case "stop host":
            host.stopped = True
        case "cut":
            host.cut_out = host.cut_in = True
        case "cut out":
            host.cut_out = True
        case "cut in":
            host.cut_in = True
        case "cut link" | "cut link one way":
            other = draw.choice([other for other in hosts if other is not host])
            run.hurt.add(other.number)
            host.cut_to.add(other.number)
            if what == "cut link":
                other.cut_to.add(host.number)
            # Their ranks wait for each other.
            for rank in (*host.ranks, *other.ranks):
                rank.ends_at = rank.ends_at if rank.status else 2 * HOURS


def _reaches(host: SimulatedHost, other: SimulatedHost) -> bool:
    return not (host.cut_out or other.cut_in or other.number in host.cut_to)


def _pass_beats(started: list[SimulatedHost], hosts: list[SimulatedHost], now: float) -> None:
    """Connect agents to each other, deliver their beats, and let them see that connections have ended."""
    runs = {host.number for host in started if host.agent is not None and not (host.dead or host.stopped)}
    for host in started:
        if host.agent is None or host.number not in runs:
            continue
        for other in started:
            number, is_met = other.number, other.number in host.met
            if is_met and (other.dead or other.told_end) and _reaches(other, host):
                host.met.remove(number)
                host.agent.peer_told(number, True, now)
            if is_met or other is host or number not in runs or other.told_end:
                continue
            if _reaches(host, other) and _reaches(other, host):
                host.met.add(number)
                host.agent.peer_told(number, False, now)
        while host.to_peers and host.to_peers[0][0] <= now:
            _, number = host.to_peers.pop(0)
            peer = hosts[number]
            if number in runs and peer.agent is not None and number in host.met and _reaches(host, peer):
                peer.agent.peer_told(host.number, False, now)


def _connect(host: SimulatedHost, supervisor: Supervisor, now: float, over_at: float | None) -> None:
    may = not (host.dead or host.stopped or host.cut_in or host.cut_out)
    if host.agent is None and may and now >= host.connects_at and over_at is None:
        others = set(range(len(supervisor.hosts))) - {host.number}
        host.agent = Agent({rank.number for rank in host.ranks}, now, dict.fromkeys(others, now + MEETING))
        supervisor.told(host.number, {"is": "here"}, now)
    elif host.agent is None and host.dead and over_at is None:
        supervisor.exited(host.number, 255, now)


def _step(host: SimulatedHost, supervisor: Supervisor, now: float, delay: float, started: bool, over: bool) -> None:
    agent = host.agent
    if agent is None:
        return
    for message in [] if host.cut_out else _arrived(host.to_launcher, now):
        if message is None and not over:
            supervisor.closed(host.number, now)
        elif message is not None and not over:
            supervisor.told(host.number, message, now)
    if host.dead or host.stopped:
        return
    for message in [] if host.cut_in else _arrived(host.to_agent, now):
        if message is None:
            agent.lost(now)
        else:
            agent.told(message, now)
    if not started:
        agent.heard = now
        agent.peers = dict.fromkeys(agent.peers, now + MEETING)
        host.to_launcher.append((now + delay, {"is": "beat"}))
        return
    _run_ranks(host, agent, now)
    was_over = agent.is_over
    agent.tick(now)
    for what in agent.signals:
        for rank in host.ranks:
            if not rank.ended and what in ("end", "kill"):
                rank.stopped_at = None if what == "end" else rank.stopped_at
                rank.ends_at, rank.status = min(rank.ends_at, now + 0.05), -15 if what == "end" else -9
    agent.signals.clear()
    host.to_launcher += [(now + delay, message) for message in agent.outbox]
    if any(message["is"] == "beat" for message in agent.outbox):
        host.to_peers += [(now + delay, peer) for peer in host.met]
    agent.outbox.clear()
    if was_over and not host.told_end:
        host.told_end = True
        host.to_launcher.append((now + delay, None))


def _arrived(messages: list[tuple[float, Message | None]], now: float) -> list[Message | None]:
    """Take the messages that have arrived, in their order."""
    count = next((n for n, (when, _) in enumerate(messages) if when > now), len(messages))
    taken = [message for _, message in messages[:count]]
    del messages[:count]
    return taken


def _run_ranks(host: SimulatedHost, agent: Agent, now: float) -> None:
    for rank in host.ranks:
        if not rank.ended and now >= rank.ends_at and not (rank.is_stopped(now) and rank.status >= 0):
            rank.ended = True
            agent.ended(rank.number, rank.status, False)
    agent.seen({rank.number for rank in host.ranks if not rank.ended and rank.is_stopped(now)}, now)
