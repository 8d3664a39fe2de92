"""Windows that follow a formula: resizing to any size, pooling to any size, and where maxima stand.

An op with such windows has attribute `part` where a device works on a piece of a spatial dim. For each spatial dim it
is ``(size of the whole operand's dim, first element held, size of the whole result's dim, first element of the
result)``, or ``()`` where the dim is whole. The runtime's `resample` computes from it what the device has to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.ir import Attribute, TensorType
from distir_relax.ops.registry import Attrs, Types
from distir_relax.runtime.sampling import Sampling, Table, table_of


@dataclass(frozen=True, slots=True)
class SampledWindow:
    """A `Window` whose elements are those that `sampling` says, for data of `dtype`. A part is told by where it lies."""

    index: int
    operand: int
    operand_dim: int
    result_dim: int
    size: int
    result_size: int
    sampling: Sampling
    dtype: str
    is_plain: bool = False

    @property
    def reach(self) -> int:
        """How many elements beside its own one of the result may need."""
        positions = self._table().positions
        return int((positions.max(axis=1) - positions.min(axis=1)).max(initial=0)) if self.size else 0

    def __str__(self) -> str:
        return f"{self.size} elements to {self.result_size}, {self.sampling}"

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """The interval of the operand that the result's elements [start, stop) are made from; (0, 0) for none."""
        if start >= stop or not self.size:
            return 0, 0
        positions = self._table().positions[start:stop]
        return int(positions.min()), int(positions.max()) + 1

    def part(self, start: int, stop: int) -> tuple[int, ...]:
        """Where the result's elements [start, stop) lie, and what they are made from."""
        return self.size, self.reads(start, stop)[0], self.result_size, start

    def _table(self) -> Table:
        return table_of(self.sampling, self.size, self.result_size, self.dtype == "float64")


def sampled_windows(
    x: TensorType, attrs: Attrs, axes: Sequence[int], sizes: Sequence[int], samplings: Sequence[Sampling],
    plain: Sequence[bool],
) -> tuple[SampledWindow, ...]:  # fmt: skip
    """The windows of an op along dims `axes` of `x`, which it makes `sizes` elements; those `plain` are no windows.

    Raises ValueError when a part that the attributes name does not hold just what it needs.
    """
    if not len(axes) == len(sizes) == len(samplings):
        raise ValueError(f"a size for each of {len(axes)} dims")
    if min(sizes, default=0) < 0 or any(size and not x.shape[axis] for axis, size in zip(axes, sizes, strict=True)):
        raise ValueError(f"{tuple(sizes)} elements made from {tuple(x.shape[a] for a in axes)}")
    found = []
    for i, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        if part := parts_of(attrs, len(axes))[i]:
            have, first, want, start = part
            reads = SampledWindow(i, 0, axis, axis, have, want, samplings[i], x.dtype).reads(start, start + size)
            if reads != (first, first + x.shape[axis]):
                raise ValueError(f"elements {start} to {start + size} of dim {axis} need {reads}, found {part}")
        found.append(SampledWindow(i, 0, axis, axis, x.shape[axis], size, samplings[i], x.dtype, plain[i]))
    return tuple(found)


def parts_of(attrs: Attrs, dims: int) -> tuple[tuple[int, ...], ...]:
    """The part of each of `dims` dims that a device works on; ``()`` for a dim that is whole."""
    found: tuple[tuple[int, ...], ...] = attrs.get("part", ((),) * dims)
    return found


def set_part(dims: int) -> Any:
    """The `OpDef.windowed` of an op with `dims` windows."""

    def windowed(attrs: Attrs, parts: Mapping[int, tuple[int, ...]]) -> dict[str, Attribute]:
        found = list(parts_of(attrs, dims))
        for i, part in parts.items():
            found[i] = part
        return {**attrs, "part": tuple(found)}

    return windowed


def local_size(key: str) -> Any:
    """A `localize` that sets attribute `key` to the sizes of the result's spatial dims."""
    return lambda attrs, types, results: {**attrs, key: results[0].shape[2:]}


def over_parts(attrs: Attrs, function: str, sampling: str, sizes: Sequence[int]) -> tuple[str, bool]:
    """The operand with each spatial dim that a device has a part of made by `resample`'s `function`; whether that is all."""
    text, parts = "{0}", parts_of(attrs, len(sizes))
    for i, part in enumerate(parts):
        if part:
            text = f"resample.{function}({text}, {i + 2}, {sampling}, {sizes[i]}, {part!r})"
    return text, all(parts)


def keeps(types: Types, sizes: Sequence[int]) -> list[bool]:
    """For each spatial dim, whether it keeps its size."""
    return [have == want for have, want in zip(types[0].shape[2:], sizes, strict=False)]
