"""Positions of elements, and how ops change them that move elements along dims.

A tensor has a vector of numbers for each of its dims. The number of the element at (i, j) is the sum of entry i of the
first vector and entry j of the second. Of a tensor with dims of 3 and 4 elements, the vectors 0, 4, 8 and 0, 1, 2, 3
number the elements from 0 to 11; its columns 1 and 3 have the vectors 0, 4, 8 and 1, 3.

`Semantics.moved` gives the vectors of the result of such an op. It says what the op does with any tensor, in far fewer
numbers: `distir_relax.proof` follows by it which elements of the model's tensors each device holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.int64]
Positions = list[Vector]
"""The vector of each dim of a tensor."""
Moved = Callable[[Sequence[Positions], Mapping[str, Any]], list[Positions]]
"""From the positions of the operands and the attributes those of the results; for a collective, from those of the
operand on each device along the axis those of its result on each. Raises ValueError if they are not sums of vectors."""

PADDING = -(1 << 50)
"""The number of elements that an op adds; with any other number, the sum is negative, too."""


def replaced(positions: Sequence[Vector], dim: int, vector: Vector) -> Positions:
    """Return positions with another vector of one dim."""
    return [*positions[:dim], vector, *positions[dim + 1 :]]


def chosen(positions: Sequence[Vector], dim: int, parts: Sequence[tuple[int, int]]) -> Positions:
    """Return the positions of the intervals `parts` of a dim, one after the other."""
    none = positions[dim][:0]
    return replaced(positions, dim, np.concatenate([none, *(positions[dim][a:b] for a, b in parts)]))


def parts_of(positions: Sequence[Vector], dim: int, sizes: Sequence[int]) -> list[Positions]:
    """Return the positions of the parts of a dim, of these sizes; ValueError unless they add up to it."""
    if sum(sizes) != len(positions[dim]):
        raise ValueError(f"sizes {tuple(sizes)} do not add up to the {len(positions[dim])} elements of dim {dim}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [chosen(positions, dim, [(end - size, end)]) for end, size in zip(ends, sizes, strict=True)]


def concatenated(parts: Sequence[Positions], dim: int) -> Positions:
    """Return the positions of tensors that are concatenated along `dim`.

    ValueError if other dims differ by more than a number, which is added to those of `dim`.
    """
    vectors = []
    first = next((part for part in parts if len(part[dim])), parts[0])
    for part in parts:
        vector = part[dim]
        for other, (a, b) in enumerate(zip(part, first, strict=True)):
            if len(vector) and other != dim and not np.array_equal(a, b):
                if len(a) != len(b) or not np.array_equal(a - a[0], b - b[0]) or min(a.min(), b.min()) < 0:
                    raise ValueError(f"the parts are not the same but for dim {dim}")
                vector = np.where(vector < 0, vector, vector + (a[0] - b[0]))
        vectors.append(vector)
    return replaced(first, dim, np.concatenate(vectors))


def widened(positions: Sequence[Vector], low: Sequence[int], high: Sequence[int]) -> Positions:
    """Return positions with `low` and `high` elements of padding at the ends of each dim; fewer if negative."""
    return [
        np.concatenate(
            [np.full(max(a, 0), PADDING), vector[max(-a, 0) : len(vector) + min(z, 0)], np.full(max(z, 0), PADDING)]
        )
        for vector, a, z in zip(positions, low, high, strict=True)
    ]


def reshaped(positions: Sequence[Vector], shape: Sequence[int]) -> Positions:
    """Return the positions of a tensor in another shape; ValueError if they are not sums of vectors there."""
    sizes = [len(vector) for vector in positions]
    if math.prod(sizes) != math.prod(shape):
        raise ValueError(f"{sizes} elements do not fit into {shape}")
    if not math.prod(shape):
        return _of_nothing(positions, shape)
    result: Positions = []
    i = j = 0
    while i < len(sizes) or j < len(shape):
        # The fewest dims on both sides that have as many elements.
        before, after = i, j
        have = want = 1
        while True:
            if have <= want and i < len(sizes):
                have, i = have * sizes[i], i + 1
            elif j < len(shape):
                want, j = want * shape[j], j + 1
            if have == want and (j > after or j == len(shape)) and (i > before or i == len(sizes)):
                break
        result += _divided(_joined(positions[before:i]), shape[after:j])
    return result


def _of_nothing(positions: Sequence[Vector], shape: Sequence[int]) -> Positions:
    """Return the positions of a tensor without elements in another shape: its first and last dims may stay."""
    count = min(len(positions), len(shape))
    first = next((i for i in range(count) if len(positions[i]) != shape[i]), count)
    last = next((i for i in range(count - first) if len(positions[-1 - i]) != shape[-1 - i]), count - first)
    middle = [np.zeros(size, np.int64) for size in shape[first : len(shape) - last]]
    return [*positions[:first], *middle, *positions[len(positions) - last :]]


def _joined(vectors: Sequence[Vector]) -> Vector:
    """Return the numbers of all elements of some dims, in order."""
    return reduce(lambda a, b: (a[:, None] + b).reshape(-1), vectors, np.zeros(1, np.int64))


def _divided(vector: Vector, shape: Sequence[int]) -> Positions:
    """Return vectors whose sums are a vector in `shape`; ValueError if there are none."""
    table = vector.reshape(tuple(shape))
    first = int(table.flat[0])
    vectors = [np.moveaxis(table, dim, 0).reshape(size, -1)[:, 0] - first for dim, size in enumerate(shape)]
    if not vectors:
        return []
    vectors[0] = vectors[0] + first
    if not np.array_equal(_joined(vectors), vector):
        raise ValueError(f"the elements of a dim are in no order of {tuple(shape)}")
    return vectors
