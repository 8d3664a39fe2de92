"""Sums over the ranks of one machine, through memory that they share.

Each rank has an area of `AREA` bytes. It writes its operand there, sets a flag, and waits for the flags of the others.
Of a few elements each rank then adds all; there are two places for these, which calls take in turns: a rank that writes
to the first again has seen the flags of the call between, so all have read what was there. Of more elements each rank
adds a part, in pieces that fit, and reads the other parts when a second flag says that they are there. Operands are
added in the order of the ranks, so all get the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from distir_relax.kernels.native.flags import number_at, set_flag, wait_for_flag
from distir_relax.kernels.native.floats import STORED, narrow, widen
from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.script import LANES, at_address, indented, kernel
from distir_relax.kernels.native.waits import begin_wait, end_wait

SMALL, PIECE = 1 << 14, 1 << 19
"""Bytes of a tensor that each rank adds as a whole, and of a piece of a larger one."""
_FLAGS = 128
_OPERAND = _FLAGS + 2 * SMALL
_RESULT = _OPERAND + PIECE
AREA = _RESULT + PIECE


@native
def shared_sum(dtype: str, ranks: int) -> Any:
    """Return the kernel of `ranks`.

    Its arguments are the addresses of x and the result, which may be the same, the number of elements, this rank, the
    address of the number of its next call (1 at first, and of all ranks alike), the number of the program's step, the
    address of records of waiting (`waits`), those of C functions that let others run and read the clock, and those of
    the areas of all ranks.
    """
    stored, item = STORED[dtype], 4 if dtype == "float32" else 2
    small, piece = SMALL // item, PIECE // item
    areas = [f"area_{r}" for r in range(ranks)]
    arguments = ["x_", "y_", "count", "rank", "next_", "step", "waits", "yield_", "clock", *areas]
    lines = at_address("x", "x_", "T.int64(1 << 48)", stored) + at_address("y", "y_", "T.int64(1 << 48)", stored)
    own = areas[-1]
    for r in reversed(range(ranks - 1)):
        own = f"T.Select(rank == {r}, {areas[r]}, {own})"
    lines += [f"own: T.let = {own}", "call: T.let = number_at(next_)", "T.evaluate(begin_wait(waits, step, clock))"]
    for name, start, size in (("small", _FLAGS, 2 * small), ("operand", _OPERAND, piece), ("result", _RESULT, piece)):
        for owner, area in (("own", "own"), *enumerate(areas)):
            lines += at_address(f"{name}_{owner}", f"{area} + {start}", f"T.int64({size})", stored)

    def total(name: str, index: str) -> str:
        return f"narrow({' + '.join(f'widen({name}_{r}[{index}])' for r in range(ranks))})"

    few = [
        f"place: T.let = (call % 2) * {small}",
        *_each("count", lambda j: f"small_own[place + {j}] = x[{j}]"),
        "T.evaluate(set_flag(own, call))",
        *(f"T.evaluate(wait_for_flag({area}, call, yield_))" for area in areas),
        *_each("count", lambda j: f"y[{j}] = {total('small', f'place + {j}')}"),
        "T.evaluate(set_flag(next_, call + 1))",
    ]
    parts = [f"first_{r}: T.let = T.min({r} * part, size)" for r in range(ranks + 1)]
    begin, end = "T.min(rank * part, size)", "T.min((rank + 1) * part, size)"
    pieces = f"(count + {piece - 1}) // {piece}"
    many = [
        f"for p in range({pieces}):",
        *indented(
            [
                f"start: T.let = p * {piece}",
                f"size: T.let = T.min(count - start, T.int64({piece}))",
                f"part: T.let = (size + {ranks * LANES - 1}) // {ranks * LANES} * {LANES}",
                *parts,
                f"begin: T.let = {begin}",
                f"length: T.let = {end} - begin",
                *_each("size", lambda j: f"operand_own[{j}] = x[start + {j}]"),
                "T.evaluate(set_flag(own, call + p))",
                *(f"T.evaluate(wait_for_flag({area}, call + p, yield_))" for area in areas),
                *_each("length", lambda j: f"result_own[begin + {j}] = {total('operand', f'begin + {j}')}"),
                "T.evaluate(set_flag(own + 64, call + p))",
                *(
                    line
                    for r, area in enumerate(areas)
                    for line in (
                        f"T.evaluate(wait_for_flag({area} + 64, call + p, yield_))",
                        *_each(
                            f"(first_{r + 1} - first_{r})",
                            lambda j, r=r: f"y[start + first_{r} + {j}] = result_{r}[first_{r} + {j}]",
                        ),
                    )
                ),
            ]
        ),
        f"T.evaluate(set_flag(next_, call + {pieces}))",
    ]
    lines += [f"if count <= {small}:", *indented(few), "else:", *indented(many)]
    lines += ["T.evaluate(end_wait(waits, step, clock))"]
    functions = {
        "widen": widen, "narrow": partial(narrow, dtype=dtype), "number_at": number_at, "set_flag": set_flag,
        "wait_for_flag": wait_for_flag, "begin_wait": begin_wait, "end_wait": end_wait,
    }  # fmt: skip
    return kernel([f"{name}: T.int64" for name in arguments], lines, functions)


def _each(count: str, element: Any) -> list[str]:
    """Return the loops over so many elements."""
    return [
        f"for block in range({count} // {LANES}):",
        f"    for lane in T.vectorized({LANES}):",
        f"        {element(f'(block * {LANES} + lane)')}",
        f"for j in range({count} // {LANES} * {LANES}, {count}):",
        f"    {element('j')}",
    ]
