"""Elements of a result, each computed from the elements of the operands at its place."""

from __future__ import annotations

from functools import partial
from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, round_to, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.math import erf, exp, sigmoid, tanh
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel

SILU = "{0} * sigmoid({0})"
RELU = "T.Select({0} <= T.float32(0), T.float32(0), {0})"
GELU = "T.float32(0.5) * {0} * (T.float32(1) + erf(T.float32(0.7071067811865476) * {0}))"
# (1 + tanh(u)) / 2 is sigmoid(2 u), without the cancellation.
_ARGUMENT = "T.float32(1.5957691216057308) * ({0} + T.float32(0.044715) * {0} * {0} * {0})"
GELU_TANH = f"{{0}} * sigmoid({_ARGUMENT})"
# Gradients: of operand 0, the gradient of the result is operand 1.
SILU_GRAD = "{1} * sigmoid({0}) * (T.float32(1) + {0} * (T.float32(1) - sigmoid({0})))"
GELU_GRAD = (
    "{1} * (T.float32(0.5) * (T.float32(1) + erf(T.float32(0.7071067811865476) * {0})) + "
    "T.float32(0.3989422804014327) * {0} * exp(T.float32(-0.5) * {0} * {0}))"
)
GELU_TANH_GRAD = (
    f"{{1}} * sigmoid({_ARGUMENT}) * (T.float32(1) + {{0}} * (T.float32(1) - sigmoid({_ARGUMENT})) * "
    "(T.float32(1.5957691216057308) + T.float32(0.21406444881780073) * {0} * {0}))"
)
_MOST = "T.int64(1 << 48)"


def times_next(activation: str) -> str:
    """Return the expression of an activation of operand 0, rounded to its dtype, times operand 1."""
    return f"rounded({activation}) * {{1}}"


@native
def elementwise(expression: str, operands: int, dtype: str, parallel: bool) -> Any:
    """Return the kernel of a float32 `expression` over ``{0}``, ``{1}``, …: ``{0} / (T.float32(1) + exp({1}))``.

    `exp`, `tanh`, `erf`, `sigmoid` and `rounded`, which rounds to `dtype`, are functions. The arguments of the kernel
    are the address of each operand and of the result, each with its stride by row in elements, 0 for one that all rows
    share; the number of rows, of columns, and of threads, which is 1 if it is not `parallel`.
    """
    stored = STORED[dtype]
    names = [f"x{number}" for number in range(operands)]
    arguments = [f"{name}{part}: T.int64" for name in (*names, "y") for part in ("_", "_row")]
    lines = [line for name in (*names, "y") for line in at_address(name, f"{name}_", _MOST, stored)]

    def element(column: str) -> str:
        values = [f"widen({name}[r * {name}_row + {column}])" for name in names]
        return f"y[r * y_row + {column}] = narrow({expression.format(*values)})"

    of_rows = [
        "for r in range(rows * t // threads, rows * (t + 1) // threads):",
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
    lines += [f"for t in {'T.parallel' if parallel else 'range'}(threads):", *indented(of_rows)]
    functions = {"exp": exp, "tanh": tanh, "erf": erf, "sigmoid": sigmoid, "widen": widen}
    functions |= {"narrow": partial(narrow, dtype=dtype), "rounded": partial(round_to, dtype=dtype)}
    return kernel([*arguments, *(f"{name}: T.int64" for name in ("rows", "columns", "threads"))], lines, functions)
