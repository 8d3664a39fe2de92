"""Attention of the new positions of several requests, each of which attends to its own keys and values.

Blocks of rows attend to blocks of keys, one after the other, with a running maximum and sum of each row [1]. Scores are
stored by key, with the rows of a block in the lanes of vectors, so that maximum and sum of a row need no sums across
lanes, and the heads that share keys are rows of one block. Blocks of keys begin at multiples of their size, and the
order of sums does not depend on the number of rows: a row's result does not depend on the rows that are computed with
it. A vector of rows skips the keys after the last that one of them attends to; their weights would be zero.

A score is the sum of `_PARTS` sums, of every `_PARTS`-th element. So the scores of one new position, whose heads are
few rows, have the same bits if lanes are elements of several keys: then no lane is idle.

With the instruction of `dot`, keys, queries, weights and values are pairs of bfloat16: of elements ``j`` and
``j + depth`` of keys and queries, and of keys ``2 i`` and ``2 i + 1`` of weights and values. Sums are float32.

[1] Dao et al., FlashAttention, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

from distir_relax.kernels.native.dot import dot
from distir_relax.kernels.native.floats import STORED, narrow, pair_of, pair_of_rounded, widen
from distir_relax.kernels.native.load import native_needing
from distir_relax.kernels.native.math import exp2_to_one, fma
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel, local, prefetch
from distir_relax.kernels.native.target import Capability

_Line: TypeAlias = Callable[[str], str]
"""An expression or a line, from the index ``j``."""
_Copy: TypeAlias = Callable[[_Line, str], list[str]]
"""Lines that copy the elements of a row, from those of its source, and the number of the target's row."""

KEYS = 64
"""Keys of a block."""
_MOST_ROWS = 96
_TOGETHER = 8
"""Keys whose scores are computed at the same time."""
_PARTS = 4
"""Sums of which a score is one."""
_SHARED = LANES // _PARTS
"""Keys whose elements share a vector."""
_ROWS, _COLUMNS = 4, 4
"""Rows, and vectors of columns, whose values are added at the same time."""
_SCORES = tuple(f"score_{number}" for number in range(_TOGETHER))
_PARTIAL = tuple(f"part_{key}_{part}" for key in range(_SHARED) for part in range(_PARTS))
_SUMS = tuple(f"sum_{row}_{column}" for row in range(_ROWS) for column in range(_COLUMNS))
_PART = ("cache", "row", "rows", "start", "past")
NUMBERS_OF_BLOCK = len(_PART)
"""Numbers that describe a block of rows to the kernel."""
_LEAST = "T.float32(-3.4e38)"
"""The score of a key that a row does not attend to."""
_LEAST_TOP = "T.float32(-1.7e38)"
"""The greatest score of a row until its first: so far above `_LEAST` that the weight of such a key is zero."""
_MOST = "T.int64(1 << 48)"
"""More than the elements of any buffer."""
_ALL = f"T.Ramp(0, 1, {LANES})"
_VECTOR = f"for lane in T.vectorized({LANES}):"


