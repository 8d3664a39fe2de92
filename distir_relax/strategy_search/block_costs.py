"""The cost of one block of a model in the tasks of a pipeline, from simulations of two short versions of it.

The model of two blocks and that of three are simulated as two stages, with three microbatches: the first, one in the
middle, which accumulates gradients, and the last. Their tasks differ by those of a block. Hosts take no time, so that
no task is longer than in a step in which its host is ahead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.simulation.events import Called, Event
from distir_relax.simulation.memory_categories import ACTIVATIONS
from distir_relax.simulation.op_timer import FEMTOSECONDS
from distir_relax.simulation.pipeline_tasks import Span, first_class, spans_of
from distir_relax.simulation.simulation import Simulation
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.evaluate import Evaluator
from distir_relax.strategy_search.lower_bounds import LowerBounds, WeightBytes
from distir_relax.strategy_search.pipeline_bounds import TaskSeconds
from distir_relax.strategy_search.process_workers import run_in_processes
from distir_relax.strategy_search.search_space import Candidate
from distir_relax.strategy_search.shortened import Chain

_SHORT = (2, 3)
"""The numbers of blocks of the short versions, at least one on each stage."""
_MICROBATCHES = 3
_ISSUE = 1e-12
"""Seconds in which a host issues an op: it stays ahead of its device."""
_BETWEEN = "between"
"""The kind of ops between tasks."""

_Seconds = dict[tuple[str, int], float]
"""Seconds of all tasks of a kind and a microbatch."""


class _Short(NamedTuple):
    """A step of the short versions: so many `samples` in a microbatch of each data-parallel rank."""

    strategy: Strategy
    samples: int


class BlockCosts:
    """Costs of blocks of the chain of a model on a machine.

    `batch` is the largest of its steps. Simulations of `candidates` without the traffic of data parallelism share their
    compilation.
    """

    def __init__(self, chain: Chain, profile: Profile, batch: int, candidates: Iterable[Candidate]) -> None:
        self._batch = batch
        sources = tuple(chain.first(count) for count in _SHORT)
        self._memory = tuple(LowerBounds(source, profile) for source in sources)
        if profile.dispatch:
            profile = replace(profile, dispatch=_ISSUE, view=0.0, shape_op=0.0, waits=frozenset())
        self._devices = profile.devices
        candidates = list(candidates)
        self._largest: dict[Strategy, int] = defaultdict(lambda: 2)
        for strategy, samples in (self._steady(candidate, False) for candidate in candidates):
            self._largest[strategy] = max(self._largest[strategy], samples)
        shared = dict.fromkeys(short for candidate in candidates for short in self._needed(candidate, False))
        self._evaluators = tuple(Evaluator(source, profile, map(_step, shared)) for source in sources)
        self._found: dict[_Short, list[_Tasks] | None] = {}

    def find(self, candidates: Iterable[Candidate], with_data: bool, workers: int) -> None:
        """Simulate in processes all that the costs of candidates need."""
        groups: dict[Strategy, dict[_Short, None]] = defaultdict(dict)
        for short in (short for candidate in candidates for short in self._needed(candidate, with_data)):
            if short not in self._found:
                groups[short.strategy][short] = None
        if workers > 1 and len(groups) > 1:
            self._found.update(run_in_processes(self._simulated, [[list(g)] for g in groups.values()], workers))

    def seconds(self, candidate: Candidate, with_data: bool = False) -> tuple[TaskSeconds, TaskSeconds] | None:
        """Return the seconds of a block, and of the rest of the model; None if a short version cannot be compiled.

        `with_data` includes the traffic of data parallelism in each microbatch; otherwise it is left out.
        """
        found = self._tasks(self._steady(candidate, with_data))
        if found is None:
            return None
        parts = _split([_summed(tasks.seconds) for tasks in found])
        if _shards_gradients(candidate.strategy) and not with_data:
            alone, halves = map(self._tasks, _sharded(candidate.strategy))
            if alone is None or halves is None:
                return None
            parts = [part.less(saved) for part, saved in zip(parts, _saved(alone, halves), strict=True)]
        return parts[0], parts[1]

    def weight_bytes(self, strategy: Strategy) -> WeightBytes:
        """Return the least bytes of the weights of a block, and of what a step keeps of them."""
        short, long = (bounds.weights(strategy) for bounds in self._memory)
        return WeightBytes(*(b - a for a, b in zip(short, long, strict=True)))

    def kept_bytes(self, candidate: Candidate) -> float:
        """Return the bytes that a block keeps of a microbatch for its backward."""
        return self._bytes(candidate, "F")

    def held_bytes(self, candidate: Candidate) -> float:
        """Return the bytes that a block holds between the backward of a microbatch and the gradients of weights."""
        return max(0.0, self._bytes(candidate, "F") + self._bytes(candidate, "I"))

    def _bytes(self, candidate: Candidate, kind: str) -> float:
        """Return the bytes of activations that a task of a kind adds, of a block and the samples of a microbatch."""
        shorts = self._sizes(candidate.strategy)
        one, large = map(self._tasks, shorts)
        if one is None or large is None:
            return 0.0
        # Less what a block has whatever the samples: its weights in another dtype.
        of_sample = [more.added[kind] - few.added[kind] for few, more in zip(one, large, strict=True)]
        return (of_sample[1] - of_sample[0]) / (shorts[1].samples - shorts[0].samples) * self._samples(candidate)

    def _needed(self, candidate: Candidate, with_data: bool) -> list[_Short]:
        """Return the short steps that the costs of a candidate are taken from."""
        needed = [self._steady(candidate, with_data), *self._sizes(candidate.strategy)]
        return needed + ([] if with_data or not _shards_gradients(candidate.strategy) else _sharded(candidate.strategy))

    def _steady(self, candidate: Candidate, with_data: bool) -> _Short:
        """Return the step whose tasks are those of a candidate."""
        s = candidate.strategy
        if with_data and 2 * s.data * s.tensor > self._devices:
            # Two stages have twice its devices: half of the ranks send less.
            s = s.replace(data=max(1, s.data // 2))
        return _Short(_in_two(s, with_data), self._samples(candidate))

    def _sizes(self, strategy: Strategy) -> list[_Short]:
        """Return steps of two stages that differ by samples of a microbatch."""
        alone = _in_two(strategy, with_data=False)
        return [_Short(alone, 1), _Short(alone, self._largest[alone])]

    def _samples(self, candidate: Candidate) -> int:
        """Return the samples of a microbatch on a data rank, at least; no more than the batch of the model allows."""
        s = candidate.strategy
        return max(1, min(candidate.samples // (s.data * s.microbatches), self._batch // _MICROBATCHES))

    def _tasks(self, short: _Short) -> list[_Tasks] | None:
        if short not in self._found:
            self._found.update([self._simulated(short)])
        return self._found[short]

    def _simulated(self, short: _Short) -> tuple[_Short, list[_Tasks] | None]:
        """Return the tasks of both short versions; None if one cannot be compiled."""
        try:
            simulations = [evaluator.simulate(_step(short)) for evaluator in self._evaluators]
            return short, [_Tasks.of(simulation) for simulation in simulations]
        except DistIRError:
            return short, None


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Seconds of the tasks of each kind and microbatch of a step, of their computation alone, and the bytes of
    activations that those of the first microbatch add to memory, by kind; on one device of each stage together."""

    seconds: _Seconds
    computed: _Seconds
    added: Mapping[str, int]

    @staticmethod
    def of(simulation: Simulation) -> _Tasks:
        """Return the tasks of a simulated pipeline, on the first device of each.

        Ops between two tasks of a device, such as sums of gradients over data-parallel ranks, belong to the first.
        """
        seconds: dict[tuple[str, int], float] = defaultdict(float)
        computed: dict[tuple[str, int], float] = defaultdict(float)
        known: dict[int, dict[int, Span]] = {}
        running: dict[int, int] = {}
        added: Counter[str] = Counter()
        for event in simulation.steps:
            if isinstance(event, Called) and event.op.task:
                device_class = first_class(simulation, event)
                key = str(event.op.task["kind"]), int(str(event.op.task["microbatch"]))
                running[device_class] = key[1]
                if key[1] == 0:
                    added[key[0]] += _added_bytes(event, device_class)
                if (span := spans_of(event.events, known).get(device_class)) is not None:
                    seconds[key] += (span.end - span.start) / FEMTOSECONDS
                    computed[key] += span.computed / FEMTOSECONDS
            elif isinstance(event, Event) and not event.stream:
                for device_class in running.keys() & set(event.classes):
                    # What follows the last microbatch is done once.
                    if running[device_class] < _MICROBATCHES - 1:
                        seconds[_BETWEEN, running[device_class]] += event.duration / FEMTOSECONDS
        return _Tasks(dict(seconds), dict(computed), added)


