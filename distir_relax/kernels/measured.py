"""Choices between forms of a computation by their times on this machine.

A choice is measured once and kept on disk with what it was measured on (`kernels.compiled_files`): it may change the
last bits of results, so it is the same in every run. Times are minima of runs that take turns; where other work ran at
the same time, they are taken again. ``distir doctor`` shows the choices, ``distir doctor --measure`` measures again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distir_relax.kernels.compiled_files import (
    compiled_folder,
    compiled_key,
    is_usable,
    one_compiles,
    remove_compiled,
    write_compiled,
)
from distir_relax.kernels.processor import processor_field
from distir_relax.kernels.recording import paused

_PREFIX, _SUFFIX = "choice-", ".json"
_MOST_OTHER_WORK = 0.1
"""The share of the machine's cores that other processes may take during a measurement."""
_ATTEMPTS = 3
_LEAST_ROUNDS, _MOST_ROUNDS, _STEADY_ROUNDS = 6, 60, 4
_MOST_SECONDS = 0.6
"""Seconds after which a comparison ends, when each form has run `_LEAST_ROUNDS` times."""
_AGAIN_AFTER = 600.0
"""Seconds after which a choice that was made beside other work is made again: ranks of a launch share one."""


@dataclass(frozen=True)
class Choice:
    """A chosen number or form, with the seconds of the forms in question, and the circumstances."""

    name: str
    chosen: int | str
    seconds: Mapping[str, float]
    processor: str = ""
    other_work: float = 0.0
    """The share of the cores that other processes took."""
    time: float = 0.0
    """When it was measured, in seconds since 1970."""

    @property
    def is_beside_other_work(self) -> bool:
        """Return whether other processes took so much that the times may be wrong."""
        return self.other_work > _MOST_OTHER_WORK


def measured_once(name: str, measure: Callable[[], Choice], sources: object = ()) -> int | str:
    """Return the chosen number or form of a measurement on this processor, made now or earlier.

    `sources` have a `repr` of the code that is measured.
    """
    with paused():
        return _measured_once(name, measure, sources)


def _measured_once(name: str, measure: Callable[[], Choice], sources: object) -> int | str:
    folder = compiled_folder()
    if folder is None:
        return _measured(name, measure).chosen
    file = folder / f"{_PREFIX}{name}-{compiled_key(sources)}{_SUFFIX}"
    if (found := _read(file)) is not None:
        return found.chosen
    with one_compiles(file):
        if (found := _read(file)) is None:
            found = _measured(name, measure)
            write_compiled(json.dumps(asdict(found)).encode(), file)
    return found.chosen


def compare(forms: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least seconds of each form, of runs that take turns until the minima are steady."""
    least = dict.fromkeys(forms, float("inf"))
    steady, end = 0, time.perf_counter() + _MOST_SECONDS
    for done in range(_MOST_ROUNDS):
        steady += 1
        for name, run in forms.items():
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            if seconds < 0.99 * least[name]:
                steady = 0
            least[name] = min(least[name], seconds)
        if done + 1 >= _LEAST_ROUNDS and (steady >= _STEADY_ROUNDS or time.perf_counter() > end):
            break
    return least


def choose(name: str, forms: Mapping[str, Callable[[], object]], margin: float = 1.05) -> Choice:
    """Return the choice of the fastest form; the first one, unless another is faster by a factor of `margin`."""
    seconds = compare(forms)
    first = next(iter(seconds))
    fastest = min(seconds, key=seconds.__getitem__)
    return Choice(name, fastest if margin * seconds[fastest] < seconds[first] else first, seconds)


def kept_choices() -> Iterator[Choice]:
    """Iterate over the choices that were made on this machine, by name."""
    folder = compiled_folder()
    for file in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")) if folder else ():
        found = _read(file)
        if found is not None and found.processor == _processor():
            yield found


def forget_choices() -> None:
    """Remove the choices that were made on this machine."""
    remove_compiled(f"{_PREFIX}*{_SUFFIX}")


def _read(file: Path) -> Choice | None:
    with suppress(OSError, ValueError, TypeError):
        if is_usable(file):
            found = Choice(**json.loads(file.read_text()))
            if not found.is_beside_other_work or time.time() < found.time + _AGAIN_AFTER:
                return found
    return None


def _measured(name: str, measure: Callable[[], Choice]) -> Choice:
    """Return the choice of the measurement with the least other work; the first one with little of it."""
    best: Choice | None = None
    for _ in range(_ATTEMPTS):
        before, start = _busy_seconds(), time.monotonic()
        found = measure()
        cores = (time.monotonic() - start) * (os.cpu_count() or 1)
        other = max(0.0, _busy_seconds() - before) / cores if cores else 0.0
        if best is None or other < best.other_work:
            best = replace(found, name=name, processor=_processor(), other_work=round(other, 3), time=time.time())
        if other <= _MOST_OTHER_WORK:
            break
    assert best is not None
    return best


def _busy_seconds() -> float:
    """Return the seconds that all cores were busy with other processes; those of this one alone if it is unknown."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - time.process_time()


def _processor() -> str:
    return processor_field("model name")
