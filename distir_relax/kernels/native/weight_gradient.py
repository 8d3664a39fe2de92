"""Gradients of weights in float32: the sum of the outer products of rows of two matrices.

Blocks of rows are copied to panels, of `_COLUMNS` columns of one matrix and `_ROWS` of the other, so that a tile of the
result, which is in registers, reads memory in order (Goto and van de Geijn, Anatomy of High-Performance Matrix
Multiplication, 2008).
"""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.math import fma
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel, local

_ROWS, _VECTORS = 8, 2
"""A tile of the result."""
_COLUMNS = _VECTORS * LANES
_BLOCK = 256
"""Most rows of a block: its panel of columns is 32 KB."""
_PANELS, _TILES = 16, 32
"""Panels and tiles whose rows are copied at a time: 768 KB, which stay in the second cache."""
_ALL = f"T.Ramp(0, 1, {LANES})"
_VECTOR = f"for lane in T.vectorized({LANES}):"
_SIZE = "T.int64(1 << 48)"
"""More than the elements of any buffer."""
_TILE = [(i, c, f"tile_{i}_{c}[{_ALL}]") for i in range(_ROWS) for c in range(_VECTORS)]


WEIGHT_GRAD_SCRATCH = _BLOCK * (_PANELS * _COLUMNS + _TILES * _ROWS) + _ROWS * _COLUMNS
"""The float32 elements that each thread of `weight_grad` needs."""


@native
def weight_grad(parallel: bool) -> Any:
    """Return the kernel ``a (m, n), b (m, k) -> result (n, k)``, the sum over m of ``a[m, n] * b[m, k]``.

    It takes the addresses of a, b, result and of `WEIGHT_GRAD_SCRATCH` elements for each thread, then m, n, k, and the
    number of threads, 1 if it is not `parallel`.
    """
    of_chunk = [
        f"begin: T.let = chunk * {_TILES}",
        f"strips: T.let = T.min({_TILES}, tiles - begin)",
        "for q in range(strips):",
        *indented(_copy("strip", "a", "q", "(begin + q)", "n", _ROWS, _ROWS)),
        "for p in range(panels):",
        "    for q in range(strips):",
        f"        if (begin + q + 1) * {_ROWS} <= n:",
        f"            if (first + p + 1) * {_COLUMNS} <= k:",
        *indented(indented(indented(indented(_whole_tile())))),
        "            else:",
        *indented(indented(indented(indented(_part_of_tile())))),
        "        else:",
        *indented(indented(indented(_part_of_tile()))),
    ]
    of_group = [
        f"first: T.let = begin_of_thread + group * {_PANELS}",
        f"panels: T.let = T.min({_PANELS}, end_of_thread - first)",
        "for p in range(panels):",
        *indented(_copy("panel", "b", "p", "(first + p)", "k", _COLUMNS, LANES)),
        f"for chunk in range((tiles + {_TILES - 1}) // {_TILES}):",
        *indented(of_chunk),
    ]
    of_block = [
        "row: T.let = m * block // blocks",
        "count: T.let = m * (block + 1) // blocks - row",
        f"for group in range((end_of_thread - begin_of_thread + {_PANELS - 1}) // {_PANELS}):",
        *indented(of_group),
    ]
    of_thread = [
        "begin_of_thread: T.let = all_panels * t // threads",
        "end_of_thread: T.let = all_panels * (t + 1) // threads",
        f"scratch: T.let = scratch_ + t * {4 * WEIGHT_GRAD_SCRATCH}",
        *at_address("panel", "scratch", _SIZE, "float32"),
        *at_address("strip", f"scratch + {4 * _BLOCK * _PANELS * _COLUMNS}", _SIZE, "float32"),
        *at_address("edge", f"scratch + {4 * (WEIGHT_GRAD_SCRATCH - _ROWS * _COLUMNS)}", _SIZE, "float32"),
        *(line for i, c, _ in _TILE for line in local(f"tile_{i}_{c}")),
        "for block in range(blocks):",
        *indented(of_block),
    ]
    lines = [
        *(line for name in ("a", "b", "result") for line in at_address(name, f"{name}_", _SIZE, "float32")),
        f"all_panels: T.let = (k + {_COLUMNS - 1}) // {_COLUMNS}",
        f"tiles: T.let = (n + {_ROWS - 1}) // {_ROWS}",
        f"blocks: T.let = (m + {_BLOCK - 1}) // {_BLOCK}",
        f"for t in {'T.parallel' if parallel else 'range'}(threads):",
        *indented(of_thread),
    ]
    names = ("a_", "b_", "result_", "scratch_", "m", "n", "k", "threads")
    return kernel([f"{name}: T.int64" for name in names], lines, {"fma": fma})


def _copy(target: str, source: str, number: str, place: str, columns: str, width: int, lanes: int) -> list[str]:
    """Return the lines that copy `width` columns of the block's rows, with zeros after the last column."""
    to, column = f"{target}[({number} * {_BLOCK} + i) * {width} + {{0}}]", f"{place} * {width} + {{0}}"
    element = f"{source}[(row + i) * {columns} + {column}]"
    whole = [
        line
        for start in range(0, width, lanes)
        for line in (
            f"for lane in T.vectorized({lanes}):",
            f"    {to} = {element}".format(f"{start} + lane"),
        )
    ]
    part = f"{to} = T.if_then_else({column} < {columns}, {element}, T.float32(0))".format("j")
    return [
        f"if ({place} + 1) * {width} <= {columns}:",
        "    for i in range(count):",
        *indented(indented(whole)),
        "else:",
        "    for i in range(count):",
        f"        for j in range({width}):",
        f"            {part}",
    ]


def _whole_tile() -> list[str]:
    """Return the lines that add the block's part of a tile to the result, which the first block begins."""
    places = {
        name: f"result[T.Ramp(((begin + q) * {_ROWS} + {i}) * k + (first + p) * {_COLUMNS} + {c * LANES}, 1, {LANES})]"
        for i, c, name in _TILE
    }
    return [
        "if block == 0:",
        *indented(_zeros()),
        "else:",
        *(f"    {name} = {place}" for name, place in places.items()),
        *_sums(),
        *(f"{place} = {name}" for name, place in places.items()),
    ]


def _part_of_tile() -> list[str]:
    """Return the lines for a tile that is not all in the result."""
    place = f"result[((begin + q) * {_ROWS} + i) * k + (first + p) * {_COLUMNS} + j]"
    return [
        *_zeros(),
        *_sums(),
        *(f"edge[T.Ramp({i * _COLUMNS + c * LANES}, 1, {LANES})] = {name}" for i, c, name in _TILE),
        f"for i in range(T.min({_ROWS}, n - (begin + q) * {_ROWS})):",
        f"    for j in range(T.min({_COLUMNS}, k - (first + p) * {_COLUMNS})):",
        f"        {place} = edge[i * {_COLUMNS} + j] + T.if_then_else(block == 0, T.float32(0), {place})",
    ]


def _zeros() -> list[str]:
    return [f"{name} = T.Broadcast(T.float32(0), {LANES})" for _, _, name in _TILE]


def _sums() -> list[str]:
    lines = ["for step in range(count):"]
    for i, c, name in _TILE:
        a = f"T.Broadcast(strip[(q * {_BLOCK} + step) * {_ROWS} + {i}], {LANES})"
        b = f"panel[T.Ramp((p * {_BLOCK} + step) * {_COLUMNS} + {c * LANES}, 1, {LANES})]"
        lines.append(f"    {name} = fma({a}, {b}, {name})")
    return lines
