"""ONNX spellings of products of 8-bit integers, and of weights of fewer bits.

Products are exact: sums of integers are computed in float64. Weights that have fewer bits in their file stay so where
the file lets inputs be rounded as well, and become floats elsewhere.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.quantized.weights import GROUP
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, cast, onnx, reshape_to
from distir_relax.ops.table.onnx_quantization import exact_integers, requantize

_ROUNDS_INPUTS = 4
"""The `accuracy_level` at which onnxruntime rounds the inputs of a product to 8 bits, as `quantized_linear` does."""


@onnx("MatMulInteger")
def _matmul_integer(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    a = exact_integers(g, x[0], _column(g, x[2]) if x.has(2) else None)
    return cast(g, g.emit("matmul", a, exact_integers(g, x[1], x[3] if x.has(3) else None)), "int32")


@onnx("QLinearMatMul")
def _matmul(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    total = g.emit("matmul", exact_integers(g, x[0], _column(g, x[2])), exact_integers(g, x[3], x[5]))
    return requantize(g, total, (_column(g, x[1]), x[4], _column(g, x[6])), _column(g, x[7]))


@onnx("com.microsoft::MatMulNBits")
def _matmul_n_bits(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    import numpy as np

    bits, size, columns, inner = (int(attrs[name]) for name in ("bits", "block_size", "N", "K"))
    if bits not in (2, 4, 8) or x.has(4):
        raise NotImplementedError("an order of groups (g_idx)" if x.has(4) else f"weights of {bits} bits")
    blocks = -(-inner // size)
    values = _unpacked(x.array(1), bits).reshape(columns, blocks, -1)[:, :, :size]
    scales = x.array(2).reshape(columns, blocks, 1)
    zero: Any = 1 << (bits - 1)
    if x.has(3):
        points = x.array(3)
        packed = points.dtype == np.uint8
        zero = (_unpacked(points, bits).reshape(columns, -1) if packed else points.reshape(columns, -1))[:, :blocks]
        zero = zero.reshape(columns, blocks, 1)
    parts = _stored(values, scales, zero) if size == GROUP and not inner % GROUP else None
    if parts is not None and attrs.get("accuracy_level", 0) == _ROUNDS_INPUTS:
        y = g.emit("quantized_linear", x[0], *map(x.constant, parts))
    else:
        weight = ((values.astype(np.float32) - zero) * scales).reshape(columns, -1)[:, :inner]
        y = g.emit("linear", x[0], x.constant(np.ascontiguousarray(weight.astype(x.dtype(0)))))
    return g.emit("add", y, x[5]) if x.has(5) else y


def _stored(values: Any, scales: Any, zero: Any) -> tuple[Any, ...] | None:
    """Return a weight (n, groups, 32) of 4 or 8 bits as the operands of `quantized_linear`; None if they would differ.

    Scales and minimums there are float16, and 8 bits have no minimums.
    """
    import numpy as np

    narrow = scales.astype(np.float16)
    lows = -(zero * np.ones_like(scales, np.float32)) * scales
    minimums = lows.astype(np.float16)
    if (narrow != scales).any():
        return None
    if values.max(initial=0) > 15:
        whole = values.astype(np.int16) - zero
        return (whole.astype(np.int8), narrow) if np.abs(whole).max(initial=0) < 128 else None
    half = GROUP // 2
    packed = values[:, :, :half] | values[:, :, half:] << 4
    return None if (minimums != lows).any() else (np.ascontiguousarray(packed), narrow, minimums)


def _unpacked(data: Any, bits: int) -> Any:
    """Return the numbers of bytes with several in each, the lowest bits first."""
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((data.astype(np.uint8)[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*data.shape[:-1], -1)


def _column(g: Builder, side: Value) -> Value:
    """Return the numbers of the rows of a product as a column; a scalar as it is."""
    return reshape_to(g, side, (*side.tensor.shape, 1)) if len(side.tensor.shape) == 1 else side
