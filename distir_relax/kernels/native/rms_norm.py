"""Normalization by the root mean square."""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, round_to, widen
from distir_relax.kernels.native.load import native

_LANES = 16


@native
def rms_norm(width: int, dtype: str, weight_dtype: str, rounded: bool, parallel: bool) -> Any:
    """Return the kernel for rows of `width` elements.

    It takes the addresses of rows, weight and result, then the number of rows, epsilon, and the number of threads, 1 if
    it is not `parallel`. It computes in float32. With `rounded`, the normalized rows are rounded to their dtype before
    the multiplication.
    """
    from tvm.script import tirx as T

    whole, rest = width // _LANES, width % _LANES
    stored, weight_stored = STORED[dtype], STORED[weight_dtype]
    pointer, weight_pointer = T.handle(stored).ty, T.handle(weight_stored).ty
    between = dtype if rounded else "float32"
    loop = T.parallel if parallel else T.serial

    @T.prim_func
    def kernel(
        here: T.handle, x_: T.int64, weight_: T.int64, result_: T.int64,
        rows: T.int64, epsilon: T.float32, threads: T.int64,
    ):  # fmt: skip
        T.match_buffer(here, (1,), "float32")
        x_data: T.let[T.handle(stored)] = T.reinterpret(pointer, x_)
        weight_data: T.let[T.handle(weight_stored)] = T.reinterpret(weight_pointer, weight_)
        result_data: T.let[T.handle(stored)] = T.reinterpret(pointer, result_)
        x = T.decl_buffer((rows, width), stored, data=x_data)
        weight = T.decl_buffer((width,), weight_stored, data=weight_data)
        result = T.decl_buffer((rows, width), stored, data=result_data)
        for t in loop(threads):
            sums = T.alloc_buffer((_LANES,), "float32", scope="local")
            scale = T.alloc_buffer((1,), "float32", scope="local")
            for i in range(rows * t // threads, rows * (t + 1) // threads):
                for j in T.vectorized(_LANES):
                    sums[j] = T.float32(0)
                for block in range(whole):
                    for j in T.vectorized(_LANES):
                        sums[j] += widen(x[i, block * _LANES + j]) * widen(x[i, block * _LANES + j])
                scale[0] = T.float32(0)
                for j in range(_LANES):
                    scale[0] += sums[j]
                for j in range(rest):
                    scale[0] += widen(x[i, whole * _LANES + j]) * widen(x[i, whole * _LANES + j])
                scale[0] = T.float32(1) / T.sqrt(scale[0] / T.float32(width) + epsilon)
                for j in range(width):
                    result[i, j] = narrow(round_to(widen(x[i, j]) * scale[0], between) * widen(weight[j]), dtype)

    return kernel
