"""Blocks found by the ops alone: a sequence of ops that comes again and again, one time right after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distir_relax.ir import Function
from distir_relax.ir.outline import print_attributes

_MOST_RUNS = 8
_MOST_PERIODS = 8


def repeats(function: Function, least: int) -> list[list[range]]:
    """Runs of blocks of at least `least` ops that follow each other: for each block the numbers of its ops.

    Ops are compared by name, attributes and types; that the blocks' operands agree is for the caller to see. Blocks
    begin where the fewest values pass from one to the next.
    """
    numbers: dict[object, int] = {}
    tokens = [
        numbers.setdefault(
            (
                op.name,
                print_attributes(op),
                tuple(v.type for v in op.operands),
                tuple(v.type for v in op.results),
            ),
            len(numbers),
        )
        for op in function.ops
    ]
    passing = _passing(function)
    runs = []
    for _ in range(_MOST_RUNS):
        found = _longest(tokens)
        if found is None:
            break
        period, start, length = found
        if period >= least:
            offset = min(range(length - period + 1), key=lambda o: (passing[start + o], o))
            offset %= period
            begin = start + offset
            runs.append([range(b, b + period) for b in range(begin, start + length - period + 1, period)])
        for i in range(start, start + length):
            tokens[i] = -1 - i  # Unlike any other.
    return runs


def _passing(function: Function) -> list[int]:
    """How many values made by ops before each op are used by it or by later ones."""
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, op in enumerate(function.ops):
        last.update((v.name, number) for v in op.operands)
        made.update((v.name, number) for v in op.results)
    last.update((o.value.name, len(function.ops)) for o in function.outputs)
    change = [0] * (len(function.ops) + 2)
    for name, number in made.items():
        if name in last:
            change[number + 1] += 1
            change[last[name] + 1] -= 1
    passing, count = [], 0
    for delta in change:
        count += delta
        passing.append(count)
    return passing


def _longest(tokens: Sequence[int]) -> tuple[int, int, int] | None:
    """The period, the start and the length of the longest stretch that repeats itself at least once."""
    seen: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, token in enumerate(tokens):
        if token in seen:
            distances[i - seen[token]] += 1
        seen[token] = i
    best: tuple[int, int, int] | None = None
    for period, _ in distances.most_common(_MOST_PERIODS):
        start = 0
        for i in range(len(tokens) - period + 1):
            if i + period < len(tokens) and tokens[i] == tokens[i + period]:
                continue
            length = i - start
            if length >= period and (best is None or (length + period, -period) > (best[2], -best[0])):
                best = (period, start, length + period)
            start = i + 1
    return best
