"""Connection of this process to its launch."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distir_relax.layout import DeviceMesh
from distir_relax.runtime.arrivals import arrivals, report, speaker
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.exit_codes import INFRASTRUCTURE
from distir_relax.runtime.launcher_detection import check_connected, detect
from distir_relax.runtime.local_ranks import mark_rendezvous, rank_in
from distir_relax.runtime.lost_ranks import LostRanks
from distir_relax.runtime.stall_detection import StallDetector
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT, Watchdog
from distir_relax.runtime.world import ALONE, World, check_size


def join_world(timeout: float = DEFAULT_TIMEOUT) -> World | None:
    """Return the launch that this process is a rank of, or None when it was started alone.

    Raises RunError when the launcher's library cannot be loaded, the ranks cannot connect, or a launcher started
    several tasks without a connection between them. When they have not connected within `timeout` seconds (0: never),
    this process prints the missing ranks and ends the launch, with the exit code of infrastructure.
    """
    kind = detect()
    if kind is None:
        check_connected()
        return None
    with _ending_after(timeout or None):
        if kind == "mpi":
            from distir_relax.runtime.transports.mpi import MPIWorld

            return MPIWorld()
        from distir_relax.runtime.transports.torch_distributed import TorchWorld

        return TorchWorld()


@contextmanager
def joined_world(
    timeout: float = DEFAULT_TIMEOUT, prepare: Callable[[World], None] = lambda world: None
) -> Iterator[World]:
    """The launch that this process is a rank of, whose ranks are monitored while the block runs; else `ALONE`.

    A rank that waits longer than `timeout` seconds ends the launch (`StallDetector`). `LostRanks` reports killed ranks.
    `prepare` is called before it; ranks may wait for each other there as long as it takes.
    """
    world = join_world(timeout)
    if world is None:
        prepare(ALONE)
        yield ALONE
        return
    with LostRanks(world):
        prepare(world)
        with Watchdog(timeout, StallDetector(world, timeout).poll):
            yield world


def connect(mesh: DeviceMesh, device: str = "cpu") -> Communicator | None:
    """Return this process's communicator over `mesh`, or None when it was started alone (use threads then).

    Raises RunError when the number of ranks is not the mesh's.
    """
    world = join_world()
    if world is None:
        return None
    check_size(mesh, world.size)
    return world.communicator(mesh, device)


@contextmanager
def _ending_after(seconds: float | None) -> Iterator[None]:
    """End this process when the block takes longer: it waits in a library, where no exception reaches it."""
    if seconds is None:
        yield
        return
    connected = threading.Event()
    threading.Thread(target=_end_unless, args=(connected, seconds), daemon=True).start()
    try:
        yield
    finally:
        connected.set()


def _end_unless(connected: threading.Event, seconds: float) -> None:
    """End the process after a time-out; one rank of a node reports the present ranks, the others wait for it."""
    mark_rendezvous()
    if connected.wait(seconds / 2):
        return
    before = arrivals()
    if connected.wait(seconds / 2):
        return
    after = arrivals()
    if rank_in() == speaker(before, after):
        text = "\n  ".join([f"error: the ranks have not connected within {seconds:g} s", *report(after), _HINT])
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    else:
        # The reporting rank may have started that much later. The first process to exit ends the others.
        time.sleep(seconds / 2 + 2)
    os._exit(INFRASTRUCTURE)


_HINT = "hint: look at what the missing ranks printed; --timeout gives them more time to start"
