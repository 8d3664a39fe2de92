"""Requests on ranks that are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from distir_relax.bundle import Bundle
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.requests.rank_requests import RankRequests, Slot
from distir_relax.runtime.requests.request_program import emit_request_programs
from distir_relax.runtime.transports.threads import RankReleased, ThreadWorld

if TYPE_CHECKING:
    import torch

_Step: TypeAlias = "tuple[Sequence[Slot], Collection[int]]"


class ThreadRequests:
    """All ranks of a bundle as threads; a single rank runs in the thread of its caller. One step at a time."""

    def __init__(self, bundle: Bundle, device: str = "cpu") -> None:
        self._world = ThreadWorld(bundle.manifest.mesh)
        texts = emit_request_programs(bundle)
        count = bundle.manifest.mesh.size
        communicators = [self._world.communicator(rank, rank_device(device, rank)) for rank in range(count)]
        self._ranks = [RankRequests(bundle, texts, comm) for comm in communicators]
        self._steps: list[queue.SimpleQueue[_Step | None]] = [queue.SimpleQueue() for _ in self._ranks]
        self._results: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(count if count > 1 else 0)
        ]
        for thread in self._threads:
            thread.start()

    def step(self, slots: Sequence[Slot], ended: Collection[int] = ()) -> torch.Tensor:
        """See `RankRequests.step`; returns rank 0's logits, none without slots.

        Raises what a rank raises, on every later step too.
        """
        import torch

        if not self._threads:
            result = self._ranks[0].step(slots, ended)
        else:
            for each in self._steps:
                each.put((slots, ended))
            found = [self._results.get() for _ in self._ranks]
            if self._world.error is not None:
                raise self._world.error
            result = next((x for x in found if x is not None), None)
        return torch.empty(0, 0) if result is None else result

    def close(self) -> None:
        """End the threads, and free all states."""
        for each in self._steps:
            each.put(None)
        for thread in self._threads:
            thread.join()
        for rank in self._ranks:
            rank.clear()

    def _run(self, rank: int) -> None:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // len(self._ranks)))
        while (step := self._steps[rank].get()) is not None:
            result = None
            try:
                result = self._ranks[rank].step(*step)
            except RankReleased:
                pass
            except BaseException as error:
                self._world.abort(error)
            self._results.put(result)
