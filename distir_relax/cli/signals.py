"""Termination signals of the command line."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from distir_relax.runtime.launcher_detection import detect

if TYPE_CHECKING:
    from distir_relax.runtime.world import World


class Interrupted(BaseException):
    """The process received a signal. Not a KeyboardInterrupt, which the argument parser catches."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread.

    Ranks of a launch keep the default handlers: their launcher ends them, even while they wait in a library.
    """
    if detect() is not None:
        return
    signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)
    # A process started with nohup keeps running.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise)


def exit_interrupted(interrupted: Interrupted) -> NoReturn:
    """Exit at once, after all cleanup has run.

    Rank threads may still compute; a regular interpreter exit would kill them in the middle of C++ code and crash.
    """
    sys.stdout.flush()
    sys.stderr.write(f"interrupted ({interrupted})\n")
    sys.stderr.flush()
    os._exit(128 + interrupted.number)


class SignalRecorder:
    """Record the first termination signal: calling it returns the signal, or 0. Ranks end together after their step.

    If ranks are threads, SIGINT and a second signal end the process at once.
    """

    def __init__(self, world: World) -> None:
        self._alone = world.is_alone
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalRecorder:
        from distir_relax.runtime.training.training_loop import CHECKPOINT_SIGNALS

        for number in (*CHECKPOINT_SIGNALS, *(() if self._alone else (signal.SIGINT,))):
            self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> int:
        return self._number

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._number and self._alone:
            raise Interrupted(number)
        self._number = self._number or number


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
