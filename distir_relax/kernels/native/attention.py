"""Attention of the new positions of several requests, each of which attends to its own keys and values.

Blocks of rows attend to blocks of keys, one after the other, with a running maximum and sum of each row [1]. Scores are
stored by key, with the rows of a block in the lanes of vectors, so that maximum and sum of a row need no sums across
lanes, and the heads that share keys are rows of one block. Blocks of keys begin at multiples of their size: a row's
result does not depend on the rows that are computed with it.

[1] Dao et al., FlashAttention, 2022.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.math import exp
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel, local

KEYS = 64
"""Keys of a block."""
_MOST_ROWS = 96
_TOGETHER = 8
"""Keys whose scores are computed at the same time."""
_ROWS, _COLUMNS = 4, 4
"""Rows, and vectors of columns, whose values are added at the same time."""
_SCORES = tuple(f"score_{number}" for number in range(_TOGETHER))
_SUMS = tuple(f"sum_{row}_{column}" for row in range(_ROWS) for column in range(_COLUMNS))
_PART = ("cache", "row", "rows", "start", "past")
NUMBERS_OF_BLOCK = len(_PART)
"""Numbers that describe a block of rows to the kernel."""
_LEAST = "T.float32(-3.4e38)"
"""The score of a key that a row does not attend to."""
_MOST = "T.int64(1 << 48)"
"""More than the elements of any buffer."""


def rows_of_block(group: int) -> int:
    """Return the number of positions of a block, if `group` heads share keys."""
    return max(1, _MOST_ROWS // group)


@native
def attend_requests(heads: int, group: int, width: int, value_width: int, dtype: str) -> Any:
    """Return the kernel that appends new keys and values to those of each request, and attends to them.

    `heads` are those of keys and values, of `width` and `value_width` elements, and `group` the query heads of each.
    The arguments of the kernel:

    - for each request six int64: addresses of keys and of values, each with their strides by head and by position;
    - for each block five int64: the number of its request, its first row, its number of rows (`rows_of_block` at most),
      the first row of the request, and the number of its earlier positions; and how many blocks there are;
    - for each row two int64: the first position that it attends to, and the one after the last;
    - addresses of queries, new keys, new values and results, each with their strides by head and by row;
    - the scale of the scores, and the number of threads.

    All strides are in elements, that of the last dim is 1. It computes in float32.
    """
    stored = STORED[dtype]
    padded = -(-rows_of_block(group) * group // LANES) * LANES
    columns = -(-value_width // LANES) * LANES
    floats = {"query": width * padded, "key": KEYS * width, "value": KEYS * columns, "score": KEYS * padded}
    floats |= {"sums": padded * columns, "top": padded, "total": padded, "factor": padded}
    sizes = {name: (size, "float32") for name, size in floats.items()}
    sizes |= dict.fromkeys(("first_key", "end_key"), (padded, "int32")) | {"ends": (2, "int64")}
    names = ("q", "new_k", "new_v", "y")
    arguments = ["caches_: T.int64", "parts_: T.int64", "blocks: T.int64", "limits_: T.int64"]
    arguments += [f"{name}{part}: T.int64" for name in names for part in ("_", "_head", "_row")]
    lines = [line for name in ("caches", "parts", "limits") for line in at_address(name, f"{name}_", _MOST, "int64")]
    lines += [line for name in names for line in at_address(name, f"{name}_", _MOST, stored)]
    of_thread = [f'{name} = T.alloc_buffer(({size},), "{kind}", scope="local")' for name, (size, kind) in sizes.items()]
    of_thread += [line for name in (*_SCORES, "best", *_SUMS) for line in local(name)]
    of_keys = [
        f"base: T.let = turn_of_keys * {KEYS}",
        f"count: T.let = T.min(ends[1] - base, T.int64({KEYS}))",
        f"steps: T.let = (count + {_TOGETHER - 1}) // {_TOGETHER}",
        *_read("k", "key", width, width),
        *_read("v", "value", value_width, columns),
        *_score(width, padded),
        *_add_values(padded, columns),
    ]
    of_block = [
        f"head: T.let = unit % {heads}",
        *(
            f"{name}: T.let = parts[unit // {heads} * {NUMBERS_OF_BLOCK} + {number}]"
            for number, name in enumerate(_PART)
        ),
        *at_address("k", "caches[cache * 6]", _MOST, stored),
        *at_address("v", "caches[cache * 6 + 3]", _MOST, stored),
        "k_from: T.let = head * caches[cache * 6 + 1]",
        "k_step: T.let = caches[cache * 6 + 2]",
        "v_from: T.let = head * caches[cache * 6 + 4]",
        "v_step: T.let = caches[cache * 6 + 5]",
        *_append("k", width),
        *_append("v", value_width),
        *_begin(group, width, padded, columns),
        f"for turn_of_keys in range(ends[0] // {KEYS}, (ends[1] + {KEYS - 1}) // {KEYS}):",
        *indented(of_keys),
        *_write(group, value_width, columns),
    ]
    units = f"blocks * {heads}"
    of_thread += [f"for turn in range(({units} + threads - 1) // threads):"]
    of_thread += indented(["unit: T.let = turn * threads + t", f"if unit < {units}:", *indented(of_block)])
    lines += ["for t in T.parallel(threads):", *indented(of_thread)]
    functions = {"exp": exp, "widen": widen, "narrow": partial(narrow, dtype=dtype)}
    return kernel([*arguments, "scale: T.float32", "threads: T.int64"], lines, functions)


def _append(name: str, width: int) -> list[str]:
    """Write the new keys or values of the block's rows after the earlier ones of the request."""
    return [
        "for r in range(rows):",
        f"    for j in range({width}):",
        f"        {name}[{name}_from + (past + row - start + r) * {name}_step + j] = "
        f"new_{name}[head * new_{name}_head + (row + r) * new_{name}_row + j]",
    ]


