"""What the command line does when it is told to end."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from distir_relax.runtime.launcher_detection import detect


class Interrupted(BaseException):
    """The process was sent `signal`. No subclass of KeyboardInterrupt, which the parser of the arguments keeps."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_on_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread.

    A rank of a launch is left as it is: its launcher ends it, also while it waits in a library.
    """
    if detect() is not None:
        return
    signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)
    # What was started with nohup goes on.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise)


def end(interrupted: Interrupted) -> NoReturn:
    """Leave the process at once, when all that was open is closed.

    Threads of ranks may still compute. Python would end them in the midst of it, which C++ does not survive.
    """
    sys.stdout.flush()
    sys.stderr.write(f"interrupted ({interrupted})\n")
    sys.stderr.flush()
    os._exit(128 + interrupted.number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
