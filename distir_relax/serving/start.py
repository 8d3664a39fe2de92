"""Starting an engine: ranks as threads or processes."""

from __future__ import annotations

from distir_relax.bundle import Bundle
from distir_relax.errors import RunError
from distir_relax.runtime.launch import find_mpirun
from distir_relax.runtime.process_session.process_requests import ProcessRequests
from distir_relax.runtime.requests import ThreadRequests
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.serving.engine import Engine, EngineOptions, Executor

THREADS = "threads"
"""The launcher of ranks that are threads of this process."""


def start_engine(
    bundle: Bundle, options: EngineOptions | None = None, launcher: str | None = None, device: str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
) -> Engine:  # fmt: skip
    """Start the ranks of a bundle, and return the engine that runs their steps.

    `launcher` is "threads", "mpirun" or "torchrun". By default a single rank, and those of a bundle that is not in a
    file, are threads, several ranks are processes, by mpirun if there is one.

    Raises `RunError` for limits that no request fits into, and if the ranks do not start.
    """
    # Before the ranks load their weights.
    (options or EngineOptions()).check(bundle.manifest)
    if launcher is None:
        launcher = THREADS if bundle.manifest.mesh.size == 1 or bundle.path is None else _process_launcher()
    executor: Executor = (
        ThreadRequests(bundle, device)
        if launcher == THREADS
        else ProcessRequests(bundle, device, launcher=launcher, timeout=timeout)
    )
    return Engine(executor, bundle, options)


def _process_launcher() -> str:
    try:
        find_mpirun()
    except RunError:
        return "torchrun"
    return "mpirun"
