"""Stall detection in a launch: query the state of all ranks, report those that wait or do not answer, and abort."""

from __future__ import annotations

import json
import time
from typing import Any

from distir_relax.runtime.exit_codes import INFRASTRUCTURE
from distir_relax.runtime.local_ranks import ranks_of_this_node
from distir_relax.runtime.watchdog import describe, stall_error
from distir_relax.runtime.world import World

# Seconds that a rank has to answer: its watchdog polls twice a second, but a library may hold the GIL.
_ANSWER_SECONDS = 4.0


class StallDetector:
    """Stall detection of one rank, run by the thread of its watchdog.

    A rank that has waited for more than `timeout` seconds (0: never) asks all others for their position. If one does
    not answer, if any is running the program, or if all wait, the launch ends: one rank reports the position of each,
    and the exit code is that of infrastructure. While some rank still reads or loads data, the others go on waiting.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self._world = world
        self.timeout = timeout
        self._round = 0
        self._ending = False
        self._answers: dict[int, dict[str, Any]] = {}

    def poll(self) -> bool:
        """Answer queries; query the others if this rank has waited too long. Does not return if the launch ends."""
        self._receive()
        if self._is_stalled():
            self._query()
            if self._must_end():
                self._end()
            self._world.progress.since = time.monotonic()
        return False

    def _is_stalled(self) -> bool:
        return 0 < self.timeout < self._world.progress.waiting()

    def _status(self) -> dict[str, Any]:
        world = self._world
        return {
            "text": describe(world.rank, world.progress, world.steps),
            "waits": world.progress.current is not None,
            "runs": world.in_run,
            "stalled": self._is_stalled(),
            "ends": self._ending,
        }

    def _receive(self) -> None:
        for sender, message in self._world.received_messages():
            answer = json.loads(message)
            if "asks" in answer:
                self._world.send_message(sender, json.dumps({"answers": answer["asks"], **self._status()}))
            elif answer["answers"] == self._round:
                self._answers[sender] = answer

    def _query(self) -> None:
        """Query all others, and wait for their answers, except from processes known to be stopped."""
        world = self._world
        self._round += 1
        self._answers = {world.rank: self._status()}
        for peer in range(world.size):
            if peer != world.rank:
                world.send_message(peer, json.dumps({"asks": self._round}))
        start = time.monotonic()
        while (silent := self._silent()) and time.monotonic() - start < _ANSWER_SECONDS:
            time.sleep(0.05)
            self._receive()
            if time.monotonic() - start > 1.0 and all("stopped" in ranks_of_this_node().get(r, "") for r in silent):
                break

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank not in self._answers]

    def _must_end(self) -> bool:
        answers = self._answers.values()
        return (
            bool(self._silent())
            or any(answer["runs"] for answer in answers)
            or all(answer["waits"] for answer in answers)
        )

    def _end(self) -> None:
        world = self._world
        others = [(rank, answer) for rank, answer in self._answers.items() if rank != world.rank]
        if any(answer["ends"] or (answer["stalled"] and rank < world.rank) for rank, answer in others):
            # Another rank prints, and ends the launch.
            deadline = time.monotonic() + 2 * _ANSWER_SECONDS
            while time.monotonic() < deadline:
                time.sleep(0.05)
                self._receive()
        else:
            self._ending = True
            world.report(stall_error(self.timeout, self._lines(), bool(self._silent())))
        world.abort(INFRASTRUCTURE)

    def _lines(self) -> list[str]:
        local = ranks_of_this_node()
        return [
            self._answers[rank]["text"]
            if rank in self._answers
            else f"rank {rank} does not answer: it {local.get(rank, 'has ended, or its node cannot be reached')}"
            for rank in range(self._world.size)
        ]
