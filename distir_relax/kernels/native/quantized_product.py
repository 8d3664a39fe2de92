"""Products with weights of 8 or 4 bits, of inputs that are rounded to 8 bits: sums are int32, and exact.

A weight is stored in panels of `PANEL` columns. A word of 32 bits has four numbers of a column, of consecutive rows,
which `four_products` multiplies. They are unsigned, as the instruction takes them: those of 8 bits have 128 added, and
128 times the sum of a row's inputs is subtracted from the products.

    8 bits                w[n / PANEL, inner / 4, PANEL], and a float32 scale for each column
    8 bits in groups      w[n / PANEL, inner / GROUP] records: 8 x PANEL words, PANEL scales
    4 bits in groups      w[n / PANEL, inner / GROUP] records: 4 x PANEL words, PANEL scales, PANEL minimums

Scales and minimums of groups are float16. So a panel is read in one stream. Word ``b`` of 4 bits has the rows 4 b to
4 b + 3 of the group in the lower halves of its bytes, and those 16 rows later in the upper halves. A row's results have
the same bits whatever the number of rows and threads.
"""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.four_products import four_products, four_products_by_instruction
from distir_relax.kernels.native.load import native_needing
from distir_relax.kernels.native.math import fma
from distir_relax.kernels.native.row_rounding import largest, round_rows, total
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel, local, prefetch
from distir_relax.kernels.native.target import Capability

PANEL = 32
"""Columns of a panel."""
GROUP = 32
"""Rows of a weight that share a scale, if it is in groups."""
_BLOCKS = (4, 2, 1)
"""Numbers of rows of which the sums of a panel are in registers."""
_AHEAD = 5120
"""Bytes by which a panel is read ahead."""
_LINE = 16
"""Words of a line of the cache."""
_ITEM = 2
"""Bytes of a scale of a group."""
_STARTS = range(0, PANEL, LANES)
_ALL = f"T.Ramp(0, 1, {LANES})"
_VECTOR = f"for v in T.vectorized({LANES}):"


