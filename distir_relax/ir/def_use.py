"""Who makes a value, who uses it, and what nobody needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from distir_relax.ir.program import Function, Op


def count_uses(function: Function) -> Counter[str]:
    """How often each value is used, by name: as an operand of an op, or as an output."""
    found = Counter(v.name for op in function.ops for v in op.operands)
    found.update(output.value.name for output in function.outputs)
    return found


def value_names(function: Function) -> set[str]:
    """The names of all values of a function: what a new one must not be called."""
    return {item.value.name for item in function.inputs} | {v.name for op in function.ops for v in op.results}


def makers(function: Function) -> dict[str, Op]:
    """The op that makes each value, by name; inputs have none."""
    return {v.name: op for op in function.ops for v in op.results}


def live_ops(function: Function, keep: Callable[[Op], bool] = lambda op: False) -> tuple[Op, ...]:
    """The ops that reach an output, or are to `keep` whatever reaches them, with all that these need; in order."""
    return needed_ops(function.ops, (output.value.name for output in function.outputs), keep)


def needed_ops(
    ops: Sequence[Op], names: Iterable[str], keep: Callable[[Op], bool] = lambda op: False
) -> tuple[Op, ...]:
    """Those of `ops` that the values called `names` need, or that are to `keep`, with all that these need; in order."""
    needed = set(names)
    found = []
    for op in reversed(ops):
        if keep(op) or any(v.name in needed for v in op.results):
            needed.update(v.name for v in op.operands)
            found.append(op)
    return tuple(reversed(found))
