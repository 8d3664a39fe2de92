"""Strides of views, in elements.

Each function takes the shape and the strides of an operand, the attributes of the op and the shape of its result, and
returns the strides of the result. They determine which reshapes copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.ops.table import Attrs, contiguous

Sizes = Sequence[int]


def reshaped(shape: Sizes, strides: Sizes, attrs: Attrs, new: Sizes) -> tuple[int, ...] | None:
    """Return the strides after a reshape; None if no strides fit, so that torch copies.

    Adjacent dims that are contiguous in memory form one block. The new dims must divide blocks, and none may span two
    of them (``computeStride`` in ``aten/src/ATen/TensorUtils.cpp``).
    """
    if 0 in shape:
        return contiguous(new)
    result = [1] * len(new)
    place, new_count, old_count = len(new) - 1, 1, 1
    base = strides[-1] if strides else 1
    for dim in reversed(range(len(shape))):
        old_count *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == old_count * base):
            continue
        while place >= 0 and (new_count < old_count or new[place] == 1):
            result[place] = new_count * base
            new_count *= new[place]
            place -= 1
        if new_count != old_count:
            return None
        if dim:
            base, old_count, new_count = strides[dim - 1], 1, 1
    result[: place + 1] = [base] * (place + 1)
    return tuple(result)


def permuted(shape: Sizes, strides: Sizes, attrs: Attrs, new: Sizes) -> tuple[int, ...]:
    """Return the permuted strides."""
    return tuple(strides[axis] for axis in attrs["axes"])


def expanded(shape: Sizes, strides: Sizes, attrs: Attrs, new: Sizes) -> tuple[int, ...]:
    """Return the strides with 0 for each dim that was broadcast."""
    added = len(new) - len(shape)
    own = (0 if n != size else stride for n, size, stride in zip(shape, new[added:], strides, strict=True))
    return (*(0,) * added, *own)


def sliced(shape: Sizes, strides: Sizes, attrs: Attrs, new: Sizes) -> tuple[int, ...]:
    """Return the strides times the steps of the slice."""
    steps = dict(zip(attrs["axes"], attrs["strides"], strict=True))
    return tuple(stride * abs(steps.get(dim, 1)) for dim, stride in enumerate(strides))


def split(shape: Sizes, strides: Sizes, attrs: Attrs, new: Sizes) -> tuple[int, ...]:
    """Return the strides of the operand, which the parts share."""
    return tuple(strides)