def scratch_bytes(rows: int, inner: int, grouped: bool) -> int:
    """Return the bytes that a call takes for the rounded input, its scales and its sums."""
    return rows * (inner + 8 * (inner // GROUP if grouped else 1))


def record_bytes(bits: int) -> int:
    """Return the bytes of a record."""
    return PANEL * (GROUP * bits // 8 + _ITEM * (2 if bits == 4 else 1))


def _needs(dtype: str, bits: int, grouped: bool, parallel: bool, instruction: bool) -> tuple[Capability, ...]:
    return (Capability.INT8_DOT,) if instruction else ()


@native_needing(_needs)
def quantized_product(dtype: str, bits: int, grouped: bool, parallel: bool, instruction: bool) -> Any:
    """Return the kernel ``x (rows, inner), w, scales (n), bias (n) -> y (rows, n)``; `n` is rounded up to panels.

    It takes the addresses of w, scales and bias, n and inner, the addresses of x, y and of memory of `scratch_bytes`,
    then rows and threads.
    `dtype` is that of x and y, ``float32`` or ``bfloat16``; the bias is float32. If it is `grouped`, the scales are in
    the records; otherwise columns have scales, and `bits` is 8. If it is not `parallel`, the number of threads is 1.
    With `instruction`, it uses that of `four_products_by_instruction`.
    """
    names = ("w_", "scales_", "bias_", "n", "inner", "x_", "y_", "scratch", "rows", "threads")
    lines = _buffers(dtype, bits, grouped)
    offset = "total(sums[lanes]) * T.int32(-128)"
    if bits == 4:
        offset = "T.Cast('float32', total(sums[lanes])) * scale[0]"
    lines += round_rows(str(GROUP) if grouped else "inner", offset, parallel)
    of_panel = list[str]()
    for count in _BLOCKS:
        first = _BLOCKS[0]
        head = f"for q in range(rows // {first}):" if count == first else f"if rows % {2 * count} >= {count}:"
        row = f"q * {first}" if count == first else f"rows // {2 * count} * {2 * count}"
        sums = _sums_of_groups(count, row, bits) if grouped else _sums(count, row)
        of_panel += [head, *indented([*sums, *_stores(count, row, dtype)])]
    registers = [(r, start) for r in range(_BLOCKS[0]) for start in _STARTS]
    of_thread = [
        *(line for r, start in registers for line in local(f"result_{r}_{start}")),
        *(line for r, start in registers for line in local(f"sum_{r}_{start}", dtype="int32")),
        *local("weights", dtype="int32"),
        *local("edge", PANEL),
        # Threads take turns, so that together they read one stream.
        f"for turn in range(((n + {PANEL - 1}) // {PANEL} + threads - 1) // threads):",
        *indented(["p: T.let[T.int64] = turn * threads + t", f"if p * {PANEL} < n:", *indented(of_panel)]),
    ]
    lines += [f"for t in {'T.parallel' if parallel else 'range'}(threads):", *indented(of_thread)]
    product = four_products_by_instruction if instruction else four_products
    functions = {
        "fma": fma,
        "four_products": product,
        "largest": largest,
        "narrow": narrow,
        "total": total,
        "widen": widen,
    }
    return kernel([f"{name}: T.int64" for name in names], lines, functions)


def _buffers(dtype: str, bits: int, grouped: bool) -> list[str]:
    panels, groups = f"((n + {PANEL - 1}) // {PANEL})", f"(inner // {GROUP})" if grouped else "1"
    lines = [
        *at_address("x", "x_", "rows, inner", STORED[dtype]),
        *at_address("bias", "bias_", f"{panels} * {PANEL}", "float32"),
        *at_address("y", "y_", "rows, n", STORED[dtype]),
        *at_address("rounded", "scratch", "rows, inner", "int8"),
        *at_address("words", "scratch", "rows, inner // 4", "int32"),
        *at_address("row_scales", "scratch + rows * inner", f"rows, {groups}", "float32"),
    ]
    offsets = "float32" if bits == 4 else "int32"
    lines += at_address("row_offsets", f"scratch + rows * (inner + 4 * {groups})", f"rows, {groups}", offsets)
    if not grouped:
        lines += at_address("w", "w_", f"{panels}, inner // 4, {PANEL}", "int32")
        return lines + at_address("scales", "scales_", f"{panels} * {PANEL}", "float32")
    size = record_bytes(bits)
    lines += at_address("w", "w_", f"{panels}, {groups}, {size // 4}", "int32")
    return lines + at_address("scales", "w_", f"{panels}, {groups}, {size // _ITEM}", "float16")


def _sums(count: int, row: str) -> list[str]:
    """Return the lines that compute the results of `count` rows from `row` on, of panel ``p``."""
    parts = [(start, r) for start in _STARTS for r in range(count)]
    lines = [f"{_sum(r, start)} = T.Broadcast(row_offsets[{row} + {r}, 0], {LANES})" for start, r in parts]
    of_word = _read_ahead(count, "b", "inner // 4", PANEL)
    for start in _STARTS:
        of_word.append(f"weights[{_ALL}] = w[p, b, T.Ramp({start}, 1, {LANES})]")
        of_word += _products(count, start, row, "b")
    lines += ["for b in range(inner // 4):", *indented(of_word)]
    for start, r in parts:
        columns = f"T.Ramp(p * {PANEL} + {start}, 1, {LANES})"
        scale = f"T.Broadcast(row_scales[{row} + {r}, 0], {LANES}) * scales[{columns}]"
        lines.append(f"{_result(r, start)} = fma({_as_float(_sum(r, start))}, {scale}, bias[{columns}])")
    return lines


def _sums_of_groups(count: int, row: str, bits: int) -> list[str]:
    """Return the lines of `_sums` for a weight in groups."""
    size, first_scale = record_bytes(bits), PANEL * GROUP * bits // 8 // _ITEM
    parts = [(start, r) for start in _STARTS for r in range(count)]
    of_group = _read_ahead(count, "c", f"inner // {GROUP}", size // 4)
    for start, r in parts:
        offset = "T.int32(0)" if bits == 4 else f"row_offsets[{row} + {r}, c]"
        of_group.append(f"{_sum(r, start)} = T.Broadcast({offset}, {LANES})")
    for b in range(GROUP // 4):
        for start in _STARTS:
            of_group.append(f"weights[{_ALL}] = {_weights(b, start, bits)}")
            of_group += _products(count, start, row, f"c * {GROUP // 4} + {b}")
    for start in _STARTS:
        scale, minimum = (
            _as_float(f"scales[p, c, T.Ramp({first}, 1, {LANES})]")
            for first in (first_scale + start, first_scale + PANEL + start)
        )
        for r in range(count):
            result = _result(r, start)
            number = f"{_as_float(_sum(r, start))} * T.Broadcast(row_scales[{row} + {r}, c], {LANES})"
            of_group.append(f"{result} = fma({number}, {scale}, {result})")
            if bits == 4:
                offset = f"T.Broadcast(row_offsets[{row} + {r}, c], {LANES})"
                of_group.append(f"{result} = fma({offset}, {minimum}, {result})")
    biases = [f"{_result(r, start)} = bias[T.Ramp(p * {PANEL} + {start}, 1, {LANES})]" for start, r in parts]
    return [*biases, f"for c in range(inner // {GROUP}):", *indented(of_group)]


def _products(count: int, start: int, row: str, word: str) -> list[str]:
    """Return the lines that add the products of `word` of each row with the words ``weights``."""
    sums = [_sum(r, start) for r in range(count)]
    return [
        f"{of_row} = four_products({of_row}, weights[{_ALL}], words[{row} + {r}, {word}])"
        for r, of_row in enumerate(sums)
    ]


def _weights(b: int, start: int, bits: int) -> str:
    """Return the words with the rows from 4 b on of group ``c``, as bytes, of the columns from `start` on."""
    if bits == 8:
        return f"w[p, c, T.Ramp({b * PANEL + start}, 1, {LANES})]"
    halves, words = GROUP // 8, f"T.Broadcast(T.int32(0x0F0F0F0F), {LANES})"
    packed = f"w[p, c, T.Ramp({b % halves * PANEL + start}, 1, {LANES})]"
    if b >= halves:
        packed = f"T.shift_right({packed}, T.Broadcast(T.int32(4), {LANES}))"
    return f"T.bitwise_and({packed}, {words})"


def _read_ahead(count: int, index: str, steps: str, words: int) -> list[str]:
    """Return the lines that read ahead while `words` at `index`, one of `steps`, of a panel are used.

    A panel's first block of rows waits for the memory, and reads `_AHEAD` bytes ahead in the same panel, then in the
    thread's next one. Later blocks find the panel in a cache. They read all of the next one, so that the memory and the
    processor work at the same time.
    """
    ahead = _AHEAD // (4 * words)
    if count == _BLOCKS[0]:
        later = "T.min(q, T.int64(1))"
        panels, step = later, f"{index} + {ahead} * (1 - {later})"
    else:
        panels, step = "0", f"{index} + {ahead}"
    beyond = f"T.Cast('int64', {step} >= {steps})"
    address = f"p + threads * ({panels} + {beyond}), {step} - {beyond} * ({steps})"
    return [prefetch(f"T.address_of(w[{address}, {k}])") for k in range(0, words, _LINE)]


def _stores(count: int, row: str, dtype: str) -> list[str]:
    """Return the lines that write the results."""
    lines = list[str]()
    for r in range(count):
        lines.append(f"if (p + 1) * {PANEL} <= n:")
        for start in _STARTS:
            stored = f"y[{row} + {r}, p * {PANEL} + {start} + v] = narrow(result_{r}_{start}[v], '{dtype}')"
            lines += indented([_VECTOR, f"    {stored}"])
        lines.append("else:")
        # Through another buffer, since the columns that are left are no whole vectors.
        lines += indented([f"edge[T.Ramp({start}, 1, {LANES})] = {_result(r, start)}" for start in _STARTS])
        lines.append(f"    for e in range(n - p * {PANEL}):")
        lines.append(f"        y[{row} + {r}, p * {PANEL} + e] = narrow(edge[e], '{dtype}')")
    return lines


def _sum(row: int, start: int) -> str:
    """Return the sums of a row of a block, of the vector of columns from `start` on."""
    return f"sum_{row}_{start}[{_ALL}]"


def _result(row: int, start: int) -> str:
    """Return the results of a row of a block, of the vector of columns from `start` on."""
    return f"result_{row}_{start}[{_ALL}]"


def _as_float(vector: str) -> str:
    return f"T.Cast('float32x{LANES}', {vector})"
