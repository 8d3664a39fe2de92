"""Gradients of pooling: an average distributes its gradient, a maximum passes it to the selected element."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.spatial.strides import ends, row_major, spatial_rank, strided_windows
from distir_relax.ops.spatial.window_ops import window_sizes
from distir_relax.ops.table import SCATTER, Backward, broadcast_to, reshape_to


def average_pool_gradient(b: Backward) -> Value:
    """Sum the shares of each element over the windows that contain it."""
    count, pool = spatial_rank(b.attrs), b.attrs["pool_size"]
    share = b.emit("multiply", _rescale_to_full_windows(b), b.number(1.0 / math.prod(pool)))
    low, sizes = ends(b.attrs)[0], b.x().tensor.shape[2:]
    geometry = {"strides": b.attrs["strides"], "padding": (0,) * 2 * count}
    full = window_sizes(strided_windows(share.tensor, geometry, pool, SCATTER))
    high = tuple(n - first - size for n, first, size in zip(full, low, sizes, strict=True))
    if pool == b.attrs["strides"]:
        # Windows do not overlap; elements after the last window are in none.
        cut = tuple(max(n, 0) for n in high)
        y: Value = b.emit("nn.upsample_nearest", share, strides=pool, padding=(*low, *cut))
        rest = tuple(max(-n, 0) for n in high)
        none = (0,) * (count + 2)
        return b.emit("pad", y, low=none, high=(0, 0, *rest), value=0.0) if any(rest) else y
    channels = share.tensor.shape[1]
    ones = broadcast_to(b.g, b.number(1.0), (channels, 1, *pool))
    geometry |= {"padding": (*low, *high), "dilation": (1,) * count}
    return b.emit(f"nn.conv{count}d_transpose", share, ones, groups=channels, **geometry)  # type: ignore[no-any-return]


def _rescale_to_full_windows(b: Backward) -> Value:
    """Rescale the gradient as if the divisor counted all of each window, including padding."""
    attrs = b.attrs
    if attrs["counted"] == attrs["padding"]:
        return b.grad
    (low, high), count = ends({"padding": attrs["counted"]}), spatial_rank(attrs)
    sizes = (n + first + last for n, first, last in zip(b.x().tensor.shape[2:], low, high, strict=True))
    rest = tuple(all_ - counted for all_, counted in zip(attrs["padding"], attrs["counted"], strict=True))
    geometry = {**attrs, "padding": rest, "counted": rest}
    ones = broadcast_to(b.g, b.number(1.0), (1, 1, *sizes))
    return b.emit("divide", b.grad, b.emit(f"nn.avg_pool{count}d", ones, **geometry))  # type: ignore[no-any-return]


def max_pool_gradient(b: Backward) -> Value:
    """Of equal elements, the first in the plane is selected, as in torch."""
    sizes = b.x().tensor.shape[2:]
    return _scatter_to_maxima(b, {**b.attrs, "output_size": b.y().tensor.shape[2:], "plane": row_major(sizes)})


def adaptive_max_pool_gradient(b: Backward) -> Value:
    """As `max_pool_gradient`."""
    return _scatter_to_maxima(b, {"output_size": b.attrs["output_size"], "plane": row_major(b.x().tensor.shape[2:])})


def _scatter_to_maxima(b: Backward, attrs: dict[str, Any]) -> Value:
    """Add the gradient at the indices of an op with these attributes, in a plane of zeros."""
    n, c, *sizes = b.x().tensor.shape
    plane, flat = (n, c, math.prod(sizes)), (n, c, math.prod(b.grad.tensor.shape[2:]))
    zeros = broadcast_to(b.g, b.number(0.0), plane)
    places = reshape_to(b.g, b.emit(f"{b.op.name}_places", b.x(), **attrs), flat)
    grad = reshape_to(b.g, b.grad, flat)
    sums = b.emit("scatter_elements", zeros, places, grad, axis=2, reduction="add")
    return reshape_to(b.g, sums, (n, c, *sizes))  # type: ignore[no-any-return]