def _added_bytes(call: Called, device_class: int) -> int:
    """Return the bytes of activations on a class of devices that a call allocates and does not free."""
    return sum(
        _added_bytes(change, device_class)
        if isinstance(change, Called)
        else change.bytes * (change.device_class == device_class and change.category == ACTIVATIONS)
        for change in call.changes
    )


def _step(short: _Short) -> Candidate:
    strategy, samples = short
    return Candidate(strategy, samples * strategy.data * strategy.microbatches)


def _in_two(strategy: Strategy, with_data: bool) -> Strategy:
    """Return a strategy of two stages; the backwards of all schedules are compiled as two tasks."""
    two = strategy.replace(pipeline=2, microbatches=_MICROBATCHES, schedule="1f1b", chunks=1)
    return two if with_data and _shards_gradients(strategy) else two.replace(data=1, zero=0)


def _shards_gradients(strategy: Strategy) -> bool:
    """Return whether data-parallel ranks sum gradients in each microbatch, and accumulate their shards."""
    return strategy.data > 1 and strategy.zero > 1


def _sharded(strategy: Strategy) -> list[_Short]:
    """Return steps that differ by the accumulation of half of the gradients."""
    alone = _in_two(strategy, with_data=False)
    return [_Short(alone, 1), _Short(alone.replace(data=2, zero=2), 1)]


def _saved(alone: Sequence[_Tasks], halves: Sequence[_Tasks]) -> list[TaskSeconds]:
    """Return the seconds that sharded gradients save at most, of a block and of the rest: twice those of two ranks."""
    differences = [
        {key: 2.0 * max(0.0, t - half.computed.get(key, 0.0)) for key, t in whole.computed.items()}
        for whole, half in zip(alone, halves, strict=True)
    ]
    return _split([_summed(difference) for difference in differences])


def _summed(tasks: _Seconds) -> TaskSeconds:
    """Return the seconds of the tasks of a microbatch."""
    last = _MICROBATCHES - 1
    first, middle, final = (sum(t for (_, m), t in tasks.items() if m == number) for number in (0, 1, last))
    return TaskSeconds(tasks["F", 0], tasks["I", last], tasks["W", 1], first, middle, final)


def _split(lengths: Sequence[TaskSeconds]) -> list[TaskSeconds]:
    """Return the seconds of a block, and of the rest of a model, from those of both short versions."""
    short, long = lengths
    block = long.less(short)
    return [block, short.less(block.times(_SHORT[0]))]
