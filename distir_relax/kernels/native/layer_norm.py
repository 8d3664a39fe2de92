"""Normalization by mean and variance."""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.script import LANES


@native
def layer_norm(width: int, dtype: str, weight_dtype: str) -> Any:
    """Return the kernel for rows of `width` elements: addresses of rows, weight, bias and result, rows, epsilon.

    It computes in float32.
    """
    from tvm.script import tirx as T

    whole, rest = width // LANES, width % LANES
    stored, weight_stored = STORED[dtype], STORED[weight_dtype]
    pointer, weight_pointer = T.handle(stored).ty, T.handle(weight_stored).ty

    @T.prim_func
    def kernel(
        here: T.handle,
        x_: T.int64,
        weight_: T.int64,
        bias_: T.int64,
        result_: T.int64,
        rows: T.int64,
        epsilon: T.float32,
    ):
        T.match_buffer(here, (1,), "float32")
        x_data: T.let[T.handle(stored)] = T.reinterpret(pointer, x_)
        weight_data: T.let[T.handle(weight_stored)] = T.reinterpret(weight_pointer, weight_)
        bias_data: T.let[T.handle(weight_stored)] = T.reinterpret(weight_pointer, bias_)
        result_data: T.let[T.handle(stored)] = T.reinterpret(pointer, result_)
        x = T.decl_buffer((rows, width), stored, data=x_data)
        weight = T.decl_buffer((width,), weight_stored, data=weight_data)
        bias = T.decl_buffer((width,), weight_stored, data=bias_data)
        result = T.decl_buffer((rows, width), stored, data=result_data)
        sums = T.alloc_buffer((LANES,), "float32", scope="local")
        mean = T.alloc_buffer((1,), "float32", scope="local")
        scale = T.alloc_buffer((1,), "float32", scope="local")
        for i in range(rows):
            for j in T.vectorized(LANES):
                sums[j] = T.float32(0)
            for block in range(whole):
                for j in T.vectorized(LANES):
                    sums[j] += widen(x[i, block * LANES + j])
            mean[0] = T.float32(0)
            for j in range(LANES):
                mean[0] += sums[j]
            for j in range(rest):
                mean[0] += widen(x[i, whole * LANES + j])
            mean[0] = mean[0] / T.float32(width)
            for j in T.vectorized(LANES):
                sums[j] = T.float32(0)
            for block in range(whole):
                for j in T.vectorized(LANES):
                    sums[j] += (widen(x[i, block * LANES + j]) - mean[0]) * (widen(x[i, block * LANES + j]) - mean[0])
            scale[0] = T.float32(0)
            for j in range(LANES):
                scale[0] += sums[j]
            for j in range(rest):
                scale[0] += (widen(x[i, whole * LANES + j]) - mean[0]) * (widen(x[i, whole * LANES + j]) - mean[0])
            scale[0] = T.float32(1) / T.sqrt(scale[0] / T.float32(width) + epsilon)
            for j in range(width):
                result[i, j] = narrow((widen(x[i, j]) - mean[0]) * scale[0] * widen(weight[j]) + widen(bias[j]), dtype)

    return kernel
