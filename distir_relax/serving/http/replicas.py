"""Several engines of one bundle: data parallelism between requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distir_relax.errors import RunError
from distir_relax.serving.engine import Engine
from distir_relax.serving.http.service import EngineService


class Replicas:
    """Engines of one bundle, each with ranks of its own. A request goes to the one with the fewest requests."""

    def __init__(self, services: Sequence[EngineService]) -> None:
        self.services = services

    @property
    def is_ready(self) -> bool:
        """Whether some engine takes requests."""
        return any(service.is_ready for service in self.services)

    @property
    def failure(self) -> str:
        """Why the last engine failed that is not ready; empty if all are."""
        return next((service.failure for service in self.services if not service.is_ready), "")

    @property
    def restarts(self) -> int:
        """The number of restarts of all engines."""
        return sum(service.restarts for service in self.services)

    @property
    def running(self) -> int:
        """The number of requests in the next steps."""
        return self.total(lambda engine: engine.running)

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return self.total(lambda engine: engine.waiting)

    def total(self, read: Callable[[Engine], int]) -> int:
        """Return the sum of a number over the engines that are ready."""
        return sum(read(engine) for service in self.services if (engine := service.ready_engine) is not None)

    def submit(self, prompt: Any, count: int, **options: Any) -> Any:
        """Submit a request as `Engine.submit`. Raises `RunError`, also while no engine is ready."""
        loads = [
            (engine.running + engine.waiting, number)
            for number, service in enumerate(self.services)
            if (engine := service.ready_engine) is not None
        ]
        if not loads:
            raise RunError(f"the engine is being started again: {self.failure}", hint="try again in a moment")
        return self.services[min(loads)[1]].submit(prompt, count, **options)

    def close(self) -> None:
        """Cancel all requests and release the ranks."""
        for service in self.services:
            service.close()
