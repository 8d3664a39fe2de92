"""TIR kernels for ops where TVM's defaults are many times slower: matmul, softmax, layer norm.

A matmul is blocked into a few rows by one panel of columns, two vectors wide, which stay in registers during the
reduction::

    a (m, k)   b (k, n)   y (m, n)        acc[r, :] += a[row r, k] * b[k, panel]

The last panel overlaps the one before it and needs no padding. Products with weights are not computed here but by
`distir_relax.kernels.packing`.

A size is a number, or the name of a variable of the kernel, which gets its value from the buffers of a call: ``n0``.

Kernel texts are cached, so that equal shapes share a kernel. Element types are float32 and float64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, TypeAlias

from distir_relax.kernels.prim_func_text import parse_prim_func
from distir_relax.runtime.backends.tvm.vector_functions import exp

FLOATS = {"float32": 4, "float64": 8}
VARIABLE = "n"
"""The names of variables are this and a number."""
Dim: TypeAlias = "int | str"


@dataclass(frozen=True)
class Machine:
    """Target parameters: bytes of a vector register, rows that fit the registers, threads of the rank."""

    vector_bytes: int = 64
    rows: int = 12
    threads: int = 1

    def lanes(self, dtype: str) -> int:
        """Return the number of elements of one vector register."""
        return self.vector_bytes // FLOATS[dtype]


@cache
def product(a: tuple[Dim, ...], b: tuple[Dim, ...], dtype: str, machine: Machine) -> Any:
    """Build the kernel ``a (..., m, k), b (..., k, n) -> y (..., m, n)``; leading dims broadcast."""
    m, k, n = a[-2], a[-1], b[-1]
    rank = max(len(a), len(b)) - 2
    batch = _broadcast(a[:-2], b[:-2])
    names = [f"b{i}" for i in range(rank)]
    where = {shape: "".join(f"{name}, " if extent != 1 else "0, "
                            for name, extent in zip(names[rank - len(shape) + 2 :], shape[:-2], strict=True))
             for shape in (a, b)}  # fmt: skip
    out = "".join(f"{name}, " for name in names)

    def panels(columns: Sequence[int], size: int) -> str:
        """Write the product by panels of columns, as vectors of `size`; the last panel overlaps the one before it."""
        width = len(columns) * size
        last = max(0, n - width) if isinstance(n, int) else f"{n} - {width}"
        start = f"T.min(p * {width}, {last})"
        spans = [_span(f"{start} + {column}", size) for column in columns]

        def store(row: str, r: str) -> list[str]:
            return [
                f"y[{out}{row}, {span}] = acc[{_span(f'{r} * {width} + {i * size}', size)}]"
                for i, span in enumerate(spans)
            ]

        right = [f"b[{where[b]}k, {span}]" for span in spans]
        vectors = [(i * size, size) for i in range(len(columns))]
        body = "".join(
            _block(k, count, rows, first, vectors, width, right, dtype, f"a[{where[a]}{{row}}, k]", store)
            for count, rows, first in _row_blocks(m, machine.rows)
        )
        count = -(-n // width) if isinstance(n, int) else f"({n} + {width - 1}) // {width}"
        return f"for p in range({count}):\n{_indent(body)}"

    lanes = machine.lanes(dtype)
    if isinstance(n, int):
        text = panels(*_columns(n, lanes))
    else:
        wide, narrow = panels([0, lanes], lanes), panels([0], 1)
        text = f"if {n} >= {2 * lanes}:\n{_indent(wide)}else:\n{_indent(narrow)}"
    for position, (name, extent) in reversed(list(enumerate(zip(names, batch, strict=True)))):
        threads = machine.threads if position == 0 else 1
        text = f"for {name} in {_outer(extent, threads)}:\n{_indent(text)}"
    return _function(f"a: {_buffer(a, dtype)}, b: {_buffer(b, dtype)}, y: {_buffer((*batch, m, n), dtype)}", text)


@cache
def softmax(rows: Dim, n: Dim, dtype: str, machine: Machine) -> Any:
    """Build softmax over the last dim: ``x (rows, n) -> y (rows, n)``."""
    lanes = machine.lanes(dtype)
    text = f"""
