"""Two factors of an op that are split along one mesh axis: devices exchange their parts of the second (`Split.ring`).

Of attention these are rows and keys. A device computes its rows with its own keys, while those of another device
arrive; then with these, while the next ones do. At distance `d` it has the part of the device that is `d` further along
the axis, counted around its end (Liu et al., Ring Attention, 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.ir import Size, Value
from distir_relax.layout.cut import Interval
from distir_relax.ops.table.expansion import Expansion

Held = tuple[tuple[Interval, ...], ...]
"""The elements of a dim that each index along an axis has, as intervals in order."""


@dataclass(frozen=True)
class Ring:
    """The factor that may be split along the axis of another, and the ops that devices run then.

    No tensor has both factors. `work` is the work of all devices relative to that of the op.
    """

    factor: str
    expand: Callable[[RingExpansion], tuple[Value, ...]]
    work: float


@dataclass(frozen=True)
class RingExpansion(Expansion):
    """An op whose first factor, and second one as of `Ring`, are split along one mesh axis.

    `parts` and `local_size` are those of the second.
    """

    first: Held
    """The elements of the first factor that each index has."""
    second: Held
    """Those of the second."""
    arrays: tuple[Any, ...]
    """For each operand its elements as a numpy array, None if they are not known."""
    by_index: Callable[[tuple[int, ...]], Size]
    """Returns a number for each device, from those for each index along the axis."""

    @property
    def count(self) -> int:
        """The number of devices that exchange parts."""
        return len(self.second)

    def fetched(self, value: Value, dim: int, distance: int, needed: Sequence[bool]) -> Value:
        """Return the part at a distance of a value that has the second factor along `dim`.

        It is empty on the indices that do not need it.
        """
        sizes = self._sizes(distance)
        return self._moved(
            value, dim, distance, [n if is_needed else 0 for n, is_needed in zip(sizes, needed, strict=True)]
        )

    def returned(self, value: Value, dim: int, distance: int, needed: Sequence[bool]) -> Value:
        """Return results for the part at a distance to its owner; the inverse of `fetched`."""
        sizes = self._sizes(0)
        back = [needed[(index - distance) % self.count] for index in range(self.count)]
        return self._moved(
            value, dim, -distance, [n if is_needed else 0 for n, is_needed in zip(sizes, back, strict=True)]
        )

    def added(self, value: Value, other: Value, dim: int) -> Value:
        """Return `value` with `other` added, which has either all of its elements along `dim`, or none."""
        count, size = self.shape(other)[dim], self.shape(value)[dim]
        if count == size:
            return self._sum(value, other)
        first, rest = (
            self.emit("strided_slice", value, axes=(dim,), begin=(begin,), end=(end,), strides=(1,))
            for begin, end in ((0, count), (count, size))
        )
        both: Value = self.emit("concat", self._sum(first, other), rest, axis=dim)
        return both

    def numbered(self, positions: Value, distance: int) -> Value:
        """Return positions in the whole dim as positions in the part at a distance: the elements of it before them."""
        intervals = [self.second[(index + distance) % self.count] for index in range(self.count)]
        most = max(map(len, intervals))
        if not most:
            return positions
        filled = [(*held, *[(0, 0)] * (most - len(held))) for held in intervals]
        found: Value | None = None
        for held in zip(*filled, strict=True):
            inside = self.emit("subtract", positions, self._constant([start for start, _ in held]))
            if most > 1:
                inside = self.emit("maximum", inside, self._constant([0] * self.count))
                inside = self.emit("minimum", inside, self._constant([stop - start for start, stop in held]))
            found = inside if found is None else self._sum(found, inside)
        assert found is not None
        return found

    def _sum(self, value: Value, other: Value) -> Value:
        total: Value = self.emit("add", value, other)
        return total

    def _sizes(self, distance: int) -> list[int]:
        """Return the number of elements of the part at a distance from each index."""
        held = (self.second[(index + distance) % self.count] for index in range(self.count))
        return [sum(stop - start for start, stop in intervals) for intervals in held]

    def _moved(self, value: Value, dim: int, distance: int, sizes: Sequence[int]) -> Value:
        """Return what the index at a distance sends: as many elements as `sizes` has for the receiving index."""
        pieces = [[0] * self.count for _ in range(self.count)]
        for index, received in enumerate(sizes):
            pieces[(index + distance) % self.count][index] = received
        size, sent = (self.by_index(tuple(n)) for n in (sizes, map(sum, pieces)))
        if sent != self.shape(value)[dim]:
            # Nobody needs the part of some index.
            value = self.emit("strided_slice", value, axes=(dim,), begin=(0,), end=(sent,), strides=(1,))
        rows = tuple(map(tuple, pieces))
        moved: Value = self.emit("resplit", value, axis=self._axis, dim=dim, pieces=rows, size=size)
        return moved

    def _constant(self, numbers: Sequence[int]) -> Value:
        constant: Value = self.emit("constant", value=self.by_index(tuple(numbers)), dtype="int64")
        return constant

    @property
    def _axis(self) -> str:
        return self.parts[0][0]
