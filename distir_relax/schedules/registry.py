"""The schedules that there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from distir_relax.errors import DistIRError
from distir_relax.schedules.activation_memory import Memory, check_fits
from distir_relax.schedules.task import Order, Shape
from distir_relax.schedules.task_times import EQUAL, Times
from distir_relax.schedules.validate import check

Weights = Literal["whole", "apart", "either", "none"]
"""What a schedule does with weight gradients: B, I and W, either; or there is no backward."""

Maker: TypeAlias = Callable[[Shape], Order]
TimedMaker: TypeAlias = Callable[[Shape, Times, Memory | None], Order]


@dataclass(frozen=True, slots=True)
class Schedule:
    """An entry: `chunks` is how many stages a rank has, None where any number will do."""

    name: str
    weights: Weights
    chunks: int | None
    make: TimedMaker
    by_shape: bool = True
    """Whether it looks at neither times nor memory."""

    def take(self, chunks: int) -> None:
        """Raise `DistIRError` where the schedule does not take that many chunks."""
        if chunks < 1 or self.chunks not in (None, chunks):
            many = "chunk" if self.chunks == 1 else "chunks"
            expected = f"{self.chunks} {many} a rank" if self.chunks else "at least one chunk a rank"
            raise DistIRError(f"the schedule {self.name} takes {expected}, found {chunks}", hint=self._hint())

    def _hint(self) -> str:
        if self.chunks == 1:
            several = (name for name, entry in _SCHEDULES.items() if entry.chunks != 1)
            return f"chunks=1, or a schedule for several: {', '.join(several)}"
        return f"chunks={self.chunks or 1}"


_SCHEDULES: dict[str, Schedule] = {}


def schedule(name: str, weights: Weights = "whole", chunks: int | None = 1) -> Callable[[Maker], Maker]:
    """Enter a function that makes an order for a `Shape`.

    `weights` says what it does with weight gradients (`Weights`), `chunks` how many stages it has on a rank, None for
    any number. What it makes is checked wherever it is used. Raises `DistIRError` for a name that is taken.
    """

    def enter(make: Maker) -> Maker:
        _enter(Schedule(name, weights, chunks, lambda shape, _times, _memory: make(shape)))
        return make

    return enter


def scheduler(name: str, weights: Weights = "either", chunks: int | None = 1) -> Callable[[TimedMaker], TimedMaker]:
    """Enter a function that makes an order for a `Shape`, the `Times` of tasks and the `Memory` of ranks, or None."""

    def enter(make: TimedMaker) -> TimedMaker:
        _enter(Schedule(name, weights, chunks, make, by_shape=False))
        return make

    return enter


def schedule_named(name: str) -> Schedule:
    """The entry of that name. Raises `DistIRError` that lists those that there are."""
    if name not in _SCHEDULES:
        raise DistIRError(f"expected a schedule, one of {', '.join(schedule_names())}, found {name!r}")
    return _SCHEDULES[name]


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules, in the order in which they were entered."""
    return tuple(_SCHEDULES)


def orders_by_shape(shape: Shape) -> Iterator[Order]:
    """The orders of all schedules that train, take the chunks of this shape, and look at nothing else. Not checked."""
    for entry in list(_SCHEDULES.values()):
        if entry.by_shape and entry.weights != "none" and entry.chunks in (None, shape.chunks):
            yield entry.make(shape, EQUAL, None)


def order_of(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    times: Times | None = None,
    memory: Memory | None = None,
) -> Order:
    """The order that a schedule has for so many ranks, microbatches, and stages (`chunks`) on each rank.

    `times` and `memory` are for schedules that look at them; what any of them makes fits into `memory`. Raises
    `DistIRError` for a name that is none, chunks that the schedule does not take, and memory that its order does not
    fit into.
    """
    entry = schedule_named(name)
    shape = Shape(ranks, microbatches, chunks)
    entry.take(chunks)
    given = times or EQUAL
    given.fit(shape.stages, microbatches)
    if memory:
        memory.fit(ranks, shape.stages)
    try:
        order = _by_shape(entry, shape) if entry.by_shape else _checked(entry.make(shape, given, memory))
        if memory:
            check_fits(order, memory)
    except DistIRError as error:
        place = f"schedule {name}" + (f", {error.where}" if error.where else "")
        raise DistIRError(error.message, place, error.hint) from None
    return order


# Passes ask for the same order one after the other, and a search for few orders again and again.
@lru_cache(maxsize=64)
def _by_shape(entry: Schedule, shape: Shape) -> Order:
    return _checked(entry.make(shape, EQUAL, None))


def _checked(order: Order) -> Order:
    check(order)
    return order


@contextmanager
def extended() -> Iterator[None]:
    """Schedules that are entered inside are gone behind it: for tests and examples."""
    before = dict(_SCHEDULES)
    try:
        yield
    finally:
        _SCHEDULES.clear()
        _SCHEDULES.update(before)


def _enter(entry: Schedule) -> None:
    if entry.name in _SCHEDULES:
        raise DistIRError(f"there is a schedule {entry.name!r} already", hint="choose another name")
    _SCHEDULES[entry.name] = entry
