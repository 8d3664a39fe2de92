"""An instruction for products of bfloat16 (AVX512-BF16), which TVM has no types for.

A kernel that uses it needs `Capability.BFLOAT16_DOT`. It calls a function that does not exist; in LLVM's text,
`with_dot` has the instruction for it.
"""

from __future__ import annotations

import re
from typing import Any

from distir_relax.kernels.native.script import LANES

_NAME = "dot_of_pairs"
_SUMS, _PAIRS, _HALVES = f"<{LANES} x float>", f"<{LANES} x i32>", f"<{2 * LANES} x bfloat>"
_INSTRUCTION = "llvm.x86.avx512bf16.dpbf16ps.512"
_CALL = re.compile(
    rf"^(\s*)(%\S+) = (?:tail )?call {_SUMS} @{_NAME}\({_SUMS} (\S+), {_PAIRS} (\S+), {_PAIRS} (\S+)\).*$", re.MULTILINE
)


def dot(sums: Any, x: Any, y: Any) -> Any:
    """Return ``sums + x[1] * y[1] + x[0] * y[0]`` for vectors of `LANES`: float32, and pairs of bfloat16 as uint32.

    Each sum is rounded to float32; numbers below the least normal one count as zero.
    """
    from tvm import tirx

    return tirx.call_pure_extern(f"float32x{LANES}", _NAME, sums, x, y)


def with_dot(text: str) -> str:
    """Return LLVM's text of a module with the instruction for calls that `dot` made."""
    text, count = _CALL.subn(_instruction, text)
    if not count:
        return text
    lines = [line for line in text.splitlines() if f"@{_NAME}(" not in line]
    return "\n".join([*lines, f"declare {_SUMS} @{_INSTRUCTION}({_SUMS}, {_HALVES}, {_HALVES})", ""])


def _instruction(call: re.Match[str]) -> str:
    indent, result, sums, *pairs = call.groups()
    names = [f"%{_NAME}.{result[1:]}.{k}" for k in range(len(pairs))]
    casts = [f"{name} = bitcast {_PAIRS} {pair} to {_HALVES}" for name, pair in zip(names, pairs, strict=True)]
    halves = "".join(f", {_HALVES} {name}" for name in names)
    lines = [*casts, f"{result} = call {_SUMS} @{_INSTRUCTION}({_SUMS} {sums}{halves})"]
    return "\n".join(f"{indent}{line}" for line in lines)