def _begin(group: int, width: int, padded: int, columns: int) -> list[str]:
    """Read queries and limits of the rows; those after the last, up to whole vectors, attend to nothing."""
    lane = f"r * {group} + g"
    return [
        f"vectors: T.let = (rows * {group} + {LANES - 1}) // {LANES}",
        f"row_parts: T.let = (rows * {group} + {_ROWS - 1}) // {_ROWS}",
        f"for lane in range(rows * {group}, vectors * {LANES}):",
        f"    for j in range({width}):",
        f"        query[j * {padded} + lane] = T.float32(0)",
        "for r in range(rows):",
        f"    for g in range({group}):",
        f"        for j in range({width}):",
        f"            query[j * {padded} + {lane}] = "
        f"widen(q[(head * {group} + g) * q_head + (row + r) * q_row + j]) * scale",
        f"for lane in range(vectors * {LANES}):",
        f"    top[lane] = {_LEAST}",
        "    total[lane] = T.float32(0)",
        "    first_key[lane] = 0",
        "    end_key[lane] = 0",
        "ends[0] = limits[row * 2]",
        "ends[1] = limits[row * 2 + 1]",
        "for r in range(rows):",
        "    ends[0] = T.min(ends[0], limits[(row + r) * 2])",
        "    ends[1] = T.max(ends[1], limits[(row + r) * 2 + 1])",
        f"    for g in range({group}):",
        f"        first_key[{lane}] = T.cast(limits[(row + r) * 2], 'int32')",
        f"        end_key[{lane}] = T.cast(limits[(row + r) * 2 + 1], 'int32')",
        f"for j in range(vectors * {LANES * columns}):",
        "    sums[j] = T.float32(0)",
    ]


def _read(name: str, target: str, width: int, columns: int) -> list[str]:
    """Read a block of keys or values as float32: earlier ones from the cache, others from where it gets them from."""
    whole = width // LANES * LANES
    copies = [
        ("count_old", f"{name}[{name}_from + (base + i) * {name}_step + {{j}}]", "i"),
        (
            "count - count_old",
            f"new_{name}[head * new_{name}_head + (start + base + count_old + i - past) * new_{name}_row + {{j}}]",
            "count_old + i",
        ),
    ]
    lines = ["count_old: T.let = T.max(T.int64(0), T.min(count, past - base))"] if name == "k" else []
    for count, source, to in copies:
        lines += [f"for i in range({count}):"]
        if whole:
            lines += [
                f"    for block in range({whole // LANES}):",
                f"        for lane in T.vectorized({LANES}):",
                f"            {target}[({to}) * {columns} + block * {LANES} + lane] = "
                f"widen({source.format(j=f'block * {LANES} + lane')})",
            ]
        if width > whole:
            lines += [
                f"    for j in range({whole}, {width}):",
                f"        {target}[({to}) * {columns} + j] = widen({source.format(j='j')})",
            ]
        if columns > width:
            lines += [f"    for j in range({width}, {columns}):"]
            lines += [f"        {target}[({to}) * {columns} + j] = T.float32(0)"]
    return [
        *lines,
        f"for j in range(count * {columns}, steps * {_TOGETHER * columns}):",
        f"    {target}[j] = T.float32(0)",
    ]


