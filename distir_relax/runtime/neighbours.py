"""The ranks of this node, as its operating system sees them."""

from __future__ import annotations

import os
from collections.abc import Mapping

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def ranks_of_this_node() -> dict[int, str]:
    """What each process of this launch on this node is doing, by rank: "is stopped (process 1234)".

    A launcher starts the ranks of a node as children of one process: they are this one's siblings.
    """
    import psutil

    parent = psutil.Process().parent()
    found: dict[int, str] = {}
    for sibling in parent.children() if parent is not None else []:
        try:
            rank = rank_in(sibling.environ())
            state = sibling.status()
        except psutil.Error:
            continue
        if rank is not None:
            doing = "is stopped" if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "is there"
            found[rank] = f"{doing} (process {sibling.pid})"
    return found


def rank_in(environment: Mapping[str, str] = os.environ) -> int | None:
    """The rank that a launcher's environment variables name, if they do."""
    value = next((environment[name] for name in _RANK_VARIABLES if name in environment), "")
    return int(value) if value.isdecimal() else None
