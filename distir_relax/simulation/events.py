"""Events of a simulation: ops that occupy devices, allocations and frees, and calls with those of their functions."""

from __future__ import annotations

from typing import NamedTuple

from distir_relax.ir import Op

WAIT = 2
"""The kind of an event without duration: a device continues when a value that is computed on a stream is ready."""


class Event(NamedTuple):
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


class Change(NamedTuple):
    """An allocation (bytes > 0) or free on one class, at a time from the start of its function."""

    time: int
    device_class: int
    bytes: int
    category: int


class Called(NamedTuple):
    """A call: the events and changes of its function, starting at `base`."""

    op: Op
    events: list[Event | Called]
    changes: list[Change | Called]
    base: int
