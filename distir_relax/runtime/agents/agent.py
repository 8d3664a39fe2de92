"""An agent's part of a launch, without input and output: it runs under any clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from distir_relax.runtime.agents.supervisor import BEAT, GRACE, LOST
from distir_relax.runtime.agents.wire import Message
from distir_relax.runtime.exit_codes import INFRASTRUCTURE

MEETING = 5.0
"""Seconds that agents have to connect to each other: the third SYN, if two are lost, is sent after 3."""
STOPPED = 1.0
"""Seconds after which a rank that is stopped is taken for one that does not go on."""


@dataclass
class Agent:
    """The state of an agent, whose ranks are those of its host that still `run`.

    Messages to the launcher are in `outbox` (beats go to the other agents, too), signals to send to all ranks in
    `signals` ("end" and "kill" are those that end them). Without a word from the launcher for `LOST` seconds it ends
    its ranks; without one from another agent it tells the launcher.
    """

    run: set[int]
    heard: float
    peers: dict[int, float] = field(default_factory=dict)
    """The time until which each other agent has to be heard of, until it is reported."""
    outbox: list[Message] = field(default_factory=list)
    signals: list[str | int] = field(default_factory=list)
    is_lost: bool = False
    """Whether the launcher is lost."""
    _beat: float = 0.0
    _ending: float | None = None
    _killed: bool = False
    _stopped: dict[int, float] = field(default_factory=dict)
    """Since when ranks are stopped."""

    def told(self, message: Message, now: float) -> None:
        """The launcher has said something."""
        self.heard = now
        if message.get("is") == "end":
            self._end(now)
        elif message.get("is") == "signal" and type(number := message.get("number")) is int:
            self.signals.append(number)

    def lost(self, now: float) -> None:
        """The connection to the launcher has ended."""
        self.is_lost = True
        self._end(now)

    def peer_told(self, peer: int, is_closed: bool, now: float) -> None:
        """Another agent has said something, or its connection has ended."""
        if peer in self.peers:
            self.peers[peer] = min(self.peers[peer] if is_closed else now + LOST, now + LOST)

    def ended(self, rank: int, status: int, out_of_memory: bool) -> None:
        """A rank has ended, with an exit code or by the signal of that number, negative."""
        self.run.discard(rank)
        self.outbox.append({"is": "ended", "rank": rank, "status": status, "out_of_memory": out_of_memory})

    def seen(self, stopped: set[int], now: float) -> None:
        """Some ranks are stopped; all others are not."""
        since = {rank: self._stopped.get(rank, now) for rank in stopped & self.run}
        long = [rank for rank, start in since.items() if now >= start + STOPPED]
        if long and self._ending is None:
            self.outbox += [{"is": "stopped", "rank": rank} for rank in long]
        self._stopped = since

    def tick(self, now: float) -> None:
        """Go on in time."""
        if now > self.heard + LOST and self.run and not self.is_lost:
            # It may hear this: only its own messages are lost, or it was stopped and goes on.
            self.outbox.append({"is": "unheard", "seconds": now - self.heard})
            self.lost(now)
        # Whoever does not hear of the launcher either is cut off itself.
        if now < self.heard + 2 * BEAT and self._ending is None:
            for peer in [peer for peer, until in self.peers.items() if now > until]:
                seconds = now - self.peers.pop(peer) + LOST
                self.outbox.append({"is": "unheard", "host": peer, "seconds": seconds})
        if now >= self._beat:
            self._beat = now + BEAT
            self.outbox.append({"is": "beat"})
        if self._ending is not None and now > self._ending + GRACE and not self._killed:
            self._killed = True
            self.signals.append("kill")

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended."""
        return not self.run

    @property
    def code(self) -> int:
        """The exit code of an agent that is over."""
        return INFRASTRUCTURE if self.is_lost else 0

    def _end(self, now: float) -> None:
        if self._ending is None:
            self._ending = now
            self.signals.append("end")
