"""Division of query heads between ranks, and the key/value heads that the query heads of each rank read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from distir_relax.layout.partition import balanced

_TOLERANCE = 1e-6
"""Relative difference of costs that counts as none."""


@dataclass(frozen=True, slots=True)
class HeadDivision:
    """Division of query heads: each rank has `sizes` of them, consecutive ones. `each` of them read one key/value head.

    Key/value heads that several ranks read are copied: `copies` are the heads of all ranks in turn, and `queries` the
    number of query heads that read each copy.
    """

    sizes: tuple[int, ...]
    each: int

    @property
    def read(self) -> tuple[range, ...]:
        """The key/value heads that each rank reads."""
        bounds = pairwise(accumulate(self.sizes, initial=0))
        return tuple(range(a // self.each, -(-b // self.each) if a < b else a // self.each) for a, b in bounds)

    @property
    def copies(self) -> tuple[int, ...]:
        """The key/value heads of all ranks in turn."""
        return tuple(head for part in self.read for head in part)

    @property
    def queries(self) -> tuple[int, ...]:
        """The number of query heads that read each copy."""
        counts = []
        for (start, stop), read in zip(pairwise(accumulate(self.sizes, initial=0)), self.read, strict=True):
            counts += [min(stop, (head + 1) * self.each) - max(start, head * self.each) for head in read]
        return tuple(counts)

    def slowest(self, query_cost: float, group_cost: float) -> float:
        """Return the cost of the slowest rank, from those of a query head and of a key/value head."""
        read = self.read
        return max(query_cost * n + group_cost * len(part) for n, part in zip(self.sizes, read, strict=True))


def divide_heads(heads: int, groups: int, ranks: int, query_cost: float, group_cost: float) -> HeadDivision:
    """Return the division of `heads` query heads, of `groups` key/value heads, with the least cost of the slowest rank.

    Ranks cost `query_cost` for each query head, and `group_cost` for each key/value head that those read. Groups stay
    whole if no other division is better, and ranks get equal numbers if no further one is.
    """
    each = heads // groups
    best = HeadDivision(tuple(each * count for count in balanced(groups, ranks)), each)
    for sizes in (balanced(heads, ranks), _fill_ranks(heads, each, ranks, query_cost, group_cost)):
        division = HeadDivision(sizes, each)
        if division.slowest(query_cost, group_cost) < best.slowest(query_cost, group_cost) * (1 - _TOLERANCE):
            best = division
    return best


@lru_cache(maxsize=256)
def _fill_ranks(heads: int, each: int, ranks: int, query_cost: float, group_cost: float) -> tuple[int, ...]:
    """Return the sizes with the least cost of the slowest rank: one rank after the other gets what that cost allows."""

    def within(limit: float) -> tuple[int, ...]:
        """Return sizes of at most this cost; none if ranks do not suffice."""
        sizes, start = [], 0
        for _ in range(ranks):
            stop = start
            while stop < heads and query_cost * (stop + 1 - start) + group_cost * (
                stop // each - start // each + 1
            ) <= (limit * (1 + _TOLERANCE)):
                stop += 1
            sizes.append(stop - start)
            start = stop
        return tuple(sizes) if start == heads else ()

    # n query heads read at least n / each key/value heads, and at most one more than the next whole number.
    limits = sorted({query_cost * n + group_cost * k for n in range(1, heads + 1) for k in range(1, n // each + 3)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if within(limits[middle]) else (middle + 1, high)
    return within(limits[low])
