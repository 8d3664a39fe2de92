"""Rotary positions."""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, round_to, widen
from distir_relax.kernels.native.load import native

_LANES = 16


@native
def rotary(width: int, dtype: str, parallel: bool) -> Any:
    """Return the kernel that rotates the halves of vectors of `width` elements, each by the angle of its position.

    It takes the addresses of the vectors, the cosines, the sines and the result; the number of positions, and of heads;
    the strides of the vectors by position and head, of the cosines and sines by position, and of the result by position
    and head; and the number of threads, 1 if it is not `parallel`. It rounds as each op of the formula would.
    """
    from tvm.script import tirx as T

    half = width // 2
    whole = half // _LANES
    stored = STORED[dtype]
    loop = T.parallel if parallel else T.serial
    pointer, most = T.handle(stored).ty, T.int64(1 << 48)

    def added(a: Any, b: Any) -> Any:
        return narrow(round_to(a, dtype) + round_to(b, dtype), dtype)

    @T.prim_func
    def kernel(
        here: T.handle, x_: T.int64, cos_: T.int64, sin_: T.int64, result_: T.int64,
        positions: T.int64, heads: T.int64, x_position: T.int64, x_head: T.int64, angle_position: T.int64,
        result_position: T.int64, result_head: T.int64, threads: T.int64,
    ):  # fmt: skip
        T.match_buffer(here, (1,), "float32")
        x_data: T.let[T.handle(stored)] = T.reinterpret(pointer, x_)
        cos_data: T.let[T.handle(stored)] = T.reinterpret(pointer, cos_)
        sin_data: T.let[T.handle(stored)] = T.reinterpret(pointer, sin_)
        result_data: T.let[T.handle(stored)] = T.reinterpret(pointer, result_)
        x = T.decl_buffer((most,), stored, data=x_data)
        cos = T.decl_buffer((most,), stored, data=cos_data)
        sin = T.decl_buffer((most,), stored, data=sin_data)
        result = T.decl_buffer((most,), stored, data=result_data)
        for t in loop(threads):
            for p in range(positions * t // threads, positions * (t + 1) // threads):
                for h in range(heads):
                    at: T.let = p * x_position + h * x_head
                    angle: T.let = p * angle_position
                    to: T.let = p * result_position + h * result_head
                    for block in range(whole):
                        for k in T.vectorized(_LANES):
                            result[to + block * _LANES + k] = added(
                                widen(x[at + block * _LANES + k]) * widen(cos[angle + block * _LANES + k]),
                                -widen(x[at + half + block * _LANES + k]) * widen(sin[angle + block * _LANES + k]),
                            )
                            result[to + half + block * _LANES + k] = added(
                                widen(x[at + half + block * _LANES + k])
                                * widen(cos[angle + half + block * _LANES + k]),
                                widen(x[at + block * _LANES + k]) * widen(sin[angle + half + block * _LANES + k]),
                            )
                    for k in range(whole * _LANES, half):
                        result[to + k] = added(
                            widen(x[at + k]) * widen(cos[angle + k]), -widen(x[at + half + k]) * widen(sin[angle + k])
                        )
                        result[to + half + k] = added(
                            widen(x[at + half + k]) * widen(cos[angle + half + k]),
                            widen(x[at + k]) * widen(sin[angle + half + k]),
                        )

    return kernel
