"""The description of the processor by Linux: its name, and its instruction sets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_SETS = (
    ("AMX", "amx_tile", {"bf16": "amx_bf16", "int8": "amx_int8", "fp16": "amx_fp16"}),
    ("AVX-512", "avx512f", {"bf16": "avx512_bf16", "fp16": "avx512_fp16", "VNNI": "avx512_vnni"}),
    ("AVX2", "avx2", {"FMA": "fma", "VNNI": "avx_vnni"}),
    ("SVE2", "sve2", {"bf16": "svebf16", "int8": "svei8mm"}),
    ("SVE", "sve", {"bf16": "svebf16", "int8": "svei8mm"}),
    ("NEON", "asimd", {"bf16": "bf16", "fp16": "asimdhp", "int8": "i8mm"}),
)
"""Instruction sets for vectors and matrices, each before those that it includes: its flag, and flags of its parts."""
_WITH_ANOTHER = "AMX"
"""The set of matrices, beside which vectors have one of their own."""


@cache
def processor_field(name: str) -> str:
    """Return a field of ``/proc/cpuinfo``, such as ``model name``, of the first processor; empty if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def processor_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets and other features; none if they are unknown."""
    # Arm's are called features.
    return frozenset((processor_field("flags") or processor_field("Features")).split())


def instruction_sets(flags: frozenset[str]) -> str:
    """Return the widest instruction sets among a processor's `flags`: ``AMX bf16 int8, AVX-512 bf16 fp16 VNNI``.

    Empty if they have none of those that kernels are written for.
    """
    names = []
    for name, flag, parts in _SETS:
        if flag in flags:
            names.append(" ".join([name, *(part for part, of_part in parts.items() if of_part in flags)]))
            if name != _WITH_ANOTHER:
                break
    return ", ".join(names)
