"""Repeated sequences of ops, as candidates for outlining of models without module names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distir_relax.ir import Function
from distir_relax.ir.outline import print_attributes

_MOST_RUNS = 8
_MOST_PERIODS = 8


def find_repeats(function: Function, min_ops: int) -> list[list[range]]:
    """Return runs of consecutive repeated blocks of at least `min_ops` ops: for each block the numbers of its ops.

    Ops are compared by name, attributes and types; the caller checks the blocks' operands. Blocks begin where the
    fewest values are live.
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
    live = _live_values(function)
    runs = []
    for _ in range(_MOST_RUNS):
        repeat = _longest(tokens)
        if repeat is None:
            break
        period, start, length = repeat
        if period >= min_ops:
            offset = min(range(length - period + 1), key=lambda o: (live[start + o], o))
            offset %= period
            begin = start + offset
            runs.append([range(b, b + period) for b in range(begin, start + length - period + 1, period)])
        for i in range(start, start + length):
            tokens[i] = -1 - i  # Distinct from all tokens.
    return runs


def _live_values(function: Function) -> list[int]:
    """Return for each op the number of earlier results that it or a later op uses."""
    defined: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, op in enumerate(function.ops):
        last.update((v.name, number) for v in op.operands)
        defined.update((v.name, number) for v in op.results)
    last.update((o.value.name, len(function.ops)) for o in function.outputs)
    change = [0] * (len(function.ops) + 2)
    for name, number in defined.items():
        if name in last:
            change[number + 1] += 1
            change[last[name] + 1] -= 1
    live, count = [], 0
    for delta in change:
        count += delta
        live.append(count)
    return live


def _longest(tokens: Sequence[int]) -> tuple[int, int, int] | None:
    """Return period, start and length of the longest interval that repeats at least once."""
    last_position: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, token in enumerate(tokens):
        if token in last_position:
            distances[i - last_position[token]] += 1
        last_position[token] = i
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
