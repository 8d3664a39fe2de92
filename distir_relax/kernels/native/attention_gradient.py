"""Gradients of attention: of queries, keys and values, from that of the attended values.

Each head is computed by one thread, in blocks of rows, from copies in float32 whose rows are whole vectors. Scores and
weights are stored by key, with the rows of a block in the lanes of vectors, as in `attention`: sums over the keys of a
row need no sums across lanes. All five products are sums of outer products, whose results are in registers:

    scores      (key, row)     = k (key, j) x q (j, row)          weights = softmax of scores over keys
    grads       (key, row)     = v (key, j) x g (j, row)          slopes = weights * (grads - sum of weights * grads)
    of values   (key, column) += weights (key, row) x g (row, column)
    of keys     (key, column) += slopes (key, row) x q (row, column)
    of queries  (row, column)  = slopes (row, key) x k (key, column)

Weights are computed again from queries and keys, which takes a sixth of the time: nothing is saved by the forward.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.math import exp2_to_one, fma
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel, local

LEAST_SCORES = 1 << 15
"""Scores from which the kernel is worth its compilation."""
_MOST = 6
"""Vectors of rows of a block: a block of the weights of 512 keys is 200 KB, and stays in the second cache."""
_KEYS, _VECTORS = 8, 2
"""A tile of a product that is in registers."""
_ALL = f"T.Ramp(0, 1, {LANES})"
_VECTOR = f"for lane in T.vectorized({LANES}):"
_LEAST, _LEAST_SEEN = "T.float32(-3.4e38)", "T.float32(-1.7e38)"
"""The score of a key that a row does not attend to, and a limit above it."""
_SIZE = "T.int64(1 << 48)"
"""More than the elements of any buffer."""
_TENSORS = ("q", "k", "v", "g", "of_q", "of_k", "of_v")


def gradient_scratch(rows: int, tokens: int, width: int, value_width: int) -> int:
    """Return the float32 elements that a thread of `attention_grad` needs."""
    lanes = _block_vectors(rows) * LANES
    columns = _padded(width) + _padded(value_width)
    keys = -(-tokens // _KEYS) * _KEYS
    return 2 * keys * columns + 2 * keys * lanes + 3 * lanes * columns + 2 * LANES


def _block_vectors(rows: int) -> int:
    vectors = -(-rows // LANES)
    return -(-vectors // max(1, -(-vectors // _MOST)))


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


@native
def attention_grad(width: int, value_width: int, dtype: str, masked: bool, parallel: bool) -> Any:
    """Return the kernel for the gradients of attention to keys of `width` and values of `value_width` elements.

    It takes

    - the addresses of queries (b, h, s, width), keys (b, h, t, width), values (b, h, t, value_width), the gradient of
      the result (b, h, s, value_width), and of the gradients of queries, keys and values, each with its strides by
      batch, head and row in elements; that of the last dim is 1;
    - if it is `masked`, the address of the mask (b, h, t, lanes), float32, negative for a key that a row does not
      attend to, with its strides by batch and head; lanes are the rows up to a whole vector;
    - the address of `gradient_scratch` float32 for each thread;
    - the numbers b * h, h, s and t; `ahead`, the number of keys after key i that row i attends to, 0 if causal; the
      scale of the scores, and the number of threads, 1 if it is not `parallel`.

    Sums are float32.
    """
    wide, value_wide = _padded(width), _padded(value_width)
    lines = [line for name in _TENSORS for line in at_address(name, f"{name}_", _SIZE, STORED[dtype])]
    lines += at_address("mask", "mask_", _SIZE, "float32") if masked else []
    lines += [
        f"all_vectors: T.let = (rows + {LANES - 1}) // {LANES}",
        f"blocks: T.let = (all_vectors + {_MOST - 1}) // {_MOST}",
        "most: T.let = (all_vectors + blocks - 1) // blocks",
        f"lanes: T.let = most * {LANES}",
        f"keys: T.let = (tokens + {_KEYS - 1}) // {_KEYS} * {_KEYS}",
        f"to_power: T.let = scale * T.float32({math.log2(math.e)!r})",
    ]
    sizes = {
        "key": f"keys * {wide}", "value": f"keys * {value_wide}",
        "key_sum": f"keys * {wide}", "value_sum": f"keys * {value_wide}",
        "weight": "keys * lanes", "slope": "keys * lanes",
        "query": f"lanes * {wide}", "grad": f"lanes * {value_wide}",
        "query_lanes": f"lanes * {wide}", "grad_lanes": f"lanes * {value_wide}", "query_sum": f"lanes * {wide}",
    }  # fmt: skip
    of_thread = list[str]()
    total = f"(2 * keys + 3 * lanes) * {wide + value_wide} + 2 * keys * lanes + {2 * LANES}"
    at = f"scratch_ + t * ({total}) * 4"
    for name, size in sizes.items():
        of_thread += at_address(name, at, _SIZE, "float32")
        at = f"{at} + {size} * 4"
    registers = [f"tile_{i}_{c}" for i in range(_KEYS) for c in range(_VECTORS)]
    of_thread += [line for name in (*registers, "best", "total", "x", "y") for line in local(name)]
    of_unit = [
        "b: T.let = unit // heads",
        "h: T.let = unit % heads",
        *(f"{name}_from: T.let = b * {name}_batch + h * {name}_head" for name in _TENSORS),
        *(["mask_from: T.let = b * mask_batch + h * mask_head"] if masked else []),
        *_copy_rows("key", "k", "0", "tokens", "keys", width),
        *_copy_rows("value", "v", "0", "tokens", "keys", value_width),
        *_zero("key_sum", f"keys * {wide}"),
        *_zero("value_sum", f"keys * {value_wide}"),
        "for block in range(blocks):",
        *indented(_block(width, value_width, masked)),
        *_write_rows("of_k", "key_sum", "0", "tokens", width),
        *_write_rows("of_v", "value_sum", "0", "tokens", value_width),
    ]
    of_thread += ["for unit in range(units * t // threads, units * (t + 1) // threads):", *indented(of_unit)]
    lines += [f"for t in {'T.parallel' if parallel else 'range'}(threads):", *indented(of_thread)]
    arguments = [f"{name}{end}: T.int64" for name in _TENSORS for end in ("_", "_batch", "_head", "_row")]
    arguments += [f"mask{end}: T.int64" for end in ("_", "_batch", "_head") if masked]
    arguments += [f"{name}: T.int64" for name in ("scratch_", "units", "heads", "rows", "tokens", "ahead")]
    functions = {"exp2_to_one": exp2_to_one, "fma": fma, "narrow": partial(narrow, dtype=dtype), "widen": widen}
    return kernel([*arguments, "scale: T.float32", "threads: T.int64"], lines, functions)


def _block(width: int, value_width: int, masked: bool) -> list[str]:
    """Return the lines that add a block of rows."""
    wide, value_wide = _padded(width), _padded(value_width)
    return [
        "row: T.let = block * lanes",
        "vectors: T.let = T.min(most, all_vectors - block * most)",
        "count: T.let = T.min(lanes, rows - row)",
        f"end: T.let = T.min(tokens, row + vectors * {LANES} + ahead)",
        f"tiles: T.let = (end + {_KEYS - 1}) // {_KEYS}",
        *_copy_rows("query", "q", "row", "count", f"vectors * {LANES}", width),
        *_copy_rows("grad", "g", "row", "count", f"vectors * {LANES}", value_width),
        *_transpose("query_lanes", "query", wide),
        *_transpose("grad_lanes", "grad", value_wide),
        "for tile in range(tiles):",
        *indented(_across("weight", "key", "query_lanes", wide)),
        *indented(_across("slope", "value", "grad_lanes", value_wide)),
        "for vector in range(vectors):",
        *indented(_softmax(masked)),
        "for tile in range(tiles):",
        *indented(_along("value_sum", "weight", "grad", value_wide)),
        *indented(_along("key_sum", "slope", "query", wide)),
        f"for tile in range(vectors * {LANES // _KEYS}):",
        *indented(
            [
                line
                for first, count in _column_tiles(wide)
                for line in _tile(
                    count, "end", f"slope[step * lanes + tile * {_KEYS} + {{i}}]",
                    f"key[T.Ramp(step * {wide} + {first} + {{c}}, 1, {LANES})]",
                    f"query_sum[T.Ramp((tile * {_KEYS} + {{i}}) * {wide} + {first} + {{c}}, 1, {LANES})]", False,
                )
            ]
        ),
        *_write_rows("of_q", "query_sum", "row", "count", width),
    ]  # fmt: skip


def _across(result: str, keys: str, lanes: str, wide: int) -> list[str]:
    """Return the lines for a tile of keys of ``result (key, row) = keys (key, j) x lanes (j, row)``."""

    def of(count: int, first: str) -> list[str]:
        return _tile(
            count, str(wide), f"{keys}[(tile * {_KEYS} + {{i}}) * {wide} + step]",
            f"{lanes}[T.Ramp(step * lanes + ({first}) + {{c}}, 1, {LANES})]",
            f"{result}[T.Ramp((tile * {_KEYS} + {{i}}) * lanes + ({first}) + {{c}}, 1, {LANES})]", False,
        )  # fmt: skip

    return [
        f"for pair in range(vectors // {_VECTORS}):",
        *indented(of(_VECTORS, f"pair * {_VECTORS * LANES}")),
        f"if vectors % {_VECTORS} == 1:",
        *indented(of(1, f"(vectors - 1) * {LANES}")),
    ]


def _along(result: str, weights: str, rows: str, wide: int) -> list[str]:
    """Return the lines for a tile of keys of ``result (key, column) += weights (key, row) x rows (row, column)``."""
    return [
        line
        for first, count in _column_tiles(wide)
        for line in _tile(
            count, "count", f"{weights}[(tile * {_KEYS} + {{i}}) * lanes + step]",
            f"{rows}[T.Ramp(step * {wide} + {first} + {{c}}, 1, {LANES})]",
            f"{result}[T.Ramp((tile * {_KEYS} + {{i}}) * {wide} + {first} + {{c}}, 1, {LANES})]", True,
        )
    ]  # fmt: skip


def _column_tiles(wide: int) -> list[tuple[int, int]]:
    """Return the first column and the number of vectors of each tile."""
    step = _VECTORS * LANES
    return [(first, min(_VECTORS, (wide - first) // LANES)) for first in range(0, wide, step)]


def _tile(count: int, steps: str, a: str, b: str, result: str, added: bool) -> list[str]:
    """Return the lines for a tile of `count` vectors of a sum of outer products, added to its result if `added`.

    `a` is an element of the first factor for ``step`` and row ``i`` of the tile, `b` the vector of the second at ``c``.
    """
    tile = [(i, c, f"tile_{i}_{c}[{_ALL}]") for i in range(_KEYS) for c in range(count)]
    zero = f"T.Broadcast(T.float32(0), {LANES})"
    lines = [f"{name} = {result.format(i=i, c=c * LANES) if added else zero}" for i, c, name in tile]
    lines.append(f"for step in range({steps}):")
    for i, c, name in tile:
        lines.append(f"    {name} = fma(T.Broadcast({a.format(i=i)}, {LANES}), {b.format(c=c * LANES)}, {name})")
    return lines + [f"{result.format(i=i, c=c * LANES)} = {name}" for i, c, name in tile]


def _softmax(masked: bool) -> list[str]:
    """Return the lines that make weights and slopes of a vector of rows from scores and grads."""
    at = f"key_of * lanes + vector * {LANES} + lane"
    allowed = f"key_of <= row + vector * {LANES} + lane + ahead"
    if masked:
        number = f"mask[mask_from + key_of * all_vectors * {LANES} + row + vector * {LANES} + lane]"
        allowed = f"T.And({allowed}, {number} >= T.float32(0))"
    score = f"T.Select({allowed}, weight[{at}] * to_power, {_LEAST})"
    each = "for key_of in range(end):"
    power = "exp2_to_one(x[lane] - best[lane])"
    power = f"T.Select(x[lane] > {_LEAST_SEEN}, {power}, T.float32(0))" if masked else power
    return [
        *_lanes(f"best[lane] = {_LEAST}", "total[lane] = T.float32(0)"),
        each,
        *indented(_lanes(f"x[lane] = {score}", f"weight[{at}] = x[lane]", "best[lane] = T.max(best[lane], x[lane])")),
        each,
        *indented(
            _lanes(
                f"x[lane] = weight[{at}]", f"x[lane] = {power}", f"weight[{at}] = x[lane]",
                "total[lane] = total[lane] + x[lane]",
            )
        ),
        *_lanes("best[lane] = T.Select(total[lane] == T.float32(0), T.float32(0), T.float32(1) / total[lane])"),
        *_lanes("total[lane] = T.float32(0)"),
        each,
        *indented(
            _lanes(
                f"x[lane] = weight[{at}] * best[lane]", f"weight[{at}] = x[lane]",
                f"total[lane] = total[lane] + x[lane] * slope[{at}]",
            )
        ),
        each,
        *indented(_lanes(f"slope[{at}] = weight[{at}] * (slope[{at}] - total[lane]) * scale")),
    ]  # fmt: skip


def _lanes(*lines: str) -> list[str]:
    return [part for line in lines for part in (_VECTOR, f"    {line}")]


def _copy_rows(target: str, source: str, first: str, count: str, padded: str, width: int) -> list[str]:
    """Return the lines that copy `count` rows in float32, with zeros up to whole vectors, and `padded` rows."""
    wide = _padded(width)
    element = f"widen({source}[{source}_from + ({first} + r) * {source}_row + {{}}])"
    copies = _each(width, f"{target}[r * {wide} + {{0}}] = {element.format('{0}')}")
    if wide > width:
        copies += [f"for j in range({width}, {wide}):", f"    {target}[r * {wide} + j] = T.float32(0)"]
    rest = _zero(target, f"({padded} - {count}) * {wide}", f"{count} * {wide}")
    return [f"for r in range({count}):", *indented(copies), *rest]


def _write_rows(target: str, source: str, first: str, count: str, width: int) -> list[str]:
    element = f"{target}[{target}_from + ({first} + r) * {target}_row + {{0}}]"
    line = f"{element} = narrow({source}[r * {_padded(width)} + {{0}}])"
    return [f"for r in range({count}):", *indented(_each(width, line))]


def _zero(name: str, count: str, first: str = "0") -> list[str]:
    """Return the lines that set `count` elements, whole vectors, to zero."""
    place = f"{name}[{first} + vector_of * {LANES} + lane]"
    return [f"for vector_of in range(({count}) // {LANES}):", *indented(_lanes(f"{place} = T.float32(0)"))]


def _transpose(target: str, source: str, wide: int) -> list[str]:
    """Return the lines that copy rows to lanes."""
    return [
        f"for j in range({wide}):",
        "    for vector in range(vectors):",
        *indented(indented(_lanes(
            f"{target}[j * lanes + vector * {LANES} + lane] = {source}[(vector * {LANES} + lane) * {wide} + j]"
        ))),
    ]  # fmt: skip


def _each(width: int, line: str) -> list[str]:
    """Return the loops over `line` for each column ``{0}``: in vectors, and one by one after the last."""
    whole = width // LANES
    lines = list[str]()
    if whole:
        column = f"part * {LANES} + lane"
        lines += [f"for part in range({whole}):", *indented(_lanes(line.format(column)))]
    if width > whole * LANES:
        lines += [f"for j in range({whole * LANES}, {width}):", f"    {line.format('j')}"]
    return lines
