"""How long a pipeline takes at least, whatever the order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from distir_relax.schedules.search.problem import Problem, total
from distir_relax.schedules.task_times import Number


def lower_bound(problem: Problem) -> Number:
    """No order of this pipeline has a smaller makespan: in the problem's unit, for one with backwards split.

    The largest of these, for each rank; `head` is when its first forward can begin at the earliest, `first` when its
    first input gradients can:

    - *work*: a rank begins at `head`, and has all its tasks to do;
    - *drain*: it has its forwards and input gradients to do, and behind the last of those gradients go on to stage 0,
      which has its weights' to do then;
    - *flow*: it has its forwards to do, all or those of one stage, and behind the last of them that microbatch goes on
      to the last stage and back to stage 0; and likewise input gradients of one stage, from when the first can begin;
    - *start*: before `first` it can do forwards alone, and of these no more than it may keep; all else comes behind;
    - *hold*: a microbatch's activations are kept from the beginning of its forward to the end of its weight gradients,
      which is no shorter than the way there and back; and all of them, one over the other, fit under the cap;
    - *path*: a microbatch goes forward through all stages and back to a stage, where it has its weight gradients done.

    A whole backward is an ``I`` with its ``W`` right behind it: it cannot do better.
    """
    paths = [_path(problem, microbatch) for microbatch in range(problem.shape.microbatches)]
    bounds: list[Number] = [*(_of_rank(problem, paths, rank) for rank in range(problem.shape.ranks))]
    bounds += [end + weights for path in paths for end, weights in zip(path.back, path.weights, strict=True)]
    # Where all times are whole, so is a makespan.
    return max(math.ceil(bound) if isinstance(bound, Fraction) else bound for bound in bounds)


@dataclass(frozen=True, slots=True)
class _Path:
    """One microbatch that waits for no other: times by stage."""

    forward: list[Number]
    inputs: list[Number]
    weights: list[Number]
    begins: list[Number]
    """When its forwards begin."""
    back: list[Number]
    """When its input gradients are there."""


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


def _of_rank(problem: Problem, paths: list[_Path], rank: int) -> Number:
    stages = problem.stages_of(rank)
    lowest, highest = stages[0], stages[-1]
    forwards = total(path.forward[s] for path in paths for s in stages)
    gradients = total(path.inputs[s] for path in paths for s in stages)
    weights = total(path.weights[s] for path in paths for s in stages)
    head = min(path.begins[lowest] for path in paths)
    first = min(path.back[highest] - path.inputs[highest] for path in paths)
    behind = gradients + max(weights, _drain(paths, lowest))
    cap = _usable(problem, rank)
    early = _most_forwards([(path.forward[s], problem.sizes[s]) for path in paths for s in stages], cap)
    onward = min(path.back[0] + path.weights[0] - path.begins[highest] - path.forward[highest] for path in paths)
    return max(
        head + forwards + max(behind, onward),
        first + forwards - early + behind,
        head + _held(problem, paths, rank, cap),
        *(_flow(paths, stage) for stage in stages),
    )


def _flow(paths: list[_Path], stage: int) -> Number:
    """How long it takes at least because a stage does one forward, and one backward, after the other."""
    head = min(path.begins[stage] for path in paths)
    onward = min(path.back[0] + path.weights[0] - path.begins[stage] - path.forward[stage] for path in paths)
    first = min(path.back[stage] - path.inputs[stage] for path in paths)
    return max(
        head + total(path.forward[stage] for path in paths) + onward,
        first + total(path.inputs[stage] for path in paths) + _drain(paths, stage),
    )


def _held(problem: Problem, paths: list[_Path], rank: int, cap: Number) -> Number:
    """How long a rank takes at least because what it keeps fits under the cap."""
    stages, sizes = problem.stages_of(rank), problem.sizes
    lowest, highest = stages[0], stages[-1]
    bounds: list[Number] = []
    # All that is kept, until weight gradients are done; or until those of inputs are, behind which there is more to do.
    until_weights = total(
        sizes[s] * (path.back[s] + path.weights[s] - path.begins[s]) for path in paths for s in stages
    )
    until_inputs = total(sizes[s] * (path.back[s] - path.begins[s]) for path in paths for s in stages)
    bounds += [_over(until_weights, cap), _over(until_inputs, cap) + _drain(paths, lowest)]
    # A microbatch gives nothing back before it has all its stages: of those that have given nothing back one is the
    # first to have all, and then there is room for the lowest stage of each, and for the rest of that one.
    rest = total(sizes[s] for s in stages[1:])
    beside = cap - rest
    if cap != math.inf and not isinstance(cap, float) and sizes[lowest]:
        beside = beside // sizes[lowest] * sizes[lowest]
    until_weights = total(min(path.back[s] + path.weights[s] for s in stages) - path.begins[lowest] for path in paths)
    until_inputs = total(path.back[highest] - path.begins[lowest] for path in paths)
    bounds.append(_over(until_weights * sizes[lowest], beside))
    bounds.append(_over(until_inputs * sizes[lowest], beside) + _drain(paths, highest))
    return max(bounds)


def _drain(paths: list[_Path], stage: int) -> Number:
    """How long there is something to do at least behind a stage's last input gradients."""
    return min(path.back[0] - path.back[stage] + path.weights[0] for path in paths)


def _usable(problem: Problem, rank: int) -> Number:
    """What a rank can fill of its memory: where all its stages keep as much as each other, whole ones alone."""
    sizes, cap = {problem.sizes[s] for s in problem.stages_of(rank)}, problem.caps[rank]
    (size, *others) = sizes
    if others or not size or cap == math.inf or isinstance(cap, float):
        return cap
    return cap // size * size


def _most_forwards(items: list[tuple[Number, Number]], cap: Number) -> Number:
    """The most time that forwards can take which are kept at once: of times and sizes, the last one in part."""
    found: Number = 0
    room = cap
    for time, size in sorted(items, key=lambda item: _over(item[0], item[1]), reverse=True):
        if size >= room:
            return found + (_over(time * room, size) if size else time)
        found, room = found + time, room - size
    return found


def _over(number: Number, divisor: Number) -> Number:
    """The quotient, exact where both are."""
    if not divisor or divisor == math.inf:
        return 0 if divisor or not number else math.inf
    if isinstance(number, float) or isinstance(divisor, float):
        return float(number) / float(divisor)
    return Fraction(number) / Fraction(divisor)