def rows_of_block(repeats: Sequence[int]) -> int:
    """Return the number of positions of a block, if `repeats` query heads share the heads of keys."""
    return max(1, _MOST_ROWS // max(1, *repeats))


def _needs(
    repeats: tuple[int, ...], width: int, value_width: int, dtype: str, dots: bool, appends: bool = True
) -> tuple[Capability, ...]:
    return (Capability.BFLOAT16_DOT,) if dots else ()


@native_needing(_needs)
def attend_requests(
    repeats: tuple[int, ...], width: int, value_width: int, dtype: str, dots: bool, appends: bool = True
) -> Any:
    """Return the kernel that appends new keys and values to those of each request, and attends to them.

    Without `appends` they are not written: the caches of requests without earlier positions are not used.

    `repeats` has the number of query heads of each head of keys and values, of `width` and `value_width` elements; if
    some have fewer than others, rows of the last one are computed several times.
    With `dots`, it uses the instruction of `dot` for bfloat16, and rounds weights to bfloat16.
    The arguments of the kernel:

    - for each request six int64: addresses of keys and of values, each with their strides by head and by position;
    - for each block five int64: the number of its request, its first row, its number of rows (`rows_of_block` at most),
      the first row of the request, and the number of its earlier positions; and how many blocks there are;
    - for each row two int64: the first position that it attends to, and the one after the last;
    - addresses of queries, new keys, new values and results, each with their strides by head and by row;
    - the scale of the scores, and the number of threads.

    All strides are in elements, that of the last dim is 1. Sums are float32.
    """
    stored, pair = STORED[dtype], 2 if dots else 1
    heads, group = len(repeats), max(repeats)
    first_and_last, query = _query_head(repeats)
    padded = -(-rows_of_block(repeats) * group // LANES) * LANES
    columns = -(-value_width // LANES) * LANES
    depth, item = -(-width // pair), "float32" if pair == 1 else "uint32"
    sizes = {"query": (depth * padded, item), "key": (KEYS * depth, item), "value": (KEYS // pair * columns, item)}
    sizes |= {"score": (KEYS * padded, "float32"), "sums": (padded * columns, "float32")}
    # Pairs have an instruction of their own.
    parts = _PARTS if pair == 1 and width % _PARTS == 0 else 1
    few = group if parts > 1 and group <= _ROWS else 0
    if few:
        sizes |= {"few_query": (few * width, "float32"), "few_score": (few * KEYS, "float32")}
        sizes |= {"few_best": (1, "float32")}
    sizes |= {"weight": (KEYS // pair * padded, item)} if pair == 2 else {}
    sizes |= dict.fromkeys(("top", "total", "factor"), (padded, "float32"))
    sizes |= dict.fromkeys(("first_key", "end_key"), (padded, "int32"))
    sizes |= {"ends": (2, "int64"), "end_of": (padded // LANES, "int64"), "steps_of": (padded // LANES, "int64")}
    names = ("q", "new_k", "new_v", "y")
    arguments = ["caches_: T.int64", "parts_: T.int64", "blocks: T.int64", "limits_: T.int64"]
    arguments += [f"{name}{part}: T.int64" for name in names for part in ("_", "_head", "_row")]
    lines = [line for name in ("caches", "parts", "limits") for line in at_address(name, f"{name}_", _MOST, "int64")]
    lines += [line for name in names for line in at_address(name, f"{name}_", _MOST, stored)]
    lines += [f"to_power: T.let = scale * T.float32({math.log2(math.e)!r})"]
    of_thread = [f'{name} = T.alloc_buffer(({size},), "{kind}", scope="local")' for name, (size, kind) in sizes.items()]
    registers = [*_SCORES, "best", *_SUMS, *_PARTIAL * (parts > 1), *_few_registers(few)]
    of_thread += [line for name in registers for line in local(name)]
    of_keys = [
        f"base: T.let = turn_of_keys * {KEYS}",
        f"count: T.let = T.min(ends[1] - base, T.int64({KEYS}))",
        f"steps: T.let = (count + {_TOGETHER - 1}) // {_TOGETHER}",
        "count_old: T.let = T.max(T.int64(0), T.min(count, past - base))",
        *_read("key", depth, 1, pair, _copy_key(width, pair)),
        *_read("value", columns, pair, pair, _copy_value(value_width, columns, pair)),
    ]
    of_rows = [*_weigh(width, padded, pair, parts), *_add_values(padded, columns, pair)]
    if few:
        one = [*_weigh_few(width, value_width, few), *_add_values_few(columns, few)]
        of_rows = ["if rows == 1:", *indented(one), "else:", *indented(of_rows)]
    of_keys += of_rows
    of_block = [
        f"head: T.let = unit % {heads}",
        *first_and_last,
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
        *(_append("k", width) if appends else []),
        *(_append("v", value_width) if appends else []),
        *_begin(query, group, width, padded, columns, pair),
        *_begin_few(query, few, width),
        f"for turn_of_keys in range(ends[0] // {KEYS}, (ends[1] + {KEYS - 1}) // {KEYS}):",
        *indented(of_keys),
        *_write(query, group, value_width, columns),
    ]
    units = f"blocks * {heads}"
    of_thread += [f"for turn in range(({units} + threads - 1) // threads):"]
    # The later blocks of a prompt take longer: threads change their order in each turn.
    of_turn = ["unit: T.let = turn * threads + turn % 2 * (threads - 1) + (1 - turn % 2 * 2) * t"]
    of_thread += indented([*of_turn, f"if unit < {units}:", *indented(of_block)])
    lines += ["for t in T.parallel(threads):", *indented(of_thread)]
    functions = {
        "dot": dot,
        "exp2_to_one": exp2_to_one,
        "fma": fma,
        "narrow": partial(narrow, dtype=dtype),
        "pair_of": pair_of,
        "pair_of_rounded": pair_of_rounded,
        "widen": widen,
    }
    return kernel([*arguments, "scale: T.float32", "threads: T.int64"], lines, functions)


def _query_head(repeats: Sequence[int]) -> tuple[list[str], str]:
    """Return the lines that find the query heads of a head, and the expression of number `g` of them."""
    if len(set(repeats)) == 1:
        return [], f"(head * {repeats[0]} + g)"
    bounds = list(accumulate(repeats, initial=0))

    def by_head(numbers: Sequence[int]) -> str:
        text = str(numbers[-1])
        for head, number in reversed(list(enumerate(numbers[:-1]))):
            text = f"T.if_then_else(head == {head}, {number}, {text})"
        return text

    lines = [f"first: T.let = {by_head(bounds[:-1])}", f"last: T.let = {by_head([end - 1 for end in bounds[1:]])}"]
    return lines, "T.min(first + g, last)"


def _each(begin: int, end: int, line: _Line) -> list[str]:
    """Return a loop over `line` for each ``j``, in vectors from `begin` on, and one by one after the last vector."""
    whole = (end - begin) // LANES
    lines = list[str]()
    if whole:
        lines += [f"for block in range({whole}):", f"    {_VECTOR}"]
        lines += [f"        {line(f'{begin} + block * {LANES} + lane')}"]
    if end > begin + whole * LANES:
        lines += [f"for j in range({begin + whole * LANES}, {end}):", f"    {line('j')}"]
    return lines


def _store(target: _Line, value: _Line) -> _Line:
    return lambda j: f"{target(j)} = {value(j)}"


def _append(name: str, width: int) -> list[str]:
    """Write the new keys or values of the block's rows after the earlier ones of the request."""
    target = f"{name}[{name}_from + (past + row - start + r) * {name}_step + {{}}]"
    source = f"new_{name}[head * new_{name}_head + (row + r) * new_{name}_row + {{}}]"
    return ["for r in range(rows):", *indented(_each(0, width, _store(target.format, source.format)))]


def _begin(query: str, group: int, width: int, padded: int, columns: int, pair: int) -> list[str]:
    """Read queries and limits of the rows; those after the last, up to whole vectors, attend to nothing."""
    lane = f"r * {group} + g"
    source = f"q[{query} * q_head + (row + r) * q_row + {{}}]"
    copies = [
        line
        for begin, end, element in _elements(width, pair, source.format)
        for line in (f"for j in range({begin}, {end}):", f"    query[j * {padded} + {lane}] = {element('j')}")
    ]
    return [
        f"vectors: T.let = (rows * {group} + {LANES - 1}) // {LANES}",
        f"row_parts: T.let = (rows * {group} + {_ROWS - 1}) // {_ROWS}",
        f"for lane in range(rows * {group}, vectors * {LANES}):",
        f"    for j in range({-(-width // pair)}):",
        f"        query[j * {padded} + lane] = {_zero(pair)}",
        "for r in range(rows):",
        f"    for g in range({group}):",
        *indented(indented(copies)),
        f"for lane in range(vectors * {LANES}):",
        f"    top[lane] = {_LEAST_TOP}",
        "    total[lane] = T.float32(0)",
        "    first_key[lane] = 0",
        "    end_key[lane] = 0",
        "for vector in range(vectors):",
        "    end_of[vector] = 0",
        "ends[0] = limits[row * 2]",
        "ends[1] = limits[row * 2 + 1]",
        "for r in range(rows):",
        "    ends[0] = T.min(ends[0], limits[(row + r) * 2])",
        "    ends[1] = T.max(ends[1], limits[(row + r) * 2 + 1])",
        f"    for g in range({group}):",
        f"        first_key[{lane}] = T.cast(limits[(row + r) * 2], 'int32')",
        f"        end_key[{lane}] = T.cast(limits[(row + r) * 2 + 1], 'int32')",
        f"        end_of[({lane}) // {LANES}] = T.max(end_of[({lane}) // {LANES}], limits[(row + r) * 2 + 1])",
        f"for block in range(vectors * {columns}):",
        f"    {_VECTOR}",
        f"        sums[block * {LANES} + lane] = T.float32(0)",
    ]


def _elements(width: int, pair: int, source: _Line) -> list[tuple[int, int, _Line]]:
    """Return the numbers or pairs of a key or a query whose elements are `source`: ranges of ``j``, and expressions."""
    if pair == 1:
        return [(0, width, lambda j: f"widen({source(j)})")]
    depth = -(-width // 2)
    parts = [(0, width - depth, lambda j: f"pair_of({source(j)}, {source(f'{j} + {depth}')})")]
    return parts + ([(depth - 1, depth, lambda j: f"T.cast({source(j)}, 'uint32')")] if width % 2 else [])


def _copy_key(width: int, pair: int) -> _Copy:
    """Return the lines that copy a key."""

    def copy(source: _Line, to: str) -> list[str]:
        target = f"key[({to}) * {-(-width // pair)} + {{}}]"
        parts = _elements(width, pair, source)
        return [line for begin, end, element in parts for line in _each(begin, end, _store(target.format, element))]

    return copy


def _copy_value(width: int, columns: int, pair: int) -> _Copy:
    """Return the lines that copy a value, to one half of a pair."""

    def copy(source: _Line, to: str) -> list[str]:
        target = f"value[({to}) // {pair} * {columns} + {{}}]"

        def line(j: str) -> str:
            if pair == 1:
                return f"{target.format(j)} = widen({source(j)})"
            first = f"T.cast({source(j)}, 'uint32')"
            second = f"T.bitwise_or({target.format(j)}, T.shift_left({first}, T.uint32(16)))"
            return f"{target.format(j)} = T.Select(({to}) % 2 == 0, {first}, {second})"

        return _each(0, width, line) + _each(width, columns, lambda j: f"{target.format(j)} = {_zero(pair)}")

    return copy


def _read(target: str, size: int, shared: int, pair: int, copy: _Copy) -> list[str]:
    """Read a block of keys or values: earlier ones from the cache, others from where it gets them from.

    Those after the last, up to whole steps, are zero. `shared` of them share `size` numbers.
    """
    name = target[0]
    old = f"{name}[{name}_from + (base + i) * {name}_step + {{}}]"
    new = f"new_{name}[head * new_{name}_head + (start + base + count_old + i - past) * new_{name}_row + {{}}]"
    return [
        "for i in range(count_old):",
        *indented(copy(old.format, "i")),
        "for i in range(count - count_old):",
        *indented(copy(new.format, "count_old + i")),
        f"for j in range((count + {shared - 1}) // {shared} * {size}, steps * {_TOGETHER // shared * size}):",
        f"    {target}[j] = {_zero(pair)}",
    ]


def _begin_few(query: str, few: int, width: int) -> list[str]:
    """Read the queries of one position for `_score_few`."""
    source = f"widen(q[{query} * q_head + row * q_row + {{0}}])"
    copies = _each(0, width, _store(f"few_query[g * {width} + {{}}]".format, source.format))
    return ["if rows == 1:", f"    for g in range({few}):", *indented(indented(copies))] if few else []


def _few_registers(few: int) -> list[str]:
    names = [f"few_{half}_{g}" for half in range(_TOGETHER // _SHARED) for g in range(few)]
    return [*names, *(f"keys_{half}" for half in range(_TOGETHER // _SHARED) if few)]


def _score(width: int, padded: int, pair: int, parts: int) -> list[str]:
    """Compute the scores of the keys of a step, with rows in the lanes of vectors."""
    depth = -(-width // pair)

    def begun(names: Sequence[str]) -> list[str]:
        return [line for name in names for line in (_VECTOR, f"    {name}[lane] = T.float32(0)")]

    def added(name: str, key: int, j: str) -> str:
        query = f"query[T.Ramp(({j}) * {padded} + vector * {LANES}, 1, {LANES})]"
        element = f"T.Broadcast(key[(step * {_TOGETHER} + {key}) * {depth} + {j}], {LANES})"
        return f"{name}[{_ALL}] = {_added(f'{name}[{_ALL}]', query, element, pair)}"

    if parts == 1:
        lines = [added(name, number, "j") for number, name in enumerate(_SCORES)]
        return [*begun(_SCORES), f"for j in range({depth}):", *indented(lines)]
    lines = []
    for first in range(0, _TOGETHER, _SHARED):
        lines += [*begun(_PARTIAL), f"for j in range({width // parts}):"]
        for part in range(parts):
            lines += indented(
                [added(f"part_{key}_{part}", first + key, f"j * {parts} + {part}") for key in range(_SHARED)]
            )
        for key in range(_SHARED):
            total = _pairwise([f"part_{key}_{part}[lane]" for part in range(parts)])
            lines += [_VECTOR, f"    {_SCORES[first + key]}[lane] = {total}"]
    return lines


def _pairwise(terms: Sequence[str]) -> str:
    """Return the sum of an expression of neighbors, then of neighbors of those, and so on."""
    while len(terms) > 1:
        terms = [f"({a} + {b})" for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _weigh_few(width: int, value_width: int, few: int) -> list[str]:
    """Compute the same weights for one position, whose heads are `few`: first elements, then keys are in the lanes.

    Keys and values are read once, so those of the next block are read ahead.
    """
    number = f"base + {KEYS} + step * {_TOGETHER} + i"
    ahead = [
        prefetch(f"T.address_of({name}[{name}_from + ({number}) * {name}_step + {j}])")
        for name, size in (("k", width), ("v", value_width))
        for j in range(0, size, LANES)
    ]
    of_step = [f"for i in range({_TOGETHER}):", *indented(ahead), *_score_few(width, few)]
    return ["for step in range(steps):", *indented(of_step), *_weights_few(few)]


def _score_few(width: int, few: int) -> list[str]:
    """Compute the scores of the keys of a step; lanes are elements of `_SHARED` keys."""
    halves, every = range(_TOGETHER // _SHARED), list(range(LANES))
    names = [f"few_{half}_{g}" for half in halves for g in range(few)]
    lines = [line for name in names for line in (_VECTOR, f"    {name}[lane] = T.float32(0)")]
    lines.append(f"for j in range({width // _PARTS}):")
    for half in halves:
        keys = [f"(step * {_TOGETHER} + {half * _SHARED + key}) * {width} + j * {_PARTS}" for key in range(_SHARED)]
        rows = ", ".join(f"key[T.Ramp({at}, 1, {_PARTS})]" for at in keys)
        lines.append(f"    keys_{half}[{_ALL}] = T.Shuffle([{rows}], {every})")
    for half in halves:
        for g in range(few):
            element = f"few_query[T.Ramp({g * width} + j * {_PARTS}, 1, {_PARTS})]"
            query = f"T.Shuffle([{', '.join([element] * _SHARED)}], {every})"
            name = f"few_{half}_{g}[{_ALL}]"
            lines.append(f"    {name} = {_added(name, query, f'keys_{half}[{_ALL}]', 1)}")
    for half in halves:
        for g in range(few):
            total, lanes = f"few_{half}_{g}[{_ALL}]", LANES
            while lanes > _SHARED:
                even, odd = (f"T.Shuffle([{total}], {list(range(first, lanes, 2))})" for first in (0, 1))
                total, lanes = f"({even} + {odd})", lanes // 2
            at = f"{g * KEYS} + step * {_TOGETHER} + {half * _SHARED}"
            lines.append(f"few_score[T.Ramp({at}, 1, {_SHARED})] = {total}")
    return lines


def _weights_few(few: int) -> list[str]:
    """Compute the weights from the scores of a block of keys, which are in the lanes."""
    lines = list[str]()
    for g in range(few):
        at = f"{g * KEYS} + part * {LANES} + lane"
        position = f"T.cast(base + part * {LANES} + lane, 'int32')"
        allowed = f"T.And({position} >= first_key[{g}], {position} < end_key[{g}])"
        score = _SCORES[0]
        lines += [
            _VECTOR,
            f"    best[lane] = top[{g}]",
            f"for part in range((count + {LANES - 1}) // {LANES}):",
            f"    {_VECTOR}",
            f"        {score}[lane] = T.Select({allowed}, few_score[{at}] * to_power, {_LEAST})",
            f"    {_VECTOR}",
            f"        few_score[{at}] = {score}[lane]",
            f"    {_VECTOR}",
            f"        best[lane] = T.max(best[lane], {score}[lane])",
        ]
        best, lanes = f"best[{_ALL}]", LANES
        while lanes > 1:
            halves = (f"T.Shuffle([{best}], {list(range(first, lanes, 2))})" for first in (0, 1))
            best, lanes = f"T.max({', '.join(halves)})", lanes // 2
        lines += [
            f"few_best[0] = {best}",
            f"factor[{g}] = exp2_to_one(top[{g}] - few_best[0])",
            f"top[{g}] = few_best[0]",
            f"total[{g}] = total[{g}] * factor[{g}]",
            f"for part in range((count + {LANES - 1}) // {LANES}):",
            f"    {_VECTOR}",
            f"        few_score[{at}] = exp2_to_one(few_score[{at}] - few_best[0])",
        ]
    lines += ["for i in range(count):"]
    return lines + [f"    total[{g}] = total[{g}] + few_score[{g * KEYS} + i]" for g in range(few)]


def _add_values_few(columns: int, few: int) -> list[str]:
    """Add the values of a block of keys, as `_add_values`, to the sums of the rows of one position."""
    return _add_to_rows(columns, few, str, "count", lambda g: f"few_score[{g * KEYS} + i]", 1)


def _weigh(width: int, padded: int, pair: int, parts: int) -> list[str]:
    """Compute the weights of a block of keys: powers of two of scores, relative to the greatest score until now."""
    at = f"vector * {LANES} + lane"
    of_step = _score(width, padded, pair, parts)
    for number, name in enumerate(_SCORES):
        key = f"step * {_TOGETHER} + {number}"
        position = f"T.cast(base + {key}, 'int32')"
        allowed = f"T.And({position} >= first_key[{at}], {position} < end_key[{at}])"
        of_step += [
            _VECTOR,
            f"    {name}[lane] = T.Select({allowed}, {name}[lane] * to_power, {_LEAST})",
            _VECTOR,
            f"    score[({key}) * {padded} + {at}] = {name}[lane]",
            _VECTOR,
            f"    best[lane] = T.max(best[lane], {name}[lane])",
        ]
    total, powers = _SCORES[0], _SCORES[1 : pair + 1]
    of_keys = list[str]()
    for number, power in enumerate(powers):
        score = f"score[(i * {pair} + {number}) * {padded} + {at}]"
        of_keys += [_VECTOR, f"    {power}[lane] = exp2_to_one({score} - best[lane])"]
    for power in powers:
        of_keys += [_VECTOR, f"    {total}[lane] = {total}[lane] + {power}[lane]"]
    weight = f"{powers[0]}[lane]" if pair == 1 else f"pair_of_rounded({powers[0]}[lane], {powers[1]}[lane])"
    of_vector = [
        f"attended: T.let = T.max(T.int64(0), T.min(end_of[vector] - base, T.int64({KEYS})))",
        f"steps_of[vector] = (attended + {_TOGETHER - 1}) // {_TOGETHER}",
        _VECTOR,
        f"    best[lane] = top[{at}]",
        "for step in range(steps_of[vector]):",
        *indented(of_step),
        _VECTOR,
        f"    factor[{at}] = exp2_to_one(top[{at}] - best[lane])",
        _VECTOR,
        f"    top[{at}] = best[lane]",
        _VECTOR,
        f"    {total}[lane] = total[{at}] * factor[{at}]",
        f"for i in range(steps_of[vector] * {_TOGETHER // pair}):",
        *indented([*of_keys, _VECTOR, f"    {_weights(pair)}[i * {padded} + {at}] = {weight}"]),
        _VECTOR,
        f"    total[{at}] = {total}[lane]",
    ]
    return ["for vector in range(vectors):", *indented(of_vector)]


def _add_values(padded: int, columns: int, pair: int) -> list[str]:
    """Add the values of a block of keys, weighted by their scores, to the sums of the rows."""
    count = f"steps_of[part // {LANES // _ROWS}] * {_TOGETHER // pair}"

    def row(number: int) -> str:
        return f"part * {_ROWS} + {number}"

    def weight(number: int) -> str:
        return f"{_weights(pair)}[i * {padded} + {row(number)}]"

    return [
        "for part in range(row_parts):",
        f"    if steps_of[part // {LANES // _ROWS}] > 0:",
        *indented(indented(_add_to_rows(columns, _ROWS, row, count, weight, pair))),
    ]


def _add_to_rows(
    columns: int, rows: int, row: Callable[[int], str], count: str, weight: Callable[[int], str], pair: int
) -> list[str]:
    """Add `count` values, or pairs of them, to the sums of some rows, whose numbers and weights are expressions."""
    lines = list[str]()
    for column in range(0, columns, _COLUMNS * LANES):
        parts = range(min(_COLUMNS, (columns - column) // LANES))
        sums = [(f"sum_{r}_{c}[{_ALL}]", r, column + c * LANES) for r in range(rows) for c in parts]
        places = [f"sums[T.Ramp(({row(r)}) * {columns} + {j}, 1, {LANES})]" for _, r, j in sums]
        for (name, r, _), place in zip(sums, places, strict=True):
            lines.append(f"{name} = {place} * T.Broadcast(factor[{row(r)}], {LANES})")
        lines.append(f"for i in range({count}):")
        for name, r, j in sums:
            value = f"value[T.Ramp(i * {columns} + {j}, 1, {LANES})]"
            lines.append(f"    {name} = {_added(name, value, f'T.Broadcast({weight(r)}, {LANES})', pair)}")
        lines += [f"{place} = {name}" for (name, _, _), place in zip(sums, places, strict=True)]
    return lines


def _write(query: str, group: int, value_width: int, columns: int) -> list[str]:
    lane = f"r * {group} + g"
    result = (
        f"y[{query} * y_head + (row + r) * y_row + {{0}}] = narrow(sums[({lane}) * {columns} + {{0}}] * total[{lane}])"
    )
    return [
        "for vector in range(vectors):",
        f"    {_VECTOR}",
        f"        total[vector * {LANES} + lane] = T.float32(1) / total[vector * {LANES} + lane]",
        "for r in range(rows):",
        f"    for g in range({group}):",
        *indented(indented(_each(0, value_width, result.format))),
    ]


def _weights(pair: int) -> str:
    """Return the name of the weights: in place of the scores, unless they are pairs."""
    return "score" if pair == 1 else "weight"


def _zero(pair: int) -> str:
    return "T.float32(0)" if pair == 1 else "T.uint32(0)"


def _added(sums: str, x: str, y: str, pair: int) -> str:
    """Return the sums with the products of two vectors added."""
    return f"fma({x}, {y}, {sums})" if pair == 1 else f"dot({sums}, {x}, {y})"
