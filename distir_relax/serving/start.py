"""Starting an engine: ranks as threads or processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from distir_relax.bundle import Bundle, Manifest
from distir_relax.errors import RunError
from distir_relax.runtime.generation import LanguageProgram
from distir_relax.runtime.hosts import HostList
from distir_relax.runtime.launch import find_mpirun
from distir_relax.runtime.process_session.process_requests import ProcessRequests
from distir_relax.runtime.requests import ThreadRequests
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.serving.engine import Engine, EngineOptions, Executor
from distir_relax.serving.state_memory import default_state_memory

_GPUS = "CUDA_VISIBLE_DEVICES"
THREADS = "threads"
"""The launcher of ranks that are threads of this process."""


@dataclass(frozen=True)
class Replica:
    """One of `count` engines of the same bundle on this machine, which share its cores and devices."""

    number: int = 0
    count: int = 1


def start_engine(
    bundle: Bundle, options: EngineOptions | None = None, launcher: str | HostList | None = None, device: str = "cpu",
    timeout: float = DEFAULT_TIMEOUT, replica: Replica = Replica(),
) -> Engine:  # fmt: skip
    """Start the ranks of a bundle, and return the engine that runs their steps.

    `launcher` is "threads", "mpirun", "torchrun", or the hosts of the ranks. By default a single rank, and those of a
    bundle that is not in a file, are threads, several ranks or replicas are processes, by mpirun if there is one. The
    ranks of a `replica` get its share of the machine's cores and GPUs.

    Raises `RunError` for limits that no request fits into, and if the ranks do not start.
    """
    options = with_state_memory(options, bundle.manifest, device, replica.count)
    # Before the ranks load their weights.
    options.check(bundle.manifest)
    ranks = bundle.manifest.mesh.size
    if launcher is None:
        launcher = THREADS if ranks * replica.count == 1 or bundle.path is None else _process_launcher()
    executor: Executor
    if launcher == THREADS:
        executor = ThreadRequests(bundle, device)
    else:
        threads, variables = _share(replica, ranks, device)
        executor = ProcessRequests(bundle, device, launcher, timeout, threads, variables)
    return Engine(executor, bundle, options)


def with_state_memory(
    options: EngineOptions | None, manifest: Manifest, device: str = "cpu", replicas: int = 1
) -> EngineOptions:
    """Return options, by default the usual ones, with a memory for states: by default what this machine has left.

    Raises `RunError` for a program that does not continue sequences of tokens alone.
    """
    options = options or EngineOptions()
    if options.memory is not None:
        return options
    longest = LanguageProgram.for_requests(manifest).max_length
    return replace(options, memory=default_state_memory(manifest, options.max_requests, longest, device, replicas))


def _share(replica: Replica, ranks: int, device: str) -> tuple[int | None, dict[str, str]]:
    """Return the threads of each rank of a replica, None for the default, and variables that name its GPUs."""
    if replica.count == 1:
        return None, {}
    threads = max(1, len(os.sched_getaffinity(0)) // (ranks * replica.count))
    if device != "cuda":
        return threads, {}
    import torch

    named = os.environ.get(_GPUS, "")
    gpus = named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
    first = replica.number * ranks
    if not gpus:
        return threads, {}
    return threads, {_GPUS: ",".join(gpus[(first + rank) % len(gpus)] for rank in range(min(ranks, len(gpus))))}


def _process_launcher() -> str:
    try:
        find_mpirun()
    except RunError:
        return "torchrun"
    return "mpirun"
