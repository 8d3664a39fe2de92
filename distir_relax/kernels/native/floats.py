"""Loads and stores of float32 and bfloat16 elements in kernels, which compute in float32.

Kernels see bfloat16 as its 16 bits, the upper half of those of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STORED = {"float32": "float32", "bfloat16": "uint16"}
"""The dtype of a kernel's buffers, by the dtype of the tensors."""


@cache
def stored_name(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype, None for one that kernels do not take."""
    name = str(dtype).removeprefix("torch.")
    return name if name in STORED else None


def widen(x: Any) -> Any:
    """Return an element of a buffer, a TIR expression, as float32."""
    from tvm import tirx

    if str(x.ty.dtype) == "float32":
        return x
    return tirx.reinterpret("float32", tirx.shift_left(x.astype("uint32"), tirx.const(16, "uint32")))


def narrow(x: Any, dtype: str) -> Any:
    """Return a float32 TIR expression as an element of a buffer for `dtype`, rounded to the nearest, ties to even."""
    if dtype == "float32":
        return x
    from tvm import tirx

    def stored(bits: Any) -> Any:
        upper = tirx.shift_right(_rounded(bits), tirx.const(16, "uint32"))
        # Rounding could carry the bits of NaN into those of another number. TVM takes `x == x` to be true.
        is_nan = tirx.bitwise_and(bits, tirx.const(0x7FFFFFFF, "uint32")) > tirx.const(0x7F800000, "uint32")
        return tirx.Select(is_nan, tirx.const(0x7FC0, "uint32"), upper).astype("uint16")

    return once(tirx.reinterpret("uint32", x), stored)


def round_to(x: Any, dtype: str) -> Any:
    """Return a float32 TIR expression rounded to `dtype`, as float32.

    NaN stays NaN if its lower 16 bits are zero, as after arithmetic with numbers of `dtype`.
    """
    if dtype == "float32":
        return x
    from tvm import tirx

    def value(bits: Any) -> Any:
        return tirx.reinterpret("float32", tirx.bitwise_and(_rounded(bits), tirx.const(0xFFFF0000, "uint32")))

    return once(tirx.reinterpret("uint32", x), value)


def once(value: Any, use: Callable[[Any], Any]) -> Any:
    """Return the TIR expression `use` of a variable for `value`, which is computed once."""
    from tvm import tirx

    name = tirx.Var("value", value.ty)
    return tirx.Let(name, value, use(name))


def _rounded(bits: Any) -> Any:
    """Return bits of float32 of which the upper 16 are rounded to the nearest, ties to even."""
    from tvm import tirx

    odd = tirx.bitwise_and(tirx.shift_right(bits, tirx.const(16, "uint32")), tirx.const(1, "uint32"))
    return bits + tirx.const(0x7FFF, "uint32") + odd


def pair_of(x: Any, y: Any) -> Any:
    """Return two elements of a buffer of bfloat16, TIR expressions, as uint32, the first in the lower half."""
    from tvm import tirx

    return tirx.bitwise_or(x.astype("uint32"), tirx.shift_left(y.astype("uint32"), tirx.const(16, "uint32")))


def pair_of_rounded(x: Any, y: Any) -> Any:
    """Return two float32 TIR expressions as a pair of bfloat16, rounded to the nearest, ties away from zero.

    NaN stays NaN if its lower 16 bits are zero, as after arithmetic with bfloat16.
    """
    from tvm import tirx

    first, second = (tirx.reinterpret("uint32", z) + tirx.const(0x8000, "uint32") for z in (x, y))
    upper = tirx.bitwise_and(second, tirx.const(0xFFFF0000, "uint32"))
    return tirx.bitwise_or(tirx.shift_right(first, tirx.const(16, "uint32")), upper)
