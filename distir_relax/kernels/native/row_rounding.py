"""Rounding of the rows of an input to 8 bits, with one scale for each row or for each group of a row.

The scale is the largest absolute value over 127, so that the rounded numbers are in -127..127. A group with NaN has the
scale NaN. Numbers are taken for zero if all of a group are smaller than 1e-30.
"""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.script import LANES, indented, local

_LEAST_BITS = 0x0DA24260
"""1e-30 as the bits of float32."""
_SERIAL_ROWS = 4
"""With fewer rows, starting the threads takes longer than rounding."""


def largest(numbers: Any) -> Any:
    """Return the largest element of a vector of `LANES` int32, a TIR expression."""
    return _reduced("smax", numbers)


def total(numbers: Any) -> Any:
    """Return the sum of the elements of a vector of `LANES` int32, a TIR expression."""
    return _reduced("add", numbers)


def round_rows(group: str, offset: str, parallel: bool) -> list[str]:
    """Return the lines that round ``x (rows, inner)`` to ``rounded``, int8, in groups of `group` elements.

    They write ``row_scales (rows, inner / group)``, and `offset` to ``row_offsets``: an expression of ``scale[0]``, the
    scale of the group, and ``total(sums[lanes])``, the sum of its rounded numbers. They use `widen`, `largest` and
    `total`. If they are not `parallel`, they run in one thread, otherwise in ``threads``.
    """
    lanes, vector = f"T.Ramp(0, 1, {LANES})", f"for v in T.vectorized({LANES}):"
    element = f"r, c * {group} + i * {LANES} + v"
    magnitude = f"T.bitwise_and(T.reinterpret('int32', widen(x[{element}])), T.int32(0x7FFFFFFF))"
    of_group = [
        vector,
        f"    sums[v] = T.int32({_LEAST_BITS})",
        f"for i in range({group} // {LANES}):",
        f"    {vector}",
        # The bits of floats without their signs have the order of the absolute values, and those of NaN are larger.
        f"        sums[v] = T.max(sums[v], {magnitude})",
        f"scale[0] = T.reinterpret('float32', largest(sums[{lanes}]))",
        "inverse[0] = T.float32(127) / scale[0]",
        "scale[0] = scale[0] / T.float32(127)",
        vector,
        "    sums[v] = T.int32(0)",
        f"for i in range({group} // {LANES}):",
        f"    {vector}",
        f"        numbers[v] = T.Cast('int32', T.nearbyint(widen(x[{element}]) * inverse[0]))",
        "        sums[v] = sums[v] + numbers[v]",
        f"        rounded[{element}] = T.Cast('int8', numbers[v])",
        "row_scales[r, c] = scale[0]",
        f"row_offsets[r, c] = {offset.replace('lanes', lanes)}",
    ]
    of_row = [
        *(line for name in ("sums", "numbers") for line in local(name, dtype="int32")),
        *(line for name in ("scale", "inverse") for line in local(name, 2)),
        f"for c in range(inner // {group}):",
        *indented(of_group),
    ]
    serial = ["for r in range(rows):", *indented(of_row)]
    if not parallel:
        return serial
    share = ["r: T.let[T.int64] = turn * threads + t", "if r < rows:", *indented(of_row)]
    threads = ["for turn in range((rows + threads - 1) // threads):", *indented(share)]
    together = ["for t in T.parallel(threads):", *indented(threads)]
    return [f"if rows < {_SERIAL_ROWS}:", *indented(serial), "else:", *indented(together)]


def _reduced(operation: str, numbers: Any) -> Any:
    from tvm import tirx

    return tirx.call_llvm_pure_intrin("int32", f"llvm.vector.reduce.{operation}.v{LANES}i32", numbers)
