"""Steady state of a pipeline: equal periods of the entry function, of which a simulation runs a few.

In the middle of a pipeline's schedule the same ops recur, for the next microbatch each time. `find_cycle` finds these
steps in a slot program: a step of the cycle corresponds to the one `length` steps earlier if it has the same pattern,
and its operands are equal inputs, or results of corresponding steps. So if a period starts in the same state as the one
before, relative to its clocks, then it does the same, and so do all others of the cycle. `Fold` compares the states at
the starts of periods, and then repeats the effect of the last period for all others, instead of running them.

The state consists of the clocks, the transfers on uplinks, live memory, and the storage of the values that later steps
use. A host may fall behind its devices from period to period while none of them waits for it (`Frame.host_waits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from distir_relax.interpret.interpreter import SlotProgram
from distir_relax.interpret.ragged import IntArray, Ragged
from distir_relax.ir import Op
from distir_relax.simulation.events import Called, Change, Event
from distir_relax.simulation.shared_links import LinkState, relative
from distir_relax.simulation.simulator_state import Frame, Handle

_LEAST_PERIODS = 6
"""A search for a cycle of fewer periods would take longer than running them."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """Steps of a slot program, from `start` to before `stop`, that recur every `length` steps.

    For each value, `producer` is the step that computes it, -1 for an input, and `index` its number among the results;
    `last_use` is that of the program.
    """

    start: int
    stop: int
    length: int
    producer: IntArray
    index: IntArray
    last_use: IntArray

    def live(self, step: int) -> tuple[IntArray, IntArray]:
        """Return the values used from `step` on: those that the cycle computes, and those that outlive it."""
        is_live = (self.producer < step) & (self.last_use >= step)
        outlives = self.outlives(np.arange(len(self.producer)))
        return np.flatnonzero(is_live & ~outlives & (self.producer >= 0)), np.flatnonzero(is_live & outlives)

    def outlives(self, values: IntArray) -> npt.NDArray[np.bool_]:
        """Return which of `values` are there before the cycle, and used after it."""
        return (self.producer[values] < self.start) & (self.last_use[values] >= self.stop)

    def correspond(self, values: IntArray, later: IntArray, steps: int) -> bool:
        """Whether values are results of corresponding steps, so many steps later."""
        return len(values) == len(later) and bool(_results_of(self.producer, self.index, values, later, steps).all())


def find_cycle(program: SlotProgram, inputs: Sequence[int]) -> Cycle | None:
    """Return the longest cycle of a slot program, None if there is none.

    `inputs` has a number for each input, equal for inputs of the same sizes and role.
    """
    steps = program.steps
    patterns = np.array([step.pattern for step in steps], dtype=np.int64)
    length = _usual_distance(patterns)
    if not length or len(steps) < _LEAST_PERIODS * length:
        return None
    producer, index = np.full(program.slots, -1, dtype=np.int64), np.zeros(program.slots, dtype=np.int64)
    results, last_use, dead = program.results, program.last_use, Ragged([step.dead for step in steps])
    producer[results.values], index[results.values] = results.rows, results.columns
    family = np.full(program.slots, -1, dtype=np.int64)
    family[: len(inputs)] = inputs
    is_regular = np.zeros(len(steps), dtype=bool)
    is_regular[length:] = patterns[length:] == patterns[:-length]
    fixed: list[tuple[IntArray, IntArray]] = []
    """Rows and values of operands and dead values that stay the same."""
    for ragged in (program.varying, dead):
        is_regular[length:] &= ragged.counts[length:] == ragged.counts[:-length]
        rows, values, later = ragged.pairs(np.flatnonzero(is_regular), length)
        is_fixed = (values == later) & (producer[values] >= 0)
        is_same = (producer[values] < 0) & (producer[later] < 0) & (family[values] == family[later])
        is_same |= is_fixed | _results_of(producer, index, values, later, length)
        is_regular[rows[~is_same]] = False
        fixed.append((rows[is_fixed], values[is_fixed]))
    edges = np.flatnonzero(np.diff(is_regular.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    if not len(edges):
        return None
    first, stop = edges[np.diff(edges).argmax()].tolist()
    cycle = Cycle(first - length, stop, length, producer, index, last_use)
    outlive = [cycle.outlives(values[(rows >= first) & (rows < stop)]).all() for rows, values in fixed]
    return cycle if stop - first >= _LEAST_PERIODS * length and all(outlive) else None


def _results_of(
    producer: IntArray, index: IntArray, values: IntArray, later: IntArray, steps: int
) -> npt.NDArray[np.bool_]:
    """Return which values are the same results of steps, so many steps later."""
    is_later = producer[later] - producer[values] == steps
    result: npt.NDArray[np.bool_] = (producer[values] >= 0) & is_later & (index[values] == index[later])
    return result


def _usual_distance(patterns: IntArray) -> int:
    """Return the most frequent distance between steps of one pattern, 0 if each occurs once."""
    order = np.argsort(patterns, kind="stable")
    is_next = np.diff(patterns[order]) == 0
    distances = np.diff(order)[is_next]
    return int(np.bincount(distances).argmax()) if len(distances) else 0


@dataclass(slots=True)
class _State:
    """The state at the start of a period, and how much has happened by then."""

    step: int
    clocks: list[int]
    totals: list[int]
    live: list[list[int]]
    transfers: dict[int, LinkState]
    counts: list[list[int]]
    """Busy, streamed and hosted time of each class."""
    device_ops: int
    host_waits: int
    events: int
    changes: int
    values: tuple[IntArray, IntArray] | None = None
    storage: list[tuple[object, ...]] = field(default_factory=list)
    """Facts of the storage of each value."""


@dataclass(slots=True)
class Fold:
    """Repeats the effect of a period of the entry's `frame`; `ops` are those of all steps, `slots` their values."""

    cycle: Cycle
    frame: Frame
    ops: Sequence[Op]
    slots: list[Handle | None]
    before: _State | None = None

    def advance(self, step: int) -> int:
        """Return the step to continue with at `step`, at which a period starts, after the effect of those between."""
        state, before = self._state(step), self.before
        self.before = state
        if before is None or (moves := self._moves(before, state)) is None:
            return step
        state.values = self.cycle.live(step)
        state.storage = self._storage(state.values)
        if before.values is None or state.storage != before.storage:
            return step
        (values, lasting), (earlier, fixed) = state.values, before.values
        if not (self.cycle.correspond(earlier, values, self.cycle.length) and np.array_equal(lasting, fixed)):
            return step
        most = (self.cycle.stop - step) // self.cycle.length
        for periods in range(most, max(0, most - 2), -1):
            later, still = self.cycle.live(step + periods * self.cycle.length)
            if self.cycle.correspond(values, later, periods * self.cycle.length) and np.array_equal(lasting, still):
                self._repeat(before, state, moves, periods)
                self._move(values, later, periods * (state.clocks[0] - before.clocks[0]))
                return step + periods * self.cycle.length
        return step

    def _state(self, step: int) -> _State:
        frame = self.frame
        now = min(frame.clocks[: frame.classes])
        transfers = {link: state for link, t in frame.links.items() if (state := relative(t, now))}
        counts = [list(row) for row in (*frame.busy, frame.streamed, frame.hosted)]
        return _State(
            step, list(frame.clocks), list(frame.total), [list(row) for row in frame.live], transfers, counts,
            frame.device_ops, frame.host_waits, len(frame.events), len(frame.changes),
        )  # fmt: skip

    def _moves(self, before: _State, state: _State) -> list[int] | None:
        """Return the time by which each clock has advanced, None if the states differ relative to their clocks."""
        if state.totals != before.totals or state.live != before.live or state.transfers != before.transfers:
            return None
        moves = [b - a for a, b in zip(before.clocks, state.clocks, strict=True)]
        classes, period = self.frame.classes, moves[0]
        if any(move != period for move in moves[:classes]):
            return None
        # A clock that stands still, earlier than those of all devices, delays nothing.
        earliest = min(before.clocks[:classes])
        hosts = len(moves) - self.frame.hosts
        for move, clock in zip(moves[classes:hosts], before.clocks[classes:hosts], strict=True):
            if move != period and (move or clock > earliest):
                return None
        if any(move != period for move in moves[hosts:]) and (
            state.host_waits != before.host_waits or max(moves[hosts:]) > period
        ):
            return None
        return moves

    def _storage(self, values: tuple[IntArray, IntArray]) -> list[tuple[object, ...]]:
        """Return facts of the storage of each value, relative to the clocks of its devices, and the first with it."""
        clocks, first = self.frame.clocks, dict[int, int]()
        handles = [self.slots[i] for part in values for i in part.tolist()]
        facts: list[tuple[object, ...]] = []
        for i, h in enumerate(handles):
            ready = h.ready and [(c, max(0, time - clocks[c])) for c, time in h.ready.items()]
            facts.append((first.setdefault(id(h), i), h.bytes, h.category, h.freeable, h.users, h.number, ready))
        return facts

    def _repeat(self, before: _State, state: _State, moves: Sequence[int], periods: int) -> None:
        """Add the effect of the period between two states, so many times."""
        frame, period = self.frame, moves[0]
        step_of = {id(self.ops[step]): step for step in range(before.step, state.step)}
        events = [(event, step_of[id(event.op)]) for event in frame.events[before.events :]]
        changes = frame.changes[before.changes :]
        for number in range(1, periods + 1):
            time, distance = number * period, number * self.cycle.length
            calls: dict[int, Called] = {}
            for event, step in events:
                op = self.ops[step + distance]
                if isinstance(event, Called):
                    called = calls[id(event)] = Called(op, event.events, event.changes, event.base + time)
                    frame.events.append(called)
                else:
                    _, classes, start, duration, kind, stream, waits = event
                    frame.events.append(Event(op, classes, start + time, duration, kind, stream, waits))
            for change in changes:
                if isinstance(change, Called):
                    frame.changes.append(calls[id(change)])
                else:
                    at, device_class, size, category = change
                    frame.changes.append(Change(at + time, device_class, size, category))
        for clock, move in enumerate(moves):
            frame.clocks[clock] += periods * move
        for row, old in zip((*frame.busy, frame.streamed, frame.hosted), before.counts, strict=True):
            row[:] = [count + periods * (count - earlier) for count, earlier in zip(row, old, strict=True)]
        for link in state.transfers:
            start, left = frame.links[link]
            frame.links[link] = start + periods * period, left
        frame.device_ops += periods * (state.device_ops - before.device_ops)

    def _move(self, values: IntArray, later: IntArray, time: int) -> None:
        """Move the storage of values to that of the corresponding ones at a later `time`."""
        handles = [self.slots[i] for i in values.tolist()]
        for i in values.tolist():
            self.slots[i] = None
        for i, handle in zip(later.tolist(), handles, strict=True):
            self.slots[i] = handle
        for shifted in {id(h): h for h in handles if h is not None and h.ready}.values():
            shifted.ready = {c: ready + time for c, ready in (shifted.ready or {}).items()}
