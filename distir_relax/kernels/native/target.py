"""The target of compilation: an architecture, and the features of a processor by the names of compilers.

A target has what the processor's flags say. LLVM's or a vendor's name for a processor is a guess in a virtual machine:
with the features of another one, LLVM aborts on vectors that it takes to be unsupported.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache

from distir_relax.kernels.processor import processor_flags


class Capability(Enum):
    """Instructions that kernels need; the value says so to users."""

    FMA = "fused multiply-add of float32 vectors"
    WIDE = "vectors of 512 bits (AVX-512)"
    BFLOAT16_DOT = "products of pairs of bfloat16 (AVX512-BF16)"
    INT8_DOT = "sums of four products of 8-bit integers (AVX512-VNNI)"
    BFLOAT16_TILES = "products of tiles of bfloat16 (AMX)"


_WIDE = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl"}
_FEATURES = {
    "x86_64": {
        Capability.FMA: {"avx2", "fma", "f16c"},
        Capability.WIDE: _WIDE,
        Capability.BFLOAT16_DOT: {*_WIDE, "avx512bf16"},
        Capability.INT8_DOT: {*_WIDE, "avx512vnni"},
        Capability.BFLOAT16_TILES: {"amx-tile", "amx-bf16"},
    },
    "aarch64": {Capability.FMA: {"neon"}},
}
"""The features that give a capability, by architecture; the others have no such instructions in kernels."""

# Linux's names of flags that compilers call otherwise.
_X86_NAMES = {
    "pni": "sse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "abm": "lzcnt", "bmi1": "bmi", "avx_vnni": "avxvnni",
    "avx512_bf16": "avx512bf16", "avx512_fp16": "avx512fp16", "avx512_vnni": "avx512vnni",
    "avx512_vbmi2": "avx512vbmi2", "avx512_bitalg": "avx512bitalg", "avx512_vpopcntdq": "avx512vpopcntdq",
    "amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8", "amx_fp16": "amx-fp16",
}  # fmt: skip
_X86_SAME = {
    "ssse3", "popcnt", "movbe", "bmi2", "f16c", "fma", "avx", "avx2", "avx512f", "avx512bw", "avx512cd", "avx512dq",
    "avx512vl", "avx512vbmi", "avx512ifma",
}  # fmt: skip
_ARM_NAMES = {"asimd": "neon", "asimdhp": "fullfp16", "asimddp": "dotprod", "atomics": "lse", "bf16": "bf16"}
_NAMES = {"x86_64": {**_X86_NAMES, **dict(zip(_X86_SAME, _X86_SAME, strict=True))}, "aarch64": _ARM_NAMES}
"""Compilers' names of the features that concern kernels, by Linux's names."""


@dataclass(frozen=True)
class Target:
    """An architecture such as ``x86_64``, and compilers' names of the features that kernels may use."""

    architecture: str
    features: frozenset[str]

    def can(self, capability: Capability) -> bool:
        """Return whether there are the instructions of a capability."""
        needed = _FEATURES.get(self.architecture, {}).get(capability)
        return needed is not None and needed <= self.features

    def missing(self, needs: Iterable[Capability]) -> str:
        """Return a text that says which of some capabilities are missing; empty if none is."""
        return ", ".join(f"the processor has no {one.value}" for one in needs if not self.can(one))

    def restricted(self) -> Target:
        """Return the target with those features alone that concern kernels."""
        return Target(self.architecture, self.features & {*_NAMES.get(self.architecture, {}).values()})

    def limited(self, capabilities: Iterable[Capability]) -> Target:
        """Return the target with the features alone that give these capabilities, of those that it has."""
        known = _FEATURES.get(self.architecture, {})
        given = [known[one] for one in capabilities if self.can(one)]
        return Target(self.architecture, self.features & frozenset().union(*given))


@cache
def host_target() -> Target:
    """Return the target of this machine."""
    machine = platform.machine()
    return target_of_flags({"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine), processor_flags())


def target_of_flags(architecture: str, flags: Iterable[str]) -> Target:
    """Return the target of a processor with Linux's `flags`; those that concern no kernel are left out."""
    names = _NAMES.get(architecture, {})
    return Target(architecture, frozenset(names[flag] for flag in flags if flag in names))
