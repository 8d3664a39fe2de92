"""Cut a sequence such that devices have equal work, although its rows attend to different numbers of keys.

Of a causal mask, the last of two consecutive halves has three quarters of the scores. Devices take turns instead, there
and back: 0, 1, 1, 0 on two devices. Each has its share of the rows, and of the scores of such a mask as well. Of other
masks there may be more turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from distir_relax.cost.roofline import flops
from distir_relax.ir import producers
from distir_relax.layout import Cut, Segment, is_symbolic
from distir_relax.ops import lookup
from distir_relax.strategies.batch_dim import Batch
from distir_relax.strategies.factor_costs import Classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[Any]

_TURNS = (1, 2, 4, 8, 16)
_BALANCED = 1.05
"""The work of the slowest device, relative to the least, that is not worth another turn: each costs copies."""


def balanced_cut(classes: Classes, sequence: Batch, shares: Sequence[float]) -> Cut | None:
    """Return the cut of a sequence for devices with these shares of the work, in units of its class.

    None where consecutive rows are balanced, and where nothing is known of the rows.
    """
    work = _work_by_row(classes, sequence)
    if work is None:
        return None
    until, found = np.concatenate([[0.0], np.cumsum(work)]), list[tuple[float, list[tuple[int, int]]]]()
    for turns in _TURNS:
        order = [rank for turn in range(turns) for rank in range(len(shares))[:: (1, -1)[turn % 2]]]
        fractions = np.cumsum([shares[rank] for rank in order])
        ends = np.rint(fractions / fractions[-1] * len(work)).astype(int)
        sizes = np.diff(ends, prepend=0)
        if min(sizes) < 1:
            break
        loads = np.zeros(len(shares))
        np.add.at(loads, order, np.diff(until[ends], prepend=0.0))
        found.append((float((loads / np.array(shares)).max()), list(zip(order, sizes.tolist(), strict=True))))
    least = min((slowest for slowest, _ in found), default=0.0)
    parts = next((parts for slowest, parts in found if slowest <= _BALANCED * least), [])
    return _cut(parts, len(shares)) if len(parts) > len(shares) else None


def _work_by_row(classes: Classes, sequence: Batch) -> Numbers | None:
    """Return the operations of each row; None if all have the same, as far as is known."""
    if is_symbolic(sequence.size):
        return None
    made = producers(classes.function)
    even, uneven = classes.work[sequence.owner], np.zeros(sequence.size)
    for op in classes.function.ops:
        entry, density = lookup(op.name, op.location), op.attrs.get("density")
        if entry.code.mask is None or not isinstance(density, float):
            continue
        bounds = op.operands[entry.code.mask].name
        array = lookup(made[bounds].name, op.location).semantics.array if bounds in made else None
        if array is not None and classes.of(bounds, 0) == sequence.owner:
            first, end = array(made[bounds].attrs).T
            keys = (end - first).clip(0)
            operations = flops(entry, [v.tensor for v in op.operands], op.attrs, [v.tensor for v in op.results])
            even -= operations
            uneven += operations * density * keys / max(1, keys.sum())
    return max(0.0, even) / sequence.size + uneven if uneven.any() else None


def _cut(parts: Sequence[tuple[int, int]], ranks: int) -> Cut:
    """Return the cut of parts in order, each a rank and its size."""
    joined = [(rank, sum(size for _, size in group)) for rank, group in groupby(parts, key=lambda part: part[0])]
    return Cut(tuple(Segment(1, tuple(size if i == rank else 0 for i in range(ranks))) for rank, size in joined))
