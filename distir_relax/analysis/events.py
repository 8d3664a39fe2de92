"""Events of a simulation: ops that occupy devices, allocations and frees, and calls with those of their functions."""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.ir import Op

WAIT = 2
"""The kind of an event without duration: a device continues when a value that is computed on a stream is ready."""


@dataclass(frozen=True, slots=True)
class Event:
    """An op that occupies device classes, in femtoseconds from the start of its function.

    It starts when the classes `waits` have reached it, and all of its classes are free if it runs on a stream.
    """

    op: Op
    classes: tuple[int, ...]
    start: int
    duration: int
    kind: int
    stream: int
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation (bytes > 0) or free on one class, at a time from the start of its function."""

    time: int
    device_class: int
    bytes: int
    category: int


@dataclass(frozen=True, slots=True)
class Called:
    """A call: the events and changes of its function, starting at `base`."""

    op: Op
    events: list[Event | Called]
    changes: list[Change | Called]
    base: int
