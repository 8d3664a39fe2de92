"""Def-use queries: producers, use counts, and liveness of ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from distir_relax.ir.program import Function, Op


def count_uses(function: Function) -> Counter[str]:
    """Count the uses of each value, by name: as an operand of an op, or as an output."""
    counts = Counter(v.name for op in function.ops for v in op.operands)
    counts.update(output.value.name for output in function.outputs)
    return counts


def value_names(function: Function) -> set[str]:
    """Return the names of all values of a function."""
    return {item.value.name for item in function.inputs} | {v.name for op in function.ops for v in op.results}


def producers(function: Function) -> dict[str, Op]:
    """Return the op that defines each value, by name; inputs have none."""
    return {v.name: op for op in function.ops for v in op.results}


def dependents(function: Function, names: Iterable[str]) -> set[str]:
    """Return the values that depend on one of the values `names`, including those themselves."""
    found = set(names)
    for op in function.ops:
        if any(v.name in found for v in op.operands):
            found.update(v.name for v in op.results)
    return found


def live_ops(function: Function, keep: Callable[[Op], bool] = lambda op: False) -> tuple[Op, ...]:
    """Return the ops that an output or a `keep` op depends on, including those themselves, in order."""
    return required_ops(function.ops, (output.value.name for output in function.outputs), keep)


def required_ops(
    ops: Sequence[Op], names: Iterable[str], keep: Callable[[Op], bool] = lambda op: False
) -> tuple[Op, ...]:
    """Return the subset of `ops` that the values `names` or a `keep` op depend on, in order."""
    required = set(names)
    live = []
    for op in reversed(ops):
        if keep(op) or any(v.name in required for v in op.results):
            required.update(v.name for v in op.operands)
            live.append(op)
    return tuple(reversed(live))
