"""Steps of several requests on ranks that are processes of this machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from distir_relax.bundle import Bundle, file_of
from distir_relax.errors import RunError
from distir_relax.runtime.hosts import HostList
from distir_relax.runtime.launched import RankOptions
from distir_relax.runtime.launcher_detection import check_alone
from distir_relax.runtime.process_session.rank_processes import RankProcesses, ServeOptions
from distir_relax.runtime.process_session.requests import RanksLost, Requests
from distir_relax.runtime.requests import Slot
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT


class ProcessRequests:
    """All ranks of a saved bundle as processes. As `ThreadRequests`: steps run in the order of `submit`.

    `launcher` is as for `dr.launch`, or the hosts of the ranks, `threads` are as there, and `variables` are added to
    the ranks' environment. A rank that waits for others for more than `timeout` seconds (0: never), or ends, is an
    error of all further calls.

    Raises `RunError` for a bundle that is not in a file, and if the ranks do not start; no process is left then.
    """

    def __init__(
        self, bundle: Bundle, device: str = "cpu", launcher: str | HostList | None = None,
        timeout: float = DEFAULT_TIMEOUT, threads: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        check_alone()
        if bundle.path is None:
            raise RunError("ranks that are processes read the bundle from files", hint="save the plan, and read it")
        options = ServeOptions(file_of(bundle), RankOptions("torch", device, timeout), [], requests=True)
        self._timeout = timeout
        self._processes = RankProcesses.start(bundle.manifest.mesh.size, options, launcher, threads, variables)
        self._requests = Requests(self._processes)
        self._flight: deque[int] = deque()

    def submit(self, slots: Sequence[Slot], ended: Collection[int] = ()) -> None:
        """Start a step; see `RankRequests.step`. Raises what a rank has raised."""
        fields = [_fields(slot) for slot in slots]
        try:
            number = self._requests.submit("step", {"slots": fields, "ended": list(ended)}, {}, self._timeout)
        except RanksLost as lost:
            raise lost.error from None
        self._flight.append(number)

    def result(self) -> list[list[int]]:
        """Wait for the first step in flight; return its tokens. Raises what a rank has raised."""
        try:
            tokens: list[list[int]] = self._requests.result(self._flight.popleft()).values["tokens"]
        except RanksLost as lost:
            raise lost.error from None
        return tokens

    def busy(self) -> list[float]:
        """Return the seconds that each rank has computed, after the steps in flight. Raises what a rank has raised."""
        try:
            number = self._requests.submit("busy", {}, {}, self._timeout)
            seconds: list[float] = self._requests.result(number).values["seconds"]
        except RanksLost as lost:
            raise lost.error from None
        return seconds

    def close(self) -> None:
        """End the ranks."""
        self._processes.stop()
        self._requests.close()


def _fields(slot: Slot) -> list[Any]:
    fields = [slot.request, slot.past, list(slot.tokens), slot.last, slot.length]
    return [*fields, list(_values(slot.sampling)), slot.source, list(slot.prompt)]


_values = lru_cache(1024)(astuple)
