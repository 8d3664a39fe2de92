"""Products with a weight that oneDNN has packed, as fast as the weight can be read if there are few rows.

oneDNN's own kernels read a weight at half of that for one row (float32, a weight of (3072, 576), EPYC with AVX-512, one
core: 15 GB/s of 30). Its layout for processors with AVX-512 is panels of 64 columns: ``w[n / 64, k, 64]``, and for
bfloat16 ``w[n / 64, k / 2, 64, 2]``. A kernel keeps the sums of a panel in registers and reads the panel in one stream.
Few rows read ahead in the panel; with more the next panel is read ahead, so that the memory and the processor work at
the same time. A row's sums have the same order whatever the number of rows and threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distir_relax.kernels.native.dot import dot
from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native_needing
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel, local, prefetch
from distir_relax.kernels.native.target import Capability

if TYPE_CHECKING:
    import torch

PANEL = 64
"""Columns of a panel."""
_BLOCKS = (4, 2, 1)
"""Numbers of rows of which the sums of a panel are in registers."""
_AHEAD = 20
"""Rows of a panel, of 256 bytes, by which few rows of an input read ahead."""
_SHARED_ROWS = 8
"""The least rows of a thread for which threads share a panel: each reads all of it."""


def panel_rows(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Return the rows of each panel of `packed`, oneDNN's form of `weight` (out, in); None if it has no such panels."""
    import torch

    columns, inner = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    size, panels = torch.ops.mkldnn._nbytes(packed), -(-columns // PANEL)
    rows, rest = divmod(size, panels * PANEL * weight.element_size())
    if rest or rows < inner or rows % pair or inner % pair:
        return None
    found = (
        _bytes_at(torch.ops.mkldnn.data_ptr(packed), size).view(weight.dtype).view(panels, rows // pair, PANEL, pair)
    )
    for panel in {0, panels - 1}:
        given = weight[panel * PANEL : (panel + 1) * PANEL]
        expected = found.new_zeros(PANEL, rows)
        expected[: len(given), :inner] = given
        if not torch.equal(found[panel].permute(1, 0, 2).reshape(PANEL, rows), expected):
            return None
    return int(rows)


def _needs(dtype: str, biased: bool, parallel: bool, dots: bool) -> tuple[Capability, ...]:
    return (Capability.BFLOAT16_DOT,) if dots else ()


@native_needing(_needs)
def panel_product(dtype: str, biased: bool, parallel: bool, dots: bool) -> Any:
    """Return the kernel ``x (rows, inner), w (n / 64, panel, 64), bias (n) -> y (rows, n)``.

    It takes the addresses of x, w, bias and y, then rows, n, inner, panel and threads. `dtype` is ``float32`` or
    ``bfloat16``; sums are float32. If it is not `parallel`, the number of threads is 1. With `dots`, it uses the
    instruction of `dot` for bfloat16.
    """
    is_narrow = dtype == "bfloat16"
    item, pairs = STORED[dtype], "uint32" if is_narrow else "float32"
    arguments = [f"{name}: T.int64" for name in ("x_", "w_", "bias_", "y_", "rows", "n", "inner", "panel", "threads")]
    lines = [
        *at_address("x", "x_", "rows, inner", item),
        *at_address("x_pairs", "x_", "rows, inner // 2", "uint32"),
        *at_address("w", "w_", f"(n + {PANEL - 1}) // {PANEL}, panel // {2 if is_narrow else 1}, {PANEL}", pairs),
        *at_address("bias", "bias_", "n", item),
        *at_address("y", "y_", "rows, n", item),
    ]
    sums = [_sum(count, r, start) for count in _BLOCKS for r in range(count) for start in range(0, PANEL, LANES)]
    of_thread = [*(line for name in sums for line in local(name)), *local("edge", PANEL)]
    of_thread += _shares_of_panels()
    of_panel = [
        "begin: T.let[T.int64] = part * share",
        "count: T.let[T.int64] = T.max(T.int64(0), T.min(rows - begin, share))",
    ]
    for count in _BLOCKS:
        first = _BLOCKS[0]
        head = f"for g in range(count // {first}):" if count == first else f"if count % {2 * count} >= {count}:"
        row = f"begin + g * {first}" if count == first else f"begin + count // {2 * count} * {2 * count}"
        of_panel += [head, *indented(_block(count, row, dtype, biased, dots))]
    of_thread += indented([f"if p * {PANEL} < n:", *indented(of_panel)])
    lines += [f"for t in {'T.parallel' if parallel else 'range'}(threads):", *indented(of_thread)]
    return kernel(arguments, lines, {"dot": dot, "narrow": narrow, "widen": widen})


def _shares_of_panels() -> list[str]:
    """Return the lines that begin the loop over a thread's parts of panels: panel `p`, and `part` of `share` rows each.

    Threads take turns, so that together they read one stream. Of the panels that are left, too few for all threads,
    each has a share of the rows, unless there are few rows.
    """
    size = _BLOCKS[0]
    # Without conditional values: TVM makes no vectors at places that depend on one.
    return [
        f"panels: T.let[T.int64] = (n + {PANEL - 1}) // {PANEL}",
        "whole: T.let[T.int64] = panels // threads",
        f"several: T.let[T.int64] = T.Cast('int64', rows >= {_SHARED_ROWS} * threads)",
        "parts: T.let[T.int64] = 1 + several * (threads - 1)",
        "for turn in range(whole + ((panels - whole * threads) * parts + threads - 1) // threads):",
        "    left: T.let[T.int64] = T.Cast('int64', turn >= whole)",
        "    unit: T.let[T.int64] = T.max(turn - whole, T.int64(0)) * threads + t",
        "    p: T.let[T.int64] = T.min(turn, whole) * threads + left * (unit // parts) + (1 - left) * t",
        "    part: T.let[T.int64] = left * (unit % parts)",
        "    cut: T.let[T.int64] = 1 + left * (parts - 1)",
        f"    share: T.let[T.int64] = (rows + {size} * cut - 1) // ({size} * cut) * {size}",
    ]


def _block(count: int, row: str, dtype: str, biased: bool, dots: bool) -> list[str]:
    """Return the lines for `count` rows from `row` on, of panel ``p``."""
    is_narrow = dtype == "bfloat16"
    stored = f"narrow({'{value} + widen(bias[{column}])' if biased else '{value}'}, '{dtype}')"
    starts = range(0, PANEL, LANES)
    vector = f"for v in T.vectorized({LANES}):"
    sums = [(r, start, f"{_sum(count, r, start)}[v]") for start in starts for r in range(count)]
    lines = [line for _, _, total in sums for line in (vector, f"    {total} = T.float32(0)")]
    steps = f"(inner // {2 if is_narrow else 1})"
    lines.append(f"for b in range{steps}:")
    if count == _BLOCKS[0]:
        # The first four blocks each read a quarter of the thread's next panel ahead, and the memory does not wait.
        ahead = f"T.address_of(w[p + threads, b, g % {PANEL // LANES} * {LANES}])"
        lines.append(f"    {prefetch(ahead)}")
    else:
        # A few rows wait for the memory: they read ahead in the same panel, then in the thread's next one.
        lines.append(f"    beyond: T.let[T.int64] = T.Cast('int64', b + {_AHEAD} >= {steps})")
        place = f"p + threads * beyond, b + {_AHEAD} - beyond * {steps}"
        lines += [f"    {prefetch(f'T.address_of(w[{place}, {column}])')}" for column in range(0, PANEL, LANES)]
    for r, start, total in sums:
        if is_narrow and dots:
            whole = f"{_sum(count, r, start)}[T.Ramp(0, 1, {LANES})]"
            factors = f"w[p, b, T.Ramp({start}, 1, {LANES})], T.Broadcast(x_pairs[{row} + {r}, b], {LANES})"
            lines.append(f"    {whole} = dot({whole}, {factors})")
            continue
        weight = f"w[p, b, {start} + v]"
        terms = [(weight, f"x[{row} + {r}, b]")]
        if is_narrow:
            # Two weights in 32 bits, the first in the lower half.
            halves = f"T.shift_left({weight}, T.uint32(16))", f"T.bitwise_and({weight}, T.uint32(0xFFFF0000))"
            terms = [
                (f"T.reinterpret('float32', {half})", f"widen(x[{row} + {r}, 2 * b + {k}])")
                for k, half in enumerate(halves)
            ]
        lines.append(f"    {vector}")
        lines += [f"        {total} = {total} + {value} * {factor}" for value, factor in terms]
    for r in range(count):
        lines.append(f"if (p + 1) * {PANEL} <= n:")
        for start in starts:
            column = f"p * {PANEL} + {start} + v"
            result = stored.format(value=f"{_sum(count, r, start)}[v]", column=column)
            lines += [f"    {vector}", f"        y[{row} + {r}, {column}] = {result}"]
        lines.append("else:")
        # Through another buffer, since the columns that are left are no whole vectors.
        for start in starts:
            lines += [f"    {vector}", f"        edge[{start} + v] = {_sum(count, r, start)}[v]"]
        column = f"p * {PANEL} + c"
        lines.append(f"    for c in range(n - p * {PANEL}):")
        lines.append(f"        y[{row} + {r}, {column}] = {stored.format(value='edge[c]', column=column)}")
    return lines


def _sum(count: int, row: int, start: int) -> str:
    """Return the name of the sums of a row of a block, and of the vector of columns from `start` on."""
    return f"sum_{count}_{row}_{start}"


def _bytes_at(address: int, size: int) -> torch.Tensor:
    import ctypes

    import torch

    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
