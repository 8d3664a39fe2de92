"""Interrupts a session again and again, each time at another moment; every answer must be right. Prints how often."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
from handmade import SUM_COLUMNS, example_input, expected_outputs, mlp_bundle

from distir_relax.errors import RunError
from distir_relax.runtime import ranks
from distir_relax.runtime.session import Session


def interrupted_after(seconds: float, action: Callable[[], object]) -> bool:
    """Interrupt the main thread `seconds` after `action` begins, once. Return whether it had ended by then."""
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        time.sleep(seconds)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    finished = False
    try:
        thread.start()
        begun.set()
        action()
        finished = True
        # One that comes late comes here: on a busy machine, long after its time.
        thread.join()
        for _ in range(1000):
            time.sleep(1e-3)
    except KeyboardInterrupt:
        pass
    thread.join()
    return finished


def many_times() -> None:
    """While ranks start, meet, compute and end."""
    # A step that reads elements is not recorded: later calls would not sleep.
    text = SUM_COLUMNS.replace("    z =", "    import time; time.sleep(4e-3 + 0 * float(x.sum()))\n    z =")
    session = Session(mlp_bundle([1, 2, 2], text))
    expected = expected_outputs(session.bundle, example_input())
    early = 0
    for turn in range(20):
        early += not interrupted_after(0.001 + 0.0009 * turn, lambda: session({"x": example_input()}))
        found = session({"x": example_input() + 0})
        for name, value in expected.items():
            np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-5, atol=1e-5)
    assert early > 5, early
    assert not session.closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
    print(f"{early} runs interrupted, every answer right")


def once_for_good() -> None:
    """A rank that is deaf to the interrupt closes the session."""
    ranks._GRACE_INTERRUPTED = 0.1
    text = SUM_COLUMNS.replace("    z =", "    if comm.rank == 1: import time; time.sleep(1.5)\n    z =")
    session = Session(mlp_bundle([1, 2, 2], text))
    interrupted_after(0.5, lambda: session({"x": example_input()}))
    try:
        session({"x": example_input()})
    except RunError as error:
        print(error)


if __name__ == "__main__":
    # Where a shell has started this in the background, interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    many_times()
    once_for_good()
