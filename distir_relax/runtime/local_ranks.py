"""Processes of the ranks on this node, as seen by the operating system."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distir_relax.runtime.launcher_detection import AGENT

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")
# Thread name, of at most 15 characters, that other processes can see.
_THREAD_NAME = "distir-meets"


def ranks_of_this_node(state_of: Callable[[Any], str] = lambda process: "is there") -> dict[int, str]:
    """Return the state of each process of this launch on this node, by rank: "is stopped (process 1234)".

    `state_of` describes a process (psutil's) that is not stopped.
    """
    import psutil

    states: dict[int, str] = {}
    for rank, process in processes_of_this_node().items():
        with suppress(psutil.Error):
            is_stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            states[rank] = f"{'is stopped' if is_stopped else state_of(process)} (process {process.pid})"
    return states


def processes_of_this_node() -> dict[int, Any]:
    """Return the processes (psutil's) of this launch on this node, by rank.

    A launcher starts the ranks of a node as children of one process: they are siblings of this one.
    """
    import psutil

    parent = psutil.Process().parent()
    processes: dict[int, Any] = {}
    for sibling in parent.children() if parent is not None else []:
        with suppress(psutil.Error):
            rank = rank_in(sibling.environ())
            if rank is not None:
                processes[rank] = sibling
    return processes


def has_ended(process: Any) -> bool:
    """Whether a process (psutil's) has exited, including unreaped zombies."""
    import psutil

    try:
        return not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return True


def mark_rendezvous() -> None:
    """Show other processes of this node that this one has reached the rendezvous, while this thread lives."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(_THREAD_NAME, encoding="ascii")


def has_reached_rendezvous(process: Any) -> bool:
    """Whether a process (psutil's) of this node has a thread that called `mark_rendezvous`."""
    for name in Path(f"/proc/{process.pid}/task").glob("*/comm"):
        with suppress(OSError):
            if name.read_text(encoding="utf-8", errors="replace").strip() == _THREAD_NAME:
                return True
    return False


def rank_in(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank in a launcher's environment variables, else None."""
    names = ("RANK",) if AGENT in environment else _RANK_VARIABLES
    value = next((environment[name] for name in names if name in environment), "")
    return int(value) if value.isdecimal() else None
