"""Gradients of layer norm and RMS norm: of the normalized rows, and of weight and bias, which are sums over rows.

The mean and the deviation of a row are computed again: the row is in the first cache, where they cost little. Sums are
in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.script import at_address, indented, kernel, local

_LANES = 32
"""Partial sums of a row: two registers, so that an addition need not wait for the one before."""


@native
def norm_grad(width: int, dtype: str, weight_dtype: str, is_centred: bool, parallel: bool) -> Any:
    """Return the kernel for the gradient of rows of `width` elements, of a layer norm if `is_centred`, or an RMS norm.

    It takes the addresses of rows, weight, gradient of the normalized rows, and result, which may be that of the rows
    or of their gradient; then the number of rows, epsilon, and the number of threads, 1 if it is not `parallel`.
    """
    row, weighted = _centred("i", is_centred), "widen(g[i, {0}]) * widen(weight[{0}])"
    product = f"{weighted} * {row}"
    sums = {"squares": f"{row} * {row}", "products": product, **({"total": weighted} if is_centred else {})}
    along = f"{row} * (scale[0] * scale[0] * products[0] / T.float32({width}))"
    centre = f" - total[0] / T.float32({width})" if is_centred else ""
    lines = [
        *_rows("x", dtype, width),
        *at_address("weight", "weight_", str(width), STORED[weight_dtype]),
        *_rows("g", dtype, width),
        *_rows("result", dtype, width),
        *_for_parts(parallel),
        *indented(
            [
                *local("scale"),
                *(line for name in ("mean", *sums) for line in (*local(name), *local(f"{name}_lanes", _LANES))),
                "for i in range(rows * t // threads, rows * (t + 1) // threads):",
                *indented(
                    [
                        *_mean("i", width, is_centred),
                        *_sums(sums, width),
                        _scale(width),
                        *_each([f"result[i, {{0}}] = narrow(scale[0] * ({weighted}{centre} - {along}))"], width),
                    ]
                ),
            ]
        ),
    ]
    arguments = _arguments("x_", "weight_", "g_", "result_", "rows")
    functions = {"widen": widen, "narrow": partial(narrow, dtype=dtype)}
    return kernel([*arguments, "epsilon: T.float32", "threads: T.int64"], lines, functions)


@native
def norm_weight_grad(width: int, dtype: str, weight_dtype: str, is_centred: bool, parallel: bool) -> Any:
    """Return the kernel for the gradients of the weight and, if `is_centred`, the bias of a norm of `width` elements.

    It takes the addresses of rows, gradient of the normalized rows, gradient of the weight, gradient of the bias, and
    of 2 x `width` float32 for each thread, where that sums; then the number of rows, epsilon, and the number of
    threads, 1 if it is not `parallel`.
    """
    row = _centred("i", is_centred)
    results = ("of_weight", "of_bias") if is_centred else ("of_weight",)
    terms = {"of_weight": f"widen(g[i, {{0}}]) * ({row} * scale[0])", "of_bias": "widen(g[i, {0}])"}
    lines = [
        *_rows("x", dtype, width),
        *_rows("g", dtype, width),
        *(line for name in results for line in at_address(name, f"{name}_", str(width), STORED[weight_dtype])),
        *at_address("sums", "sums_", f"threads, 2, {width}", "float32"),
        *_for_parts(parallel),
        *indented(
            [
                *(line for name in ("mean", "scale", "squares", "mean_lanes", "squares_lanes")
                  for line in local(name, _LANES)),
                f"for j in range({2 * width}):",
                f"    sums[t, j // {width}, j % {width}] = T.float32(0)",
                "for i in range(rows * t // threads, rows * (t + 1) // threads):",
                *indented(
                    [
                        *_mean("i", width, is_centred),
                        *_sums({"squares": f"{row} * {row}"}, width),
                        _scale(width),
                        *_each([f"sums[t, {k}, {{0}}] += {terms[name]}" for k, name in enumerate(results)], width),
                    ]
                ),
            ]
        ),
        "for t in range(1, threads):",
        f"    for j in range({width}):",
        *(f"        sums[0, {k}, j] += sums[t, {k}, j]" for k, _ in enumerate(results)),
        f"for j in range({width}):",
        *(f"    {name}[j] = narrow(sums[0, {k}, j])" for k, name in enumerate(results)),
    ]  # fmt: skip
    arguments = _arguments("x_", "g_", "of_weight_", "of_bias_", "sums_", "rows")
    functions = {"widen": widen, "narrow": partial(narrow, dtype=weight_dtype)}
    return kernel([*arguments, "epsilon: T.float32", "threads: T.int64"], lines, functions)


def _arguments(*names: str) -> list[str]:
    return [f"{name}: T.int64" for name in names]


def _rows(name: str, dtype: str, width: int) -> list[str]:
    return at_address(name, f"{name}_", f"rows, {width}", STORED[dtype])


def _for_parts(parallel: bool) -> Sequence[str]:
    return [f"for t in {'T.parallel' if parallel else 'range'}(threads):"]


def _centred(row: str, is_centred: bool) -> str:
    """Return the expression of an element of a row minus its mean, if the norm subtracts it."""
    return f"(widen(x[{row}, {{0}}]) - mean[0])" if is_centred else f"widen(x[{row}, {{0}}])"


def _mean(row: str, width: int, is_centred: bool) -> list[str]:
    """Return the lines that compute the mean of a row."""
    if not is_centred:
        return []
    return [*_sums({"mean": f"widen(x[{row}, {{0}}])"}, width), f"mean[0] = mean[0] / T.float32({width})"]


def _scale(width: int) -> str:
    return f"scale[0] = T.float32(1) / T.sqrt(squares[0] / T.float32({width}) + epsilon)"


def _each(lines: Sequence[str], width: int) -> list[str]:
    """Return the loops that run `lines`, over the column ``{0}``, for all columns."""
    return [
        f"for block in range({width // _LANES}):",
        f"    for lane in T.vectorized({_LANES}):",
        *(f"        {line.format(f'block * {_LANES} + lane')}" for line in lines),
        f"for j in range({width // _LANES * _LANES}, {width}):",
        *(f"    {line.format('j')}" for line in lines),
    ]


def _sums(terms: dict[str, str], width: int) -> list[str]:
    """Return the lines that sum up `terms`, expressions over the column ``{0}``, under their names."""
    lines = [f"for lane in T.vectorized({_LANES}):", *(f"    {name}_lanes[lane] = T.float32(0)" for name in terms)]
    lines += [f"for block in range({width // _LANES}):", f"    for lane in T.vectorized({_LANES}):"]
    column = f"block * {_LANES} + lane"
    lines += [f"        {name}_lanes[lane] += {term.format(column)}" for name, term in terms.items()]
    for half in (_LANES >> step for step in range(1, _LANES.bit_length())):
        lines += [f"for lane in T.vectorized({half}):" if half > 1 else "for lane in range(1):"]
        lines += [f"    {name}_lanes[lane] += {name}_lanes[lane + {half}]" for name in terms]
    lines += [f"{name}[0] = {name}_lanes[0]" for name in terms]
    lines += [
        f"for j in range({width // _LANES * _LANES}, {width}):",
        *(f"    {name}[0] += {term.format('j')}" for name, term in terms.items()),
    ]
    return lines
