"""Split growing states of a program that continues a sequence, such as keys and values, by position.

The positions that a state may have at most are cut into one block for each device. A device has those positions of its
block that there are so far: of a short sequence the first device has all. So no position ever moves, and those of a
block are appended where they stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from distir_relax.ir import CachedState, Module
from distir_relax.layout import Cut, Shard, minimum, multiple_of_symbol
from distir_relax.layout.partition import proportional
from distir_relax.sharding.named_annotations import Mark
from distir_relax.strategies.strategy import Strategy


def state_marks(module: Module, strategy: Strategy, shares: Sequence[float], number: int) -> Mapping[str, Mark]:
    """Return annotations of round `number` for the growing states, by name; states without a bound stay whole.

    Devices have their `shares` of the positions. Other axes are left to propagation.
    """
    states = {item.value.name: item.value.tensor.shape for item in module.main.inputs}
    marks: dict[str, Mark] = {}
    for record in module.records:
        if not isinstance(record, CachedState) or not record.grows:
            continue
        size = states[record.input][record.dim]
        symbol, factor = multiple_of_symbol(size) or (None, 0)
        if symbol is None or symbol.high is None or factor > 1:
            continue
        # The last call appends one position at least.
        *ends, _ = accumulate(proportional(symbol.high + 1, shares))
        bounds = [0, *(minimum(size, end) for end in ends), size]
        cut = Cut.of(*(b - a for a, b in pairwise(bounds)))
        placements = strategy.layout(context=Shard(record.dim, cut))
        marks[record.input] = Mark(f"strategy {strategy}", placements, number, open=True)
    return marks