for i in {_outer(rows, machine.threads)}:
    best = T.sblock_alloc_buffer(({lanes},), "{dtype}", scope="local")
    total = T.sblock_alloc_buffer(({lanes},), "{dtype}", scope="local")
    for v in T.vectorized({lanes}):
        best[v] = T.min_value("{dtype}")
        total[v] = T.{dtype}(0)
{_along(n, lanes, "best[{v}] = T.max(best[{v}], x[i, {c}])")}
    for v in range(1, {lanes}):
        best[0] = T.max(best[0], best[v])
{_along(n, lanes, "y[i, {c}] = exp(x[i, {c}] - best[0])", "total[{v}] = total[{v}] + y[i, {c}]")}
    for v in range(1, {lanes}):
        total[0] = total[0] + total[v]
    total[0] = T.{dtype}(1) / total[0]
{_along(n, lanes, "y[i, {c}] = y[i, {c}] * total[0]")}
"""
    return _function(f"x: {_buffer((rows, n), dtype)}, y: {_buffer((rows, n), dtype)}", text)


@cache
def layer_norm(rows: Dim, n: int, dtype: str, epsilon: float, machine: Machine) -> Any:
    """Build layer norm over the last dim: ``x (rows, n), scale (n), shift (n) -> y (rows, n)``."""
    lanes = machine.lanes(dtype)
    text = f"""
