"""Elements of a result, each computed from the elements of the operands at its place."""

from __future__ import annotations

from functools import partial
from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.math import erf, exp, tanh
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel

_MOST = "T.int64(1 << 48)"


@native
def elementwise(expression: str, operands: int, dtype: str) -> Any:
    """Return the kernel of a float32 `expression` over ``{0}``, ``{1}``, …: ``{0} / (T.float32(1) + exp({1}))``.

    `exp`, `tanh` and `erf` are functions. The arguments of the kernel are the address of each operand and of the
    result, each with its stride by row in elements, 0 for one that all rows share; the number of rows, and of columns.
    """
    stored = STORED[dtype]
    names = [f"x{number}" for number in range(operands)]
    arguments = [f"{name}{part}: T.int64" for name in (*names, "y") for part in ("_", "_row")]
    lines = [line for name in (*names, "y") for line in at_address(name, f"{name}_", _MOST, stored)]

    def element(column: str) -> str:
        values = [f"widen({name}[r * {name}_row + {column}])" for name in names]
        return f"y[r * y_row + {column}] = narrow({expression.format(*values)})"

    lines += [
        "for r in range(rows):",
        *indented(
            [
                f"for block in range(columns // {LANES}):",
                f"    for lane in T.vectorized({LANES}):",
                f"        {element(f'block * {LANES} + lane')}",
                f"for j in range(columns // {LANES} * {LANES}, columns):",
                f"    {element('j')}",
            ]
        ),
    ]
    functions = {"exp": exp, "tanh": tanh, "erf": erf, "widen": widen, "narrow": partial(narrow, dtype=dtype)}
    return kernel([*arguments, "rows: T.int64", "columns: T.int64"], lines, functions)
