"""Startup diagnostics: which ranks of a launch have reached the rendezvous, and which are missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby

from distir_relax.runtime.launcher_detection import detect, launch_size, local_size
from distir_relax.runtime.local_ranks import has_reached_rendezvous, ranks_of_this_node

WAITS = "waits for the others"


def arrivals() -> dict[int, str]:
    """Return the state of each rank of this node that has a process: "waits for the others (process 1234)"."""
    return ranks_of_this_node(
        lambda process: WAITS if has_reached_rendezvous(process) else "has started, but has not reached the rendezvous"
    )


def speaker(before: Mapping[int, str], now: Mapping[int, str]) -> int | None:
    """Return the rank of this node that reports: the first that waited `before` and is not stopped `now`.

    All ranks agree on it even if they started at different times, and no rank replaces one that has exited.
    """
    waiting = [rank for rank, state in before.items() if state.startswith(WAITS)] or list(before)
    return min((rank for rank in waiting if "stopped" not in now.get(rank, "")), default=None)


def report(states: Mapping[int, str]) -> list[str]:
    """Return a line for each rank of the launch, missing ranks grouped; `states` are those of this node."""
    size = launch_size() or max(states, default=-1) + 1
    alone = local_size() in (None, size)
    present: Collection[int] | None = None
    absent = "missing: not started, or ended already" if alone else "not on this node, or missing"
    if detect() == "torch" and len(states) < size:
        from distir_relax.runtime.transports.torch_distributed import present_ranks, store_address

        present = present_ranks(size)
        if present is None:
            absent = f"not visible: no response from {store_address()}, the store on rank 0"
        else:
            absent = f"missing: not started, or unable to reach {store_address()}"

    def state(rank: int) -> tuple[bool, str]:
        if rank in states:
            return True, f"rank {rank} {states[rank]}"
        return False, "waiting for the others, elsewhere" if present and rank in present else absent

    lines = []
    for (here, text), group in groupby(range(size), state):
        ranks = list(group)
        many = f"ranks {ranks[0]} to {ranks[-1]} are" if len(ranks) > 1 else f"rank {ranks[0]} is"
        lines.append(text if here else f"{many} {text}")
    return lines
