"""Thread transport: ranks are threads of one process. The embedded default, for notebooks and tests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.arrays import combine, dtype_name, split
from distir_relax.runtime.communicator import Communicator

if TYPE_CHECKING:
    import torch


class RankReleased(Exception):
    """Raised in ranks that wait for one that has failed; the first error is the one to report."""


class ThreadWorld:
    """Rendezvous and mailboxes of the ranks of one process. `abort` releases every rank that waits or will wait."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._posted: dict[tuple[object, int], dict[int, Any]] = {}
        self._rounds: dict[tuple[object, int], int] = {}
        self._mailboxes: dict[object, deque[Any]] = {}

    def communicator(self, rank: int, device: str = "cpu", channel: str = "program") -> ThreadCommunicator:
        """Return the communicator of `rank`; those of different channels do not meet."""
        return ThreadCommunicator(self, rank, device, channel)

    def reset(self) -> None:
        """Reset after a failed run, so that the ranks can communicate again; none may be running."""
        self.error = None
        self._posted.clear()
        self._rounds.clear()
        self._mailboxes.clear()

    def abort(self, error: BaseException) -> None:
        """Store the first `error` and release all ranks."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def post(self, key: object, value: Any) -> None:
        """Post `value` to the mailbox `key`, which is first in, first out."""
        with self._changed:
            self._mailboxes.setdefault(key, deque()).append(value)
            self._changed.notify_all()

    def take(self, key: object) -> Any:
        """Wait for the next value of the mailbox `key`, remove and return it."""
        with self._changed:
            while not self._mailboxes.get(key) and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise RankReleased
            value = self._mailboxes[key].popleft()
            if not self._mailboxes[key]:
                del self._mailboxes[key]
            return value

    def meet(self, group: tuple[int, ...], key: object, rank: int, value: Any) -> list[Any]:
        """Return every member's `value` in order of `group`, once all of them have made this call equally often."""
        with self._changed:
            turn = self._rounds.get((key, rank), 0)
            self._rounds[key, rank] = turn + 1
            posted = self._posted.setdefault((key, turn), {})
            posted[rank] = value
            if len(posted) == len(group):
                # The last member to arrive releases the others; each of them still references the dict it waits on.
                del self._posted[key, turn]
                self._changed.notify_all()
            while len(posted) < len(group) and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise RankReleased
            return [posted[member] for member in group]


