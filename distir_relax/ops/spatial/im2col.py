"""im2col and col2im, as convolutions with one-hot kernels.

So patches split in space with halos, as convolutions do, at the price of as many products as the kernel has elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, aten, reshape_to

# ATen spellings


@aten("im2col.default")
def _im2col(
    g: Builder, x: Value, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Any:
    """``(n, c, h, w)`` to ``(n, c kh kw, patches)``, as `torch.nn.Unfold`; the batch dim is optional."""
    if len(x.tensor.shape) == 3:
        y = _im2col(g, reshape_to(g, x, (1, *x.tensor.shape)), kernel, dilation, padding, stride)
        return reshape_to(g, y, y.tensor.shape[1:])
    n, channels = x.tensor.shape[:2]
    weight = _ones(g, channels, kernel, x.tensor.dtype)
    y = g.aten("conv2d.default", x, weight, None, list(stride), list(padding), list(dilation), channels)
    return reshape_to(g, y, (n, y.tensor.shape[1], y.tensor.shape[2] * y.tensor.shape[3]))


@aten("col2im.default")
def _col2im(
    g: Builder, x: Value, size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
    stride: Sequence[int],
) -> Any:  # fmt: skip
    """``(n, c kh kw, patches)`` to ``(n, c, h, w)``, with overlaps summed, as `torch.nn.Fold`."""
    if len(x.tensor.shape) == 2:
        y = _col2im(g, reshape_to(g, x, (1, *x.tensor.shape)), size, kernel, dilation, padding, stride)
        return reshape_to(g, y, y.tensor.shape[1:])
    n, columns, _ = x.tensor.shape
    span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    blocks = [(m + 2 * p - k) // s + 1 for m, p, k, s in zip(size, padding, span, stride, strict=True)]
    more = [m + 2 * p - k - s * (b - 1) for m, p, k, s, b in zip(size, padding, span, stride, blocks, strict=True)]
    channels = columns // (kernel[0] * kernel[1])
    weight = _ones(g, channels, kernel, x.tensor.dtype)
    image = reshape_to(g, x, (n, columns, *blocks))
    arguments = (None, list(stride), list(padding), more, channels, list(dilation))
    return g.aten("conv_transpose2d.input", image, weight, *arguments)


def _ones(g: Builder, channels: int, kernel: Sequence[int], dtype: str) -> Value:
    """Return one-hot kernels: one for each channel and kernel position."""
    import torch

    places = kernel[0] * kernel[1]
    one = torch.eye(places, dtype=getattr(torch, dtype)).reshape(places, 1, *kernel)
    return g.array(one.repeat(channels, 1, 1, 1), "patches")
