"""The placements that need least memory, where none need as little as there is.

To ask for the least peak alone says nothing about what is below it: solutions put whatever they like there, until it is
a peak itself. So all that ever lives counts too, a little, and the linear relaxation says when no peak could be less.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from distir_relax.autosharding.constraints import Found, Rows

_ALL = 1e-2
"""What all that lives counts in placements where it is least, as a part of their peak."""
_NEAR = 1e-3
"""How near to the least that any placements need it has to be."""


def least_memory(rows: Rows) -> tuple[Found, bool]:
    """Ways with which no device needs more than with any others, or hardly more; whether it is sure of that."""
    held = rows.needs.all() / rows.memory
    largest = float(held.max(initial=1.0))
    smallest = replace(rows, memory=math.inf, costs=held / largest, paths={}).relaxed()
    if smallest.x is None or not smallest.most:
        return smallest, smallest.x is not None and rows.is_whole(smallest)
    costs = held * _ALL / float(held @ smallest.x[: len(held)])
    both = replace(rows, costs=costs, price=rows.memory / smallest.most)
    found = both.near(both.relaxed())
    alone = replace(both, costs=np.zeros(len(held)))
    if found.x is None:
        sure = alone.whole(_NEAR)
        return sure, not sure.is_out_of_time
    relaxed, most = alone.bounded(), found.most / smallest.most
    # What needs less than what is found has none of the others.
    allowed = relaxed.reduced <= most - relaxed.value
    if most <= relaxed.bound * (1 + _NEAR) or most <= alone.bounded(_NEAR / 2, allowed).bound * (1 + _NEAR):
        return found, True
    sure = alone.whole(_NEAR, allowed)
    return (sure if sure.x is not None and sure.most < found.most else found), not sure.is_out_of_time