class ThreadCommunicator(Communicator):
    """One rank of a `ThreadWorld`. Exchanges are synchronous, except for started sends."""

    drops_nan = False

    def __init__(self, world: ThreadWorld, rank: int, device: str = "cpu", channel: str = "program") -> None:
        super().__init__(rank, world.mesh, device)
        self._world = world
        self._channel_name = channel
        self._started: ThreadCommunicator | None = None
        self._groups = [world.mesh.group(rank, axis) for axis in range(len(world.mesh.shape))]

    def _meet(self, axis: int, value: Any) -> list[Any]:
        group = self._groups[axis]
        return self._world.meet(group, (self._channel_name, axis, group[0]), self.rank, value)

    def _channel(self, axis: str) -> ThreadCommunicator | None:
        # Threads of a GPU would share its stream.
        if self._started is None and self.device == "cpu":
            self._started = self._world.communicator(self.rank, channel="started")
        return self._started

    def _all_reduce(self, x: torch.Tensor, out: torch.Tensor, axis: int, op: str) -> None:
        import torch

        # Each rank combines its part of all inputs, in rank order, so that every rank gets the same bits.
        n = self.mesh.shape[axis]
        me = self._coordinates[axis]
        sources = self._same_size(self._meet(axis, x.view(-1)))
        bounds = [x.numel() * i // n for i in range(n + 1)]
        mine = slice(bounds[me], bounds[me + 1])
        part = combine([source[mine] for source in sources], op)
        parts = self._meet(axis, part)
        torch.cat(parts, out=out.view(-1))

    def _all_gather(self, x: torch.Tensor, counts: list[int], axis: int, out: torch.Tensor | None) -> torch.Tensor:
        import torch

        shards = self._meet(axis, x)
        self._check(sum(counts), sum(shard.numel() for shard in shards), "all_gather")
        joined = torch.cat(shards) if out is None else torch.cat(shards, out=out)
        self._meet(axis, None)
        return joined

    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], axis: int, op: str) -> torch.Tensor:
        me = self._coordinates[axis]
        start = sum(counts[:me])
        sources = self._same_size(self._meet(axis, x))
        part = combine([source[start : start + counts[me]] for source in sources], op)
        self._meet(axis, None)
        return part

    def _all_to_all(
        self, x: torch.Tensor, sent: list[int], received: list[int], axis: int, largest: int
    ) -> torch.Tensor:
        import torch

        me = self._coordinates[axis]
        pieces = [pieces[me] for pieces in self._meet(axis, split(x, sent))]
        self._check(sum(received), sum(piece.numel() for piece in pieces), "all_to_all")
        joined = torch.cat(pieces)
        self._meet(axis, None)
        return joined

    def _send(self, x: torch.Tensor, peer: int) -> None:
        pair = (self.rank, peer)
        self._world.meet(pair, ("message", *pair), self.rank, x)
        self._world.meet(pair, ("message", *pair), self.rank, None)

    def _recv(self, x: torch.Tensor, peer: int) -> None:
        pair = (peer, self.rank)
        message = self._world.meet(pair, ("message", *pair), self.rank, None)[0]
        if message.numel() != x.numel() or message.dtype != x.dtype:
            raise RunError(
                f"rank {self.rank} expects {x.numel()} x {dtype_name(x.dtype)} from rank {peer}, "
                f"which sends {message.numel()} x {dtype_name(message.dtype)}"
            )
        x.copy_(message)
        self._world.meet(pair, ("message", *pair), self.rank, None)

    def _start_send(self, x: torch.Tensor, peer: int, step: int) -> None:
        self._world.post((self.rank, peer, step), x)

    def _start_recv(self, x: torch.Tensor, peer: int, step: int) -> Callable[[], None]:
        def finish() -> None:
            message = self._world.take((peer, self.rank, step))
            self._check(x.numel(), message.numel(), "a transfer")
            x.copy_(message)

        return finish

    def _release_completed_sends(self) -> None:
        """Do nothing: a message belongs to its receiver as soon as it is posted."""

    def _finish_sends(self) -> None:
        """Do nothing: posted messages belong to their receivers; buffers that may change are sent as copies."""

    def _barrier(self) -> None:
        self._world.meet(tuple(range(self.world_size)), "barrier", self.rank, None)

    def _same_size(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        for source in sources:
            self._check(sources[0].numel(), source.numel(), "a reduction")
        return sources

    def _check(self, expected: int, actual: int, kind: str) -> None:
        if expected != actual:
            raise RunError(f"{kind} on rank {self.rank} expects {expected} elements, its group gives {actual}")


class RankThreads:
    """The ranks of one run, each a thread that runs its `work`.

    The threads themselves count whether all have ended: an interrupted `Thread.start` leaves one that has not begun,
    but will. Then they are joined: a thread frees its thread-local data after its function. torch releases the GIL
    while it frees a tensor, and Python ends a thread that requests the GIL during the exit of the process; C++ answers
    with std::terminate.
    """

    def __init__(self, works: Sequence[Callable[[], None]]) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._ended = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"rank-{rank}", daemon=True)
            for rank, work in enumerate(works)
        ]

    def start(self) -> None:
        """Start all ranks."""
        for thread in self._threads:
            self._begun += 1
            thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the started ranks, for `seconds` at most; return whether all have ended."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended == self._begun, seconds):
                return False
        begun = self._threads[: self._begun]
        for thread in begun:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in begun)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()