for i in {_outer(rows, machine.threads)}:
    mean = T.sblock_alloc_buffer(({lanes},), "{dtype}", scope="local")
    spread = T.sblock_alloc_buffer(({lanes},), "{dtype}", scope="local")
    for v in T.vectorized({lanes}):
        mean[v] = T.{dtype}(0)
        spread[v] = T.{dtype}(0)
{_along(n, lanes, "mean[{v}] = mean[{v}] + x[i, {c}]")}
    for v in range(1, {lanes}):
        mean[0] = mean[0] + mean[v]
    mean[0] = mean[0] * T.{dtype}({1.0 / n!r})
{_along(n, lanes, "spread[{v}] = spread[{v}] + (x[i, {c}] - mean[0]) * (x[i, {c}] - mean[0])")}
    for v in range(1, {lanes}):
        spread[0] = spread[0] + spread[v]
    spread[0] = T.{dtype}(1) / T.sqrt(spread[0] * T.{dtype}({1.0 / n!r}) + T.{dtype}({epsilon!r}))
{_along(n, lanes, "y[i, {c}] = (x[i, {c}] - mean[0]) * spread[0] * scale[{c}] + shift[{c}]")}
"""
    row = _buffer((n,), dtype)
    arguments = f"x: {_buffer((rows, n), dtype)}, scale: {row}, shift: {row}, y: {_buffer((rows, n), dtype)}"
    return _function(arguments, text)


def _block(
    k: Dim, count: Dim, size: int, first: Dim, vectors: Sequence[tuple[int, int]], width: int, right: Sequence[str],
    dtype: str, left: str, store: Any,
) -> str:  # fmt: skip
    """Write `count` blocks of `size` rows, starting at row `first`, by one panel of columns."""
    row = f"{first} + i * {size} + r"
    zero = [f"acc[{_span(f'r * {width} + {s}', z)}] = {_fill(f'T.{dtype}(0)', z)}" for s, z in vectors]
    add = []
    for (s, z), column in zip(vectors, right, strict=True):
        cell = f"acc[{_span(f'r * {width} + {s}', z)}]"
        add.append(f"{cell} = {cell} + {_fill(left.format(row=row), z)} * {column}")
    lines = [
        f"for i in range({count}):",
        f'    acc = T.sblock_alloc_buffer(({size * width},), "{dtype}", scope="local")',
    ]
    for head, body in (("", zero), (f"for k in range({k}):", add), ("", store(row, "r"))):
        deep = "    " if not head else "        "
        lines += [f"    {head}"] if head else []
        lines += [f"{deep}for r in T.unroll({size}):", *(f"{deep}    {line}" for line in body)]
    return "\n".join(lines) + "\n"


def _row_blocks(m: Dim, most: int) -> list[tuple[Dim, int, Dim]]:
    """Cover m rows by blocks of at most `most`: (number of blocks, rows of each, first row).

    Their heights are nearly equal. If m is a variable, blocks of `most` rows come first, then lower ones.
    """
    if isinstance(m, str):
        low = most // 3
        rest = f"{m} % {most}"
        return [
            (f"{m} // {most}", most, "0"),
            (f"{rest} // {low}", low, f"{m} - {rest}"),
            (f"{rest} % {low}", 1, f"{m} - {rest} % {low}"),
        ]
    count = -(-m // most)
    small, larger = divmod(m, count)
    blocks: list[tuple[Dim, int, Dim]] = [(larger, small + 1, 0), (count - larger, small, larger * (small + 1))]
    return [block for block in blocks if block[0]]


def _broadcast(first: Sequence[Dim], second: Sequence[Dim]) -> list[Dim]:
    """Return the dims to which two lists of leading dims broadcast."""
    pairs = zip_longest(reversed(first), reversed(second), fillvalue=1)
    return [b if a == 1 else a for a, b in pairs][::-1]


def _columns(n: int, lanes: int) -> tuple[list[int], int]:
    """Return the first columns of the vectors of an unpacked panel of at most n columns, and their lanes.

    The vectors may overlap.
    """
    if n >= 2 * lanes:
        return [0, lanes], lanes
    size = min(lanes, 1 << (n.bit_length() - 1))
    return ([0] if size == n else [0, n - size]), size


def _along(n: Dim, lanes: int, *statements: str) -> str:
    """Write statements for each column ``{c}`` of a row, one vector of lanes ``{v}`` at a time."""
    text = ""
    parts: list[tuple[Dim, Dim, Dim]]
    if isinstance(n, int):
        parts = [(lanes, n // lanes, 0), (n % lanes, 1 if n % lanes else 0, n - n % lanes)]
    else:
        parts = [(lanes, f"{n} // {lanes}", 0), (f"{n} % {lanes}", 1, f"{n} - {n} % {lanes}")]
    for extent, count, start in parts:
        if count == 0:
            continue
        kind = f"T.vectorized({extent})" if extent == lanes else f"range({extent})"
        text += f"    for j in range({count}):\n        for v in {kind}:\n"
        text += "".join(f"            {s.format(v='v', c=f'{start} + j * {lanes} + v')}\n" for s in statements)
    return text


def _outer(extent: Dim, threads: int) -> str:
    is_parallel = threads > 1 and (isinstance(extent, str) or extent > 1)
    return f"T.parallel({extent})" if is_parallel else f"range({extent})"


def _span(start: str | int, size: int) -> str:
    return f"T.Ramp({start}, 1, {size})" if size > 1 else str(start)


def _fill(value: str, size: int) -> str:
    return f"T.Broadcast({value}, {size})" if size > 1 else value


def _buffer(shape: Sequence[Dim], dtype: str) -> str:
    return f'T.Buffer(({", ".join(map(str, shape))},), "{dtype}")'


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.strip("\n").splitlines())


def _function(arguments: str, body: str) -> Any:
    from tvm import tirx as expressions

    # The buffers of a call never alias, and nothing may be fused into this kernel.
    attrs = '    T.func_attr({"tirx.noalias": True, "op_pattern": 8})\n'
    # TVM's analyses expect a root block.
    block = f'    with T.sblock("root"):\n{_indent(_indent(body))}'
    sizes = {name: expressions.Var(name, "int64") for name in re.findall(rf"\b{VARIABLE}\d+\b", arguments)}
    return parse_prim_func(f"kernel({arguments})", f"{attrs}{block}", exp=exp, **sizes)
