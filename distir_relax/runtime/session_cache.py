"""Sessions of a plan or a loaded bundle, one per backend, created on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.errors import RunError
from distir_relax.runtime.requests.sequence_program import load_sequence_programs
from distir_relax.runtime.session import Session, SessionClosed

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


class Sessions:
    """Cache of the sessions of the bundle that `bundle(backend)` returns. Thread-safe."""

    def __init__(self, bundle: Callable[[str], Bundle]) -> None:
        self._bundle = bundle
        self._sessions: dict[str, Session] = {}
        self._exclusive = threading.Lock()

    def run(
        self,
        inputs: Mapping[str, Array],
        backend: str,
        timeout: float | None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run once on `backend`: see `Session.__call__`.

        A session closed by a failed run is recreated, unless it holds state. Raises what `Session` raises.
        """
        while True:
            session = self.of(backend)
            # A call that waited for another one's run finds the session closed if that run failed.
            with suppress(SessionClosed):
                return session(inputs, timeout, outputs)

    def of(self, backend: str) -> Session:
        """Return the session of a backend. Raises RunError when its state was lost, and what `Session` raises."""
        with self._exclusive:
            session = self._sessions.get(backend)
            if session is not None and session.closed and session.bundle.manifest.updates:
                raise RunError(f"the state is lost: {session.closed}", hint="compile, or load, the model again")
            if session is None or session.closed:
                self._sessions[backend] = session = Session(
                    self._bundle(backend), backend, load_sequences=load_sequence_programs
                )
            return session
