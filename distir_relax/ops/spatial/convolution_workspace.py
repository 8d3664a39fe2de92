"""Workspace of torch's CPU convolution kernels.

torch runs most float32 convolutions with oneDNN, which computes on layouts with the channels in blocks of 16 (of the
widest vectors of float32). Data, weights and results are copied into such layouts and back, so three blocked copies are
live at once, and later the blocked and the plain result. Data of fewer than 16 channels is read as it is. Other
convolutions, and all in float64, are products of the weights with an im2col copy of the data: one column per result
position, one row per weight of an output channel. ``ConvParams::use_mkldnn`` in
``aten/src/ATen/native/Convolution.cpp`` chooses the kernel. Measured with torch 2.13 by `benchmarks/peak_memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distir_relax.ir import TensorType
from distir_relax.ops.spatial.strides import ends
from distir_relax.ops.table import Attrs, Types

_BLOCK = 16
_SMALL = 20480
"""torch does not use oneDNN for a single sample of up to this number of elements."""
_MANY = 16
"""torch uses oneDNN for kernels of one element from this number of samples on."""


def convolution(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes for ``nn.conv2d`` and its family."""
    (x, w), (y,) = types, results
    padded = _padded(x, attrs)
    read = x if padded is None else padded
    extra = 0.0 if padded is None else float(padded.bytes)
    groups = read.shape[1] // max(w.shape[1], 1)
    if _by_product(read, w, attrs, groups):
        return extra + (0.0 if _is_pointwise(w, attrs) else _columns(w.shape[1:], y))
    data = 0.0 if groups == 1 and x.shape[1] < _BLOCK else _blocked(read, groups)
    result, weights = _blocked(y, groups), _blocked_weights(w, groups, min(_BLOCK, w.shape[1]))
    return extra + max(data + weights + result - y.bytes, result)


def transposed_convolution(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes for ``nn.conv2d_transpose`` and its family."""
    (x, w), (y,) = types, results
    low, high = ends(attrs)
    uncropped = y
    if low != high or min(low, default=0) < 0:
        sizes = [n + max(a, 0) + max(b, 0) for n, a, b in zip(y.shape[2:], low, high, strict=True)]
        uncropped = TensorType((*y.shape[:2], *sizes), y.dtype)
    extra = _extra_of_transposed(x, w, uncropped, attrs)
    # The cropped result is allocated after the whole one is computed.
    return extra if uncropped is y else max(extra + uncropped.bytes - y.bytes, float(uncropped.bytes))


def weight_gradient(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes for ``nn.conv2d_weight_grad`` and its family."""
    (x, y), (w,) = types, results
    padded = _padded(x, attrs)
    read = x if padded is None else padded
    # The weight is passed as a tensor of its shape.
    extra = w.bytes + (0.0 if padded is None else float(padded.bytes))
    groups = read.shape[1] // max(w.shape[1], 1)
    if _by_product(read, w, attrs, groups):
        return extra + (0.0 if _is_pointwise(w, attrs) else _columns(w.shape[1:], y))
    data = 0.0 if groups == 1 and x.shape[1] < _BLOCK else _blocked(read, groups)
    weights = _blocked_weights(w, groups, min(_BLOCK, w.shape[1]))
    return extra + max(data + _blocked(y, groups) + weights - w.bytes, weights)


def _extra_of_transposed(x: TensorType, w: TensorType, y: TensorType, attrs: Attrs) -> float:
    """Return the bytes for a transposed convolution with the result `y` before cropping."""
    groups = y.shape[1] // max(w.shape[1], 1)
    if _by_product(x, w, attrs, groups):
        return _columns(w.shape[1:], x)
    if any(stride > 1 for stride in attrs["strides"]):
        # The gradient of a strided convolution is accumulated in an unblocked copy.
        return max(_blocked(x, groups), float(y.bytes)) + y.bytes
    data, result = _blocked(x, groups), _blocked(y, groups)
    return max(data + _blocked_weights(w, groups, _BLOCK) + result - y.bytes, result)


def _padded(x: TensorType, attrs: Attrs) -> TensorType | None:
    """Return the padded copy of the data, needed if the padding is asymmetric."""
    low, high = ends(attrs)
    if low == high and min(low, default=0) >= 0:
        return None
    sizes = [n + a + b for n, a, b in zip(x.shape[2:], low, high, strict=True)]
    return TensorType((*x.shape[:2], *sizes), x.dtype)


def _by_product(x: TensorType, w: TensorType, attrs: Attrs, groups: int) -> bool:
    """Return whether torch computes the convolution itself, as a matrix product."""
    if x.dtype != "float32":
        return x.dtype == "float64"
    kernel = w.shape[2:]
    strided = any(s > 1 for s in attrs["strides"]) or any(d > 1 for d in attrs["dilation"])
    if not strided and x.shape[0] < _MANY and all(k == 1 for k in kernel[-2:]):
        return True
    large = len(kernel) > 1 and min(kernel[-2:]) > 3
    # For data with three spatial dims torch checks the first two.
    return groups == 1 and not large and x.shape[0] == 1 and math.prod(x.shape[:4]) <= _SMALL


def _is_pointwise(w: TensorType, attrs: Attrs) -> bool:
    """Return whether the data itself is its im2col matrix."""
    plain = all(s == 1 for s in attrs["strides"]) and not any(attrs["padding"])
    return plain and all(k == 1 for k in w.shape[2:])


def _columns(weights: Sequence[int], result: TensorType) -> float:
    """Return the bytes of the im2col matrices of all samples."""
    element = result.bytes / max(result.elements, 1)
    return float(result.shape[0] * math.prod(weights) * math.prod(result.shape[2:]) * element)


def _blocked(x: TensorType, groups: int) -> float:
    """Return the bytes of a tensor with the channels of each group padded to whole blocks."""
    channels = x.shape[1]
    return x.bytes * _round_to_blocks(channels, groups) / channels if channels else 0.0


def _blocked_weights(w: TensorType, groups: int, block_in: int) -> float:
    """Return the bytes of weights in blocks of output channels, and of `block_in` input channels."""
    if groups > 1 or not w.elements:
        return float(w.bytes)
    inner = -(-w.shape[1] // block_in) * block_in
    return w.bytes * _round_to_blocks(w.shape[0], 1) / w.shape[0] * inner / w.shape[1]


def _round_to_blocks(channels: int, groups: int) -> int:
    if 1 < groups < channels and channels % groups == 0 and (channels // groups) % _BLOCK:
        return groups * (-(-(channels // groups) // _BLOCK) * _BLOCK)
    return -(-channels // _BLOCK) * _BLOCK
