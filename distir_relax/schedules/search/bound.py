"""Lower bound of the makespan of a pipeline over all orders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from distir_relax.schedules.search.problem import Problem, total
from distir_relax.schedules.task_times import Number


def lower_bound(problem: Problem) -> Number:
    """Return a lower bound of the makespan of all orders, in the problem's unit; of orders with split backwards too.

    It is the largest of these, for each rank; `head` is the earliest start of its first forward, `first` that of its
    first input gradients:

    - *work*: the rank starts at `head`, and runs all its tasks;
    - *drain*: it runs its forwards and input gradients, and after the last one gradients travel to stage 0, which then
      runs its weight gradients;
    - *flow*: it runs its forwards, all or those of one stage, and after the last one that microbatch travels to the
      last stage and back to stage 0; likewise for input gradients of one stage, from their earliest start;
    - *start*: before `first` it can only run forwards, as many as fit in memory; everything else comes later;
    - *hold*: a microbatch's activations are stored from the start of its forward to the end of its weight gradients,
      at least for the round trip through later stages; the sum over microbatches of size times duration is at most the
      cap times the makespan;
    - *path*: a microbatch goes forward through all stages and back to a stage, which runs its weight gradients.

    A whole backward is an ``I`` directly followed by its ``W``, so the bound holds for it too.
    """
    paths = [_path(problem, microbatch) for microbatch in range(problem.shape.microbatches)]
    bounds: list[Number] = [*(_rank_bound(problem, paths, rank) for rank in range(problem.shape.ranks))]
    bounds += [end + weights for path in paths for end, weights in zip(path.back, path.weights, strict=True)]
    # With integer times, the makespan is an integer.
    return max(math.ceil(bound) if isinstance(bound, Fraction) else bound for bound in bounds)


@dataclass(frozen=True, slots=True)
class _Path:
    """One microbatch without contention: times by stage."""

    forward: list[Number]
    inputs: list[Number]
    weights: list[Number]
    begins: list[Number]
    """The starts of its forwards."""
    back: list[Number]
    """The ends of its input gradients."""


def _path(problem: Problem, microbatch: int) -> _Path:
    stages, m = problem.shape.stages, problem.shape.microbatches
    forward, inputs, weights = (
        [problem.durations[(kind * stages + s) * m + microbatch] for s in range(stages)] for kind in range(3)
    )
    begins: list[Number] = [0]
    for s in range(1, stages):
        begins.append(begins[-1] + forward[s - 1] + problem.delays[s * m + microbatch])
    back = [begins[-1] + forward[-1] + inputs[-1]]
    for s in reversed(range(stages - 1)):
        back.append(back[-1] + problem.delays[(stages + s) * m + microbatch] + inputs[s])
    return _Path(forward, inputs, weights, begins, back[::-1])


def _rank_bound(problem: Problem, paths: list[_Path], rank: int) -> Number:
    stages = problem.stages_of(rank)
    lowest, highest = stages[0], stages[-1]
    forwards = total(path.forward[s] for path in paths for s in stages)
    gradients = total(path.inputs[s] for path in paths for s in stages)
    weights = total(path.weights[s] for path in paths for s in stages)
    head = min(path.begins[lowest] for path in paths)
    first = min(path.back[highest] - path.inputs[highest] for path in paths)
    after_forwards = gradients + max(weights, _drain(paths, lowest))
    cap = _usable_memory(problem, rank)
    initial_forwards = _max_forward_time([(path.forward[s], problem.sizes[s]) for path in paths for s in stages], cap)
    round_trip = min(path.back[0] + path.weights[0] - path.begins[highest] - path.forward[highest] for path in paths)
    return max(
        head + forwards + max(after_forwards, round_trip),
        first + forwards - initial_forwards + after_forwards,
        head + _memory_bound(problem, paths, rank, cap),
        *(_flow_bound(paths, stage) for stage in stages),
    )


def _flow_bound(paths: list[_Path], stage: int) -> Number:
    """Return the bound of a stage that runs one forward, and one backward, after the other."""
    head = min(path.begins[stage] for path in paths)
    round_trip = min(path.back[0] + path.weights[0] - path.begins[stage] - path.forward[stage] for path in paths)
    first = min(path.back[stage] - path.inputs[stage] for path in paths)
    return max(
        head + total(path.forward[stage] for path in paths) + round_trip,
        first + total(path.inputs[stage] for path in paths) + _drain(paths, stage),
    )


def _memory_bound(problem: Problem, paths: list[_Path], rank: int, cap: Number) -> Number:
    """Return the bound of a rank whose activations must fit under its cap."""
    stages, sizes = problem.stages_of(rank), problem.sizes
    lowest, highest = stages[0], stages[-1]
    bounds: list[Number] = []
    # All activations, until weight gradients end; or until input gradients end, which are followed by the drain.
    until_weights = total(
        sizes[s] * (path.back[s] + path.weights[s] - path.begins[s]) for path in paths for s in stages
    )
    until_inputs = total(sizes[s] * (path.back[s] - path.begins[s]) for path in paths for s in stages)
    bounds += [_quotient(until_weights, cap), _quotient(until_inputs, cap) + _drain(paths, lowest)]
    # A microbatch frees nothing before it has run all its stages here. Of those that have freed nothing, one is the
    # first to have all; at that time the lowest stage of each and the rest of that one are stored.
    rest = total(sizes[s] for s in stages[1:])
    room = cap - rest
    if cap != math.inf and not isinstance(cap, float) and sizes[lowest]:
        room = room // sizes[lowest] * sizes[lowest]
    until_weights = total(min(path.back[s] + path.weights[s] for s in stages) - path.begins[lowest] for path in paths)
    until_inputs = total(path.back[highest] - path.begins[lowest] for path in paths)
    bounds.append(_quotient(until_weights * sizes[lowest], room))
    bounds.append(_quotient(until_inputs * sizes[lowest], room) + _drain(paths, highest))
    return max(bounds)


def _drain(paths: list[_Path], stage: int) -> Number:
    """Return the least time from a stage's last input gradients to the end."""
    return min(path.back[0] - path.back[stage] + path.weights[0] for path in paths)


def _usable_memory(problem: Problem, rank: int) -> Number:
    """Return the memory that a rank can fill: a multiple of the size if all its stages have equal ones."""
    sizes, cap = {problem.sizes[s] for s in problem.stages_of(rank)}, problem.caps[rank]
    (size, *others) = sizes
    if others or not size or cap == math.inf or isinstance(cap, float):
        return cap
    return cap // size * size


def _max_forward_time(items: list[tuple[Number, Number]], cap: Number) -> Number:
    """Return the longest total time of forwards stored at once, given times and sizes; fractional knapsack."""
    result: Number = 0
    room = cap
    for time, size in sorted(items, key=lambda item: _quotient(item[0], item[1]), reverse=True):
        if size >= room:
            return result + (_quotient(time * room, size) if size else time)
        result, room = result + time, room - size
    return result


def _quotient(number: Number, divisor: Number) -> Number:
    """Return the quotient, exact if both are."""
    if not divisor or divisor == math.inf:
        return 0 if divisor or not number else math.inf
    if isinstance(number, float) or isinstance(divisor, float):
        return float(number) / float(divisor)
    return Fraction(number) / Fraction(divisor)
