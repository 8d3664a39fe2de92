"""Products with a weight that oneDNN has packed, as fast as the weight can be read if there are few rows.

oneDNN's own kernels read a weight at half of that for one row (float32, a weight of (3072, 576), EPYC with AVX-512, one
core: 15 GB/s of 30). Its layout for processors with AVX-512 is panels of 64 columns: ``w[n / 64, k, 64]``, and for
bfloat16 ``w[n / 64, k / 2, 64, 2]``. A kernel keeps the sums of a panel in registers and reads the panel in one stream.
A row's sums have the same order whatever the number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native

if TYPE_CHECKING:
    import torch

PANEL = 64
"""Columns of a panel."""
_LANES, _BLOCKS = 16, (4, 2, 1)


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


@native
def panel_product(dtype: str, biased: bool, parallel: bool) -> Any:
    """Return the kernel ``x (rows, inner), w (n / 64, panel, 64), bias (n) -> y (rows, n)``.

    It takes the addresses of x, w, bias and y, then rows, n, inner, panel and threads. `dtype` is ``float32`` or
    ``bfloat16``; sums are float32. If it is not `parallel`, the number of threads is 1.
    """
    from tvm.script import from_source

    is_narrow = dtype == "bfloat16"
    item, pairs = STORED[dtype], "uint32" if is_narrow else "float32"
    shapes = {
        "x": ("rows, inner", item),
        "w": (f"(n + {PANEL - 1}) // {PANEL}, panel // {2 if is_narrow else 1}, {PANEL}", pairs),
        "bias": ("n", item),
        "y": ("rows, n", item),
    }
    lines = ["@T.prim_func", "def kernel(here: T.handle, x_: T.int64, w_: T.int64, bias_: T.int64, y_: T.int64,"]
    lines += ["           rows: T.int64, n: T.int64, inner: T.int64, panel: T.int64, threads: T.int64):"]
    lines += ['    T.match_buffer(here, (1,), "float32")']
    for name, (shape, kind) in shapes.items():
        lines.append(f'    {name}_data: T.let[T.handle("{kind}")] = T.reinterpret(T.handle("{kind}").ty, {name}_)')
        lines.append(f'    {name} = T.decl_buffer(({shape},), "{kind}", data={name}_data)')
    lines.append(f"    for t in {'T.parallel' if parallel else 'range'}(threads):")
    # One buffer for each vector: they become registers, a larger one does not.
    names = [_sum(count, r, start) for count in _BLOCKS for r in range(count) for start in range(0, PANEL, _LANES)]
    lines += [f"        {line}" for name in names for line in _local(name, _LANES)]
    lines += [f"        {line}" for line in _local("edge", PANEL)]
    # Threads take turns, so that together they read one stream.
    lines.append(f"        for turn in range(((n + {PANEL - 1}) // {PANEL} + threads - 1) // threads):")
    lines.append("            p: T.let[T.int64] = turn * threads + t")
    lines.append(f"            if p * {PANEL} < n:")
    for count in _BLOCKS:
        first = _BLOCKS[0]
        head = f"for g in range(rows // {first}):" if count == first else f"if rows % {2 * count} >= {count}:"
        row = f"g * {first}" if count == first else f"rows // {2 * count} * {2 * count}"
        body = _block(count, row, dtype, biased)
        lines += [f"                {head}", *(f"                    {line}" for line in body)]
    from tvm.script import tirx

    return from_source("\n".join(lines), extra_vars={"T": tirx, "narrow": narrow, "widen": widen})


def _local(name: str, count: int) -> list[str]:
    """Return the lines that make a buffer of `count` numbers on the stack: TVM takes others from the heap."""
    kind = 'T.handle("float32")'
    return [
        f'{name}_data: T.let[{kind}] = T.reinterpret({kind}.ty, T.tvm_stack_alloca("shape", {count // 2}))',
        f'{name} = T.decl_buffer(({count},), "float32", data={name}_data, align=8)',
    ]


def _block(count: int, row: str, dtype: str, biased: bool) -> list[str]:
    """Return the lines for `count` rows from `row` on, of panel ``p``."""
    is_narrow = dtype == "bfloat16"
    stored = f"narrow({'{value} + widen(bias[{column}])' if biased else '{value}'}, '{dtype}')"
    starts = range(0, PANEL, _LANES)
    vector = f"for v in T.vectorized({_LANES}):"
    sums = [(r, start, f"{_sum(count, r, start)}[v]") for start in starts for r in range(count)]
    lines = [line for _, _, total in sums for line in (vector, f"    {total} = T.float32(0)")]
    lines.append(f"for b in range(inner // {2 if is_narrow else 1}):")
    for r, start, total in sums:
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
