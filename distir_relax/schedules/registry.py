"""Registry of schedules by name."""

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
"""Handling of weight gradients: B; I and W; either; or no backward."""

MakeOrder: TypeAlias = Callable[[Shape], Order]
MakeTimedOrder: TypeAlias = Callable[[Shape, Times, Memory | None], Order]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A registered schedule: `chunks` is the number of stages per rank, None for any number."""

    name: str
    weights: Weights
    chunks: int | None
    make: MakeTimedOrder
    by_shape: bool = True
    """Whether it ignores times and memory."""

    def check_chunks(self, chunks: int) -> None:
        """Raise `DistIRError` if the schedule does not support that many chunks."""
        if chunks < 1 or self.chunks not in (None, chunks):
            noun = "chunk" if self.chunks == 1 else "chunks"
            expected = f"{self.chunks} {noun} a rank" if self.chunks else "at least one chunk a rank"
            raise DistIRError(f"the schedule {self.name} takes {expected}, found {chunks}", hint=self._hint())

    def _hint(self) -> str:
        if self.chunks == 1:
            several = (name for name, entry in _SCHEDULES.items() if entry.chunks != 1)
            return f"chunks=1, or a schedule for several: {', '.join(several)}"
        return f"chunks={self.chunks or 1}"


_SCHEDULES: dict[str, Schedule] = {}


def schedule(name: str, weights: Weights = "whole", chunks: int | None = 1) -> Callable[[MakeOrder], MakeOrder]:
    """Register a function that returns an order for a `Shape`.

    `weights` is its handling of weight gradients (`Weights`), `chunks` its number of stages per rank, None for any. Its
    orders are checked wherever they are used. Raises `DistIRError` for a name that is taken.
    """

    def register(make: MakeOrder) -> MakeOrder:
        _register(Schedule(name, weights, chunks, lambda shape, _times, _memory: make(shape)))
        return make

    return register


def scheduler(
    name: str, weights: Weights = "either", chunks: int | None = 1
) -> Callable[[MakeTimedOrder], MakeTimedOrder]:
    """Register a function that also takes the `Times` of tasks and the `Memory` of ranks, or None."""

    def register(make: MakeTimedOrder) -> MakeTimedOrder:
        _register(Schedule(name, weights, chunks, make, by_shape=False))
        return make

    return register


def schedule_named(name: str) -> Schedule:
    """Return the schedule of that name. Raises `DistIRError`, which lists the names."""
    if name not in _SCHEDULES:
        raise DistIRError(f"expected a schedule, one of {', '.join(schedule_names())}, found {name!r}")
    return _SCHEDULES[name]


def schedule_names() -> tuple[str, ...]:
    """Return the names of all schedules, in the order of registration."""
    return tuple(_SCHEDULES)


def orders_by_shape(shape: Shape) -> Iterator[Order]:
    """Yield the unchecked orders of all training schedules that support the shape and depend on nothing else."""
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
    """Return the order of a schedule for these ranks, microbatches, and stages (`chunks`) per rank.

    `times` and `memory` are for schedulers; every order must fit in `memory`. Raises `DistIRError` for an unknown name,
    unsupported chunks, and an order that does not fit in memory.
    """
    entry = schedule_named(name)
    shape = Shape(ranks, microbatches, chunks)
    entry.check_chunks(chunks)
    task_times = times or EQUAL
    task_times.check_shape(shape.stages, microbatches)
    if memory:
        memory.check_shape(ranks, shape.stages)
    try:
        order = _by_shape(entry, shape) if entry.by_shape else _checked(entry.make(shape, task_times, memory))
        if memory:
            check_fits(order, memory)
    except DistIRError as error:
        where = f"schedule {name}" + (f", {error.where}" if error.where else "")
        raise DistIRError(error.message, where, error.hint) from None
    return order


# Passes request the same order consecutively, and a search a few orders repeatedly.
@lru_cache(maxsize=64)
def _by_shape(entry: Schedule, shape: Shape) -> Order:
    return _checked(entry.make(shape, EQUAL, None))


def _checked(order: Order) -> Order:
    check(order)
    return order


@contextmanager
def temporary_schedules() -> Iterator[None]:
    """Remove the schedules that are registered inside of the context at its end: for tests and examples."""
    saved = dict(_SCHEDULES)
    try:
        yield
    finally:
        _SCHEDULES.clear()
        _SCHEDULES.update(saved)


def _register(entry: Schedule) -> None:
    if entry.name in _SCHEDULES:
        raise DistIRError(f"schedule {entry.name!r} already exists", hint="choose another name")
    _SCHEDULES[entry.name] = entry
