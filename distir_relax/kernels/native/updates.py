"""Steps of optimizers, in place of float32 tensors, each element by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel


@native
def adam_step(parallel: bool) -> Any:
    """Return the kernel of ``w keep - size m / (sqrt(v) + floor)``, in place of `w`.

    It takes the addresses of `w`, `m` and `v`, and their number of elements; then `keep`, `size`, `floor`, and the
    number of threads, 1 if it is not `parallel`.
    """
    change = "size * (m[{0}] / (T.sqrt(v[{0}]) + floor))"
    return _in_place("w", ("w", "m", "v"), f"w[{{0}}] * keep - {change}", ("keep", "size", "floor"), parallel)


@native
def moving_square(parallel: bool) -> Any:
    """Return the kernel of ``v decay + x x share``, in place of `v`.

    It takes the addresses of `v` and `x`, and their number of elements; then `decay`, `share`, and the number of
    threads, 1 if it is not `parallel`.
    """
    return _in_place("v", ("v", "x"), "v[{0}] * decay + x[{0}] * x[{0}] * share", ("decay", "share"), parallel)


def _in_place(result: str, tensors: Sequence[str], element: str, numbers: Sequence[str], parallel: bool) -> Any:
    """Return the kernel that writes `element`, an expression over the index ``{0}``, to `result`, one of `tensors`."""
    vector = f"block * {LANES} + lane"
    lines = [
        *(line for name in tensors for line in at_address(name, f"{name}_", "count", "float32")),
        f"for t in {'T.parallel' if parallel else 'range'}(threads):",
        *indented(
            [
                f"for block in range(count // {LANES} * t // threads, count // {LANES} * (t + 1) // threads):",
                f"    for lane in T.vectorized({LANES}):",
                f"        {result}[{vector}] = {element.format(vector)}",
            ]
        ),
        f"for i in range(count // {LANES} * {LANES}, count):",
        f"    {result}[i] = {element.format('i')}",
    ]
    arguments = [*(f"{name}_: T.int64" for name in tensors), "count: T.int64"]
    arguments += [*(f"{name}: T.float32" for name in numbers), "threads: T.int64"]
    return kernel(arguments, lines, {})
