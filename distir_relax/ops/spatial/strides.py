"""Attributes of windows with strides (padding, strides, dilation), and their conversion from frameworks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.ir import Attribute, TensorType, Value
from distir_relax.ops.table import GATHER, Attrs, Builder, StridedWindow, reshape_to


def strided_windows(
    x: TensorType, attrs: Attrs, kernel: Sequence[int], kind: str = GATHER
) -> tuple[StridedWindow, ...]:
    """Return the window along each spatial dim of `x`, dims 2 and up; `attrs` may lack a dilation."""
    count = spatial_rank(attrs)
    dilation = attrs.get("dilation", (1,) * count)
    return tuple(
        StridedWindow(
            i, 0, i + 2, i + 2, x.shape[i + 2], kernel[i], attrs["strides"][i], dilation[i],
            attrs["padding"][i], attrs["padding"][i + count], kind,
        )
        for i in range(count)
    )  # fmt: skip


def set_padding(attrs: Attrs, ends: Mapping[int, Sequence[int]]) -> dict[str, Attribute]:
    """Return the attributes with other padding of some spatial dims: the `Split.windowed` of these ops."""
    padding, count = list(attrs["padding"]), spatial_rank(attrs)
    for i, (low, high) in ends.items():
        padding[i], padding[i + count] = low, high
    return {**attrs, "padding": tuple(padding)}


def torch_widths(low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
    """Return the argument of `F.pad` for the last dims: the last dim first."""
    return tuple(n for pair in reversed(list(zip(low, high, strict=True))) for n in pair)


def ends(attrs: Attrs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding at the low ends and at the high ends."""
    count = spatial_rank(attrs)
    return tuple(attrs["padding"][:count]), tuple(attrs["padding"][count:])


def spatial_rank(attrs: Attrs) -> int:
    """Return the number of spatial dims of the op, by its padding."""
    return len(attrs["padding"]) // 2


def per_dim(value: Any, count: int) -> tuple[int, ...]:
    """Return a number for each of `count` spatial dims, from one for all or one for each."""
    numbers = [value] if isinstance(value, int) else list(value)
    return tuple(int(n) for n in (numbers * count if len(numbers) == 1 else numbers))


def batched(g: Builder, x: Value, count: int, convert: Any) -> Any:
    """Return `convert(x)`, with a temporary batch dim if `x` has none."""
    if len(x.tensor.shape) == count + 2:
        return convert(x)
    y = convert(reshape_to(g, x, (1, *x.tensor.shape)))
    return reshape_to(g, y, y.tensor.shape[1:])


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a plane of `sizes`, in elements."""
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def relax_padding(padding: Any, count: int) -> tuple[int, ...]:
    """Return Relax's padding, given as one number, one for each dim, or one for each end."""
    numbers = per_dim(padding, count)
    return numbers if len(numbers) == 2 * count else (*numbers, *numbers)


def permute_layout(g: Builder, x: Value, layout: str | None, order: str) -> Value:
    """Permute `x` from the dims named by `layout` (``NHWC``) to those of `order` (``NCHW``).

    Raises NotImplementedError for a layout with other letters, such as a blocked one (``NCHW4c``).
    """
    layout = layout or order
    if sorted(layout) != sorted(order):
        raise NotImplementedError(f"the layout {layout}; expected the letters of {order} in any order")
    axes = tuple(layout.index(letter) for letter in order)
    return x if layout == order else g.emit("permute_dims", x, axes=axes)


def channels_first(g: Builder, x: Value, layout: str | None, out_layout: str | None, count: int, convert: Any) -> Any:
    """Return `convert(x)` with `x` of this Relax layout permuted to ``NC`` first, and the result to `out_layout`."""
    order = "NC" + "DHW"[3 - count :]
    return permute_layout(g, convert(permute_layout(g, x, layout, order)), order, out_layout or layout or order)


def onnx_windows(x: Value, kernel: Sequence[int], attrs: Attrs) -> dict[str, tuple[int, ...]]:
    """Return the strides, dilation and padding of an ONNX op with windows over `x`."""
    count = len(kernel)
    strides, dilation = (tuple(attrs.get(key, (1,) * count)) for key in ("strides", "dilations"))
    padding, how = tuple(attrs.get("pads", (0,) * 2 * count)), attrs.get("auto_pad", "NOTSET")
    if how.startswith("SAME"):
        sizes = zip(x.tensor.shape[2:], kernel, strides, dilation, strict=True)
        total = [max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n) for n, k, s, d in sizes]
        padding = distribute_padding(total, how)
    return {"strides": strides, "dilation": dilation, "padding": padding}


def distribute_padding(total: Sequence[int], how: str) -> tuple[int, ...]:
    """Distribute padding to both ends of each dim; the odd element goes to the high end if `how` is upper."""
    less, more = tuple(n // 2 for n in total), tuple(n - n // 2 for n in total)
    return (*less, *more) if how == "SAME_UPPER" else (*more, *less)
