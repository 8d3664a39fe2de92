"""Pass manager: run passes, with observers of the program between them (verification, times, progress, dumps)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from distir_relax.compiler.pass_text import print_pass
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import Known, Module, Pass, gc_disabled, pass_name, print_module, verify
from distir_relax.layout import assuming
from distir_relax.ops import check
from distir_relax.sharding import layout_comments


class Observer:
    """Observer of a pipeline. Number 0 is the input program, before any pass."""

    def begin(self, number: int, step: Pass) -> None:
        """Called before pass number `number` runs."""

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        """Called with a pass's result and its run time. May raise `DistIRError` to stop the pipeline."""


def run_passes(module: Module, passes: Sequence[Pass], observers: Iterable[Observer] = ()) -> Module:
    """Run passes in order. Raises the errors of passes and observers.

    Raises `VerificationError` if a pass does not take the program's stage.
    """
    with gc_disabled(), assuming(module.guards):
        return _run(module, passes, tuple(observers))


def _run(module: Module, passes: Sequence[Pass], observer_list: tuple[Observer, ...]) -> Module:
    for observer in observer_list:
        observer.end(0, None, module, 0.0)
    for number, step in enumerate(passes, 1):
        if module.stage not in step.takes:
            takes = " or ".join(step.takes)
            raise VerificationError(
                f"{pass_name(step)} takes a program of the {takes} stage, found the {module.stage} stage"
            )
        for observer in observer_list:
            observer.begin(number, step)
        start = time.perf_counter()
        module = step.run(module)
        seconds = time.perf_counter() - start
        for observer in observer_list:
            observer.end(number, step, module, seconds)
    return module


class Verify(Observer):
    """Verify the program after each pass: the rules of its stage and of the op table, and that its ranks match."""

    def __init__(self) -> None:
        self._known = Known()

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        """Raise `VerificationError`, which names the pass, if the program is invalid."""
        try:
            verify(module, check, self._known)
        except VerificationError as error:
            by = f"after {pass_name(step)}: " if step else "as imported: "
            raise VerificationError(by + error.message, error.where, error.hint) from None


def proves_by_default() -> bool:
    """Return whether plans for inference are compared with their models: unless the variable DISTIR_CHECK is 0."""
    return os.environ.get("DISTIR_CHECK", "1") != "0"


class Stages(Observer):
    """Record the last program of each stage, and the times of the passes in seconds, by name."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.seconds: dict[str, float] = {}

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        """Record the program and the time of the pass."""
        self.modules[module.stage] = module
        if step is not None:
            self.seconds[pass_name(step)] = self.seconds.get(pass_name(step), 0.0) + seconds


class Dump(Observer):
    """Write the program after each pass to a numbered text file in `folder`, which is created if missing.

    ``00-imported.txt``, ``01-propagate.txt``, …; the first line of each is the pass with its options. Files of an
    earlier dump are replaced, others are not touched. Raises `DistIRError` if the folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("[0-9][0-9]-*.txt"):
                old.unlink()
        except OSError as error:
            raise DistIRError(f"cannot write here: {error.strerror}", str(folder)) from None

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        """Write the program."""
        head = f"# {print_pass(step)}\n" if step else ""
        note = layout_comments(module) if module.stage == "sharded" else None
        file = self.folder / f"{number:02}-{pass_name(step) if step else 'imported'}.txt"
        try:
            file.write_text(head + print_module(module, note), encoding="utf-8")
        except OSError as error:
            raise DistIRError(f"cannot write here: {error.strerror}", str(file)) from None
