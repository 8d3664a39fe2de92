"""Steps of several requests by the programs of a session, which holds their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from distir_relax.runtime.requests.pipeline_depth import pipeline_depth
from distir_relax.runtime.requests.rank_requests import RankRequests, Slot
from distir_relax.runtime.requests.sequence_program import SequenceProgram

if TYPE_CHECKING:
    from distir_relax.runtime.backends import RankProgram
    from distir_relax.runtime.communicator import Communicator
    from distir_relax.runtime.session import Session


class SessionRequests:
    """All ranks of a session without a launch. A step runs when its result is requested, between calls of the session.

    A rank waits for others for at most `timeout` seconds, by default those of the session.
    """

    def __init__(self, session: Session, timeout: float | None = None) -> None:
        self._session, self._timeout = session, timeout
        self._ranks = []
        for program, comm in zip(session.programs, session.communicators, strict=True):
            assert isinstance(program, SequenceProgram), "checked by `can_run`"
            self._ranks.append(RankRequests(session.bundle, program.requests, comm))
        self._waiting: deque[tuple[Sequence[Slot], Collection[int]]] = deque()

    @staticmethod
    def can_run(session: Session) -> bool:
        """Return whether the programs of a session are steps of requests, and its ranks no pipeline.

        The stages of a pipeline would wait for each other.
        """
        is_one_stage = pipeline_depth(session.bundle.manifest) == 1
        return is_one_stage and all(isinstance(program, SequenceProgram) for program in session.programs)

    def submit(self, slots: Sequence[Slot], ended: Collection[int] = ()) -> None:
        """Add a step; see `RankRequests.step`."""
        self._waiting.append((slots, ended))

    def result(self) -> list[list[int]]:
        """Run the first step that was added; return its tokens. Raises as a call of the session does."""
        slots, ended = self._waiting.popleft()
        found: list[list[list[int]]] = []

        def step(comm: Communicator, program: RankProgram) -> None:
            tokens = self._ranks[comm.rank].step(slots, ended)
            if tokens is not None:
                found.append(tokens)

        self._session.on_ranks(step, self._timeout)
        return found[0]

    def busy(self) -> list[float]:
        """Return the seconds that each rank has computed."""
        return [rank.busy for rank in self._ranks]

    def close(self) -> None:
        """Free all states."""
        for rank in self._ranks:
            rank.clear()