def _score(width: int, padded: int) -> list[str]:
    """Compute the scores of a block of keys, and their exponentials, relative to the greatest score until now."""
    vector = f"for lane in T.vectorized({LANES}):"
    at = f"vector * {LANES} + lane"
    products = [
        line
        for number, name in enumerate(_SCORES)
        for line in (
            f"    {vector}",
            f"        {name}[lane] = {name}[lane] + key[(step * {_TOGETHER} + {number}) * {width} + j] "
            f"* query[j * {padded} + {at}]",
        )
    ]
    lines = ["for step in range(steps):"]
    lines += indented([line for name in _SCORES for line in (vector, f"    {name}[lane] = T.float32(0)")])
    lines += indented([f"for j in range({width}):", *products])
    for number, name in enumerate(_SCORES):
        position = f"T.cast(base + step * {_TOGETHER} + {number}, 'int32')"
        allowed = f"T.And({position} >= first_key[{at}], {position} < end_key[{at}])"
        lines += indented(
            [
                vector,
                f"    {name}[lane] = T.Select({allowed}, {name}[lane], {_LEAST})",
                vector,
                f"    score[(step * {_TOGETHER} + {number}) * {padded} + {at}] = {name}[lane]",
                vector,
                f"    best[lane] = T.max(best[lane], {name}[lane])",
            ]
        )
    element = f"score[i * {padded} + {at}]"
    total = _SCORES[0]
    return [
        "for vector in range(vectors):",
        *indented(
            [
                vector,
                f"    best[lane] = top[{at}]",
                *lines,
                vector,
                f"    factor[{at}] = exp(top[{at}] - best[lane])",
                vector,
                f"    top[{at}] = best[lane]",
                vector,
                f"    {total}[lane] = total[{at}] * factor[{at}]",
                f"for i in range(steps * {_TOGETHER}):",
                f"    {vector}",
                f"        {element} = T.Select({element} <= {_LEAST}, T.float32(0), exp({element} - best[lane]))",
                f"    {vector}",
                f"        {total}[lane] = {total}[lane] + {element}",
                vector,
                f"    total[{at}] = {total}[lane]",
            ]
        ),
    ]


def _add_values(padded: int, columns: int) -> list[str]:
    """Add the values of a block of keys, weighted by their scores, to the sums of the rows."""
    vector = f"for lane in T.vectorized({LANES}):"
    lines = list[str]()
    for column in range(0, columns, _COLUMNS * LANES):
        parts = range(min(_COLUMNS, (columns - column) // LANES))
        sums = [(f"sum_{r}_{c}", r, column + c * LANES) for r in range(_ROWS) for c in parts]
        places = [f"sums[(part * {_ROWS} + {r}) * {columns} + {j} + lane]" for _, r, j in sums]
        for (name, r, _), place in zip(sums, places, strict=True):
            lines += [vector, f"    {name}[lane] = {place} * factor[part * {_ROWS} + {r}]"]
        lines += [f"for i in range(steps * {_TOGETHER}):"]
        for name, r, j in sums:
            weight = f"score[i * {padded} + part * {_ROWS} + {r}]"
            lines += [
                f"    {vector}",
                f"        {name}[lane] = {name}[lane] + {weight} * value[i * {columns} + {j} + lane]",
            ]
        for (name, _, _), place in zip(sums, places, strict=True):
            lines += [vector, f"    {place} = {name}[lane]"]
    return ["for part in range(row_parts):", *indented(lines)]


def _write(group: int, value_width: int, columns: int) -> list[str]:
    return [
        "for r in range(rows):",
        f"    for g in range({group}):",
        f"        for j in range({value_width}):",
        f"            y[(head * {group} + g) * y_head + (row + r) * y_row + j] = "
        f"narrow(sums[(r * {group} + g) * {columns} + j] / total[r * {group} + g])",
    ]
