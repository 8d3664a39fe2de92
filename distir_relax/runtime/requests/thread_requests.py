"""Requests on ranks that are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.bundle import Bundle
from distir_relax.runtime.error_messages import name_rank
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.requests.rank_requests import RankRequests, Slot
from distir_relax.runtime.requests.request_program import emit_request_programs
from distir_relax.runtime.transports.threads import RankReleased, ThreadWorld

if TYPE_CHECKING:
    import torch

_Step: TypeAlias = "tuple[str, Sequence[Slot], Collection[int]]"


class ThreadRequests:
    """All ranks of a bundle as threads; a single rank runs in the thread of its caller.

    Steps run in the order of `submit`; several can be in flight. An error of a rank is that of all later calls.
    """

    def __init__(self, bundle: Bundle, device: str = "cpu") -> None:
        self._world = ThreadWorld(bundle.manifest.mesh)
        programs = emit_request_programs(bundle)
        count = bundle.manifest.mesh.size
        communicators = [self._world.communicator(rank, rank_device(device, rank)) for rank in range(count)]
        self._ranks = [RankRequests(bundle, programs, comm) for comm in communicators]
        self._steps: list[queue.SimpleQueue[_Step | None]] = [queue.SimpleQueue() for _ in self._ranks]
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: deque[_Step] = deque()
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(count if count > 1 else 0)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, slots: Sequence[Slot], ended: Collection[int] = ()) -> None:
        """Start a step; see `RankRequests.step`."""
        self._submit(("step", slots, ended))

    def result(self) -> list[list[int]]:
        """Wait for the first step in flight; return its tokens. Raises what a rank has raised."""
        found: list[list[int]] = self._result()
        return found

    def logits(self, slots: Sequence[Slot]) -> torch.Tensor:
        """Run a step while none is in flight; return its logits, (rows, vocabulary)."""
        self._submit(("logits", slots, ()))
        found: torch.Tensor = self._result()
        return found

    def busy(self) -> list[float]:
        """Return the seconds that each rank has computed; while a step runs, without it."""
        return [rank.busy for rank in self._ranks]

    def close(self) -> None:
        """End the threads, and free all states."""
        for each in self._steps:
            each.put(None)
        for thread in self._threads:
            thread.join()
        for rank in self._ranks:
            rank.clear()

    def _submit(self, step: _Step) -> None:
        if not self._threads:
            self._waiting.append(step)
        for each in self._steps if self._threads else ():
            each.put(step)

    def _result(self) -> Any:
        if not self._threads:
            return _call(self._ranks[0], self._waiting.popleft())
        found = self._results.get()
        if self._world.error is not None:
            raise self._world.error
        return found

    def _run(self, rank: int) -> None:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // len(self._ranks)))
        requests = self._ranks[rank]
        while (step := self._steps[rank].get()) is not None:
            try:
                result = _call(requests, step)
            except RankReleased:
                result = None
            except BaseException as error:
                self._world.abort(name_rank(error, rank, len(self._ranks)))
                # The root may be waiting for this rank, or have ended the step already.
                self._results.put(None)
                continue
            if rank == requests.root:
                self._results.put(result)


def _call(requests: RankRequests, step: _Step) -> Any:
    kind, slots, ended = step
    return requests.step(slots, ended) if kind == "step" else requests.logits(slots, ended)
