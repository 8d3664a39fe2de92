"""Windows that follow a formula: resizing, adaptive pooling, and indices of maxima.

An op with such windows (`SampledWindow`) has attribute `part` where a device computes a part of a spatial dim. For each
spatial dim it is ``(size of the whole operand's dim, first local element, size of the whole result's dim, first element
of the result)``, or ``()`` where the dim is whole. `distir_relax.kernels.resample` computes the local result from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.ir import Attribute, TensorType
from distir_relax.kernels.sampling import Sampling
from distir_relax.ops.table import Attrs, SampledWindow, Types


def sampled_windows(
    x: TensorType, attrs: Attrs, axes: Sequence[int], sizes: Sequence[int], samplings: Sequence[Sampling],
    plain: Sequence[bool],
) -> tuple[SampledWindow, ...]:  # fmt: skip
    """Return the windows of an op that resizes dims `axes` of `x` to `sizes`; `plain` marks dims without a window.

    Raises ValueError if a part in the attributes does not have exactly the elements it needs.
    """
    if not len(axes) == len(sizes) == len(samplings):
        raise ValueError(f"expected a size for each of {len(axes)} dims")
    if any(size < 0 for size in sizes) or any(
        size and not x.shape[axis] for axis, size in zip(axes, sizes, strict=True)
    ):
        raise ValueError(f"{tuple(sizes)} elements made from {tuple(x.shape[a] for a in axes)}")
    windows = []
    for i, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        if part := parts_of(attrs, len(axes))[i]:
            have, first, want, start = part
            reads = SampledWindow(i, 0, axis, axis, have, want, samplings[i], x.dtype).reads(start, start + size)
            if reads != (first, first + x.shape[axis]):
                raise ValueError(f"elements {start} to {start + size} of dim {axis} need {reads}, found {part}")
        windows.append(SampledWindow(i, 0, axis, axis, x.shape[axis], size, samplings[i], x.dtype, plain[i]))
    return tuple(windows)


def parts_of(attrs: Attrs, dims: int) -> tuple[tuple[int, ...], ...]:
    """Return the device's part of each of `dims` dims; ``()`` for a dim that is whole."""
    parts: tuple[tuple[int, ...], ...] = attrs.get("part", ((),) * dims)
    return parts


def set_part(dims: int) -> Any:
    """Return the `Split.windowed` of an op with `dims` windows."""

    def windowed(attrs: Attrs, parts: Mapping[int, tuple[int, ...]]) -> dict[str, Attribute]:
        result = list(parts_of(attrs, dims))
        for i, part in parts.items():
            result[i] = part
        return {**attrs, "part": tuple(result)}

    return windowed


def local_size(key: str) -> Any:
    """Return a `localize` that sets attribute `key` to the sizes of the result's spatial dims."""
    return lambda attrs, types, results: {**attrs, key: results[0].shape[2:]}


def over_parts(attrs: Attrs, function: str, sampling: str, sizes: Sequence[int]) -> tuple[str, bool]:
    """Return the expression with partial dims computed by `function` of `resample`, and whether all are partial."""
    text, parts = "{0}", parts_of(attrs, len(sizes))
    for i, part in enumerate(parts):
        if part:
            text = f"resample.{function}({text}, {i + 2}, {sampling}, {sizes[i]}, {part!r})"
    return text, all(parts)


def keeps(types: Types, sizes: Sequence[int]) -> list[bool]:
    """Return for each spatial dim whether it keeps its size."""
    return [have == want for have, want in zip(types[0].shape[2:], sizes, strict=False)]
