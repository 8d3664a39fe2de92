"""Attention of one new position of each of several requests."""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.math import exp

_LANES = 16
_LINE = 64
"""Bytes of a cache line."""


@native
def attend_each(heads: int, group: int, width: int, value_width: int, dtype: str) -> Any:  # noqa: C901, PLR0915
    """Return the kernel that appends new keys and values to those of each request, and attends to them.

    `heads` are those of keys and values, of `width` and `value_width` elements, and `group` the query heads of each.
    The arguments of the kernel:

    - for each request six int64: addresses of keys and of values, each with their strides by head and by position;
    - for each that takes part three int64: its number, its row, and its number of earlier positions; and how many do;
    - addresses of queries, new keys, new values and results, each with their strides by head and by row;
    - memory for ``group`` rows of float32 scores, and the length of each, a multiple of 16;
    - the scale of the scores.

    All strides are in elements, that of the last dim is 1. It computes in float32. Caches come from memory: those of a
    head's values, and of the next head's keys, are fetched while the scores are computed.
    """
    from tvm.script import tirx as T

    whole, value_whole = width // _LANES, value_width // _LANES
    bytes_each = 4 if dtype == "float32" else 2
    lines, value_lines = (-(-n * bytes_each // _LINE) for n in (width, value_width))
    stored = STORED[dtype]
    pointer, numbers_pointer, floats_pointer = T.handle(stored).ty, T.handle("int64").ty, T.handle("float32").ty
    most = T.int64(1 << 48)
    item = T.int64(bytes_each)

    def fetch(address: Any) -> Any:
        """Prefetch a cache line into all caches, which never fails; a line after the last token is of no use."""
        place = T.reinterpret(pointer, address)
        return T.call_llvm_intrin("void", "llvm.prefetch", place, T.int32(0), T.int32(3), T.int32(1))

    @T.prim_func
    def kernel(  # noqa: C901, PLR0912, PLR0915
        here: T.handle, caches_: T.int64, parts_: T.int64, count: T.int64,
        q_: T.int64, q_head: T.int64, q_row: T.int64, new_k_: T.int64, new_k_head: T.int64, new_k_row: T.int64,
        new_v_: T.int64, new_v_head: T.int64, new_v_row: T.int64, y_: T.int64, y_head: T.int64, y_row: T.int64,
        scores_: T.int64, longest: T.int64, scale: T.float32,
    ):  # fmt: skip
        T.match_buffer(here, (1,), "float32")
        caches_data: T.let[T.handle("int64")] = T.reinterpret(numbers_pointer, caches_)
        parts_data: T.let[T.handle("int64")] = T.reinterpret(numbers_pointer, parts_)
        q_data: T.let[T.handle(stored)] = T.reinterpret(pointer, q_)
        new_k_data: T.let[T.handle(stored)] = T.reinterpret(pointer, new_k_)
        new_v_data: T.let[T.handle(stored)] = T.reinterpret(pointer, new_v_)
        y_data: T.let[T.handle(stored)] = T.reinterpret(pointer, y_)
        scores_data: T.let[T.handle("float32")] = T.reinterpret(floats_pointer, scores_)
        caches = T.decl_buffer((most,), "int64", data=caches_data)
        parts = T.decl_buffer((most,), "int64", data=parts_data)
        q = T.decl_buffer((most,), stored, data=q_data)
        new_k = T.decl_buffer((most,), stored, data=new_k_data)
        new_v = T.decl_buffer((most,), stored, data=new_v_data)
        y = T.decl_buffer((most,), stored, data=y_data)
        scores = T.decl_buffer((most,), "float32", data=scores_data)
        query = T.alloc_buffer((group * width,), "float32", scope="local")
        sums = T.alloc_buffer((_LANES,), "float32", scope="local")
        total = T.alloc_buffer((1,), "float32", scope="local")
        top = T.alloc_buffer((group,), "float32", scope="local")
        values = T.alloc_buffer((value_width,), "float32", scope="local")
        for i in range(count):
            cache: T.let = parts[i * 3] * 6
            row: T.let = parts[i * 3 + 1]
            past: T.let = parts[i * 3 + 2]
            k_data: T.let[T.handle(stored)] = T.reinterpret(pointer, caches[cache])
            v_data: T.let[T.handle(stored)] = T.reinterpret(pointer, caches[cache + 3])
            k = T.decl_buffer((most,), stored, data=k_data)
            v = T.decl_buffer((most,), stored, data=v_data)
            next_k: T.let = caches[parts[T.min(i + 1, count - 1) * 3] * 6]
            k_step: T.let = caches[cache + 2]
            v_step: T.let = caches[cache + 5]
            padded: T.let = T.shift_left(T.shift_right(past + _LANES, T.int64(4)), T.int64(4))
            for h in range(heads):
                k_from: T.let = h * caches[cache + 1]
                v_from: T.let = h * caches[cache + 4]
                v_soon: T.let = caches[cache + 3] + v_from * item
                k_soon: T.let = T.Select(h + 1 < heads, caches[cache] + (k_from + caches[cache + 1]) * item, next_k)
                for j in range(width):
                    k[k_from + past * k_step + j] = new_k[h * new_k_head + row * new_k_row + j]
                for j in range(value_width):
                    v[v_from + past * v_step + j] = new_v[h * new_v_head + row * new_v_row + j]
                for g in range(group):
                    top[g] = T.float32(-3.4e38)
                    for j in range(width):
                        query[g * width + j] = widen(q[(h * group + g) * q_head + row * q_row + j]) * scale
                    for t in range(padded - past - 1):
                        scores[g * longest + past + 1 + t] = T.float32(-3.4e38)
                for t in range(past + 1):
                    for line in T.unroll(value_lines):
                        T.evaluate(fetch(v_soon + t * v_step * item + line * _LINE))
                    for line in T.unroll(lines):
                        T.evaluate(fetch(k_soon + t * k_step * item + line * _LINE))
                    for g in T.unroll(group):
                        for j in T.vectorized(_LANES):
                            sums[j] = T.float32(0)
                        for block in T.unroll(whole):
                            for j in T.vectorized(_LANES):
                                sums[j] += query[g * width + block * _LANES + j] * widen(
                                    k[k_from + t * k_step + block * _LANES + j]
                                )
                        for j in T.vectorized(8):
                            sums[j] += sums[8 + j]
                        for j in T.vectorized(4):
                            sums[j] += sums[4 + j]
                        for j in T.vectorized(2):
                            sums[j] += sums[2 + j]
                        total[0] = sums[0] + sums[1]
                        for j in range(whole * _LANES, width):
                            total[0] += query[g * width + j] * widen(k[k_from + t * k_step + j])
                        scores[g * longest + t] = total[0]
                        top[g] = T.max(top[g], total[0])
                for g in range(group):
                    for j in T.vectorized(_LANES):
                        sums[j] = T.float32(0)
                    for block in range(T.shift_right(padded, T.int64(4))):
                        for j in T.vectorized(_LANES):
                            scores[g * longest + block * _LANES + j] = exp(
                                scores[g * longest + block * _LANES + j] - top[g]
                            )
                        for j in T.vectorized(_LANES):
                            sums[j] += scores[g * longest + block * _LANES + j]
                    total[0] = T.float32(0)
                    for j in range(_LANES):
                        total[0] += sums[j]
                    for j in range(value_width):
                        values[j] = T.float32(0)
                    for t in range(past + 1):
                        for block in T.unroll(value_whole):
                            for j in T.vectorized(_LANES):
                                values[block * _LANES + j] += scores[g * longest + t] * widen(
                                    v[v_from + t * v_step + block * _LANES + j]
                                )
                        for j in range(value_whole * _LANES, value_width):
                            values[j] += scores[g * longest + t] * widen(v[v_from + t * v_step + j])
                    for j in range(value_width):
                        y[(h * group + g) * y_head + row * y_row + j] = narrow(values[j] / total[0], dtype)

    return kernel
