"""Sums of four products of 8-bit integers, and the instruction for them (AVX512-VNNI, `Capability.INT8_DOT`)."""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.script import LANES

_INSTRUCTION = "llvm.x86.avx512.vpdpbusd.512"


def four_products(sums: Any, unsigned: Any, signed: Any) -> Any:
    """Return ``sums[i] + sum(unsigned[i, k] * signed[k] for k in range(4))`` for vectors of `LANES` sums.

    `unsigned` is a vector of words of four unsigned bytes, `signed` a word of four signed bytes; all are int32.
    """
    from tvm import tirx

    word = f"int32x{LANES}"
    for bits in (0, 8, 16, 24):
        byte = tirx.bitwise_and(tirx.shift_right(unsigned, tirx.const(bits, word)), tirx.const(0xFF, word))
        number = tirx.shift_right(tirx.shift_left(signed, tirx.const(24 - bits, "int32")), tirx.const(24, "int32"))
        sums = sums + byte * tirx.Broadcast(number, LANES)
    return sums


def four_products_by_instruction(sums: Any, unsigned: Any, signed: Any) -> Any:
    """Return `four_products` by the instruction."""
    from tvm import tirx

    factors = [tirx.reinterpret(f"int8x{4 * LANES}", words) for words in (unsigned, tirx.Broadcast(signed, LANES))]
    return tirx.call_llvm_pure_intrin(f"int32x{LANES}", _INSTRUCTION, sums, *factors)
