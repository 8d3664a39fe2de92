"""Programs that continue sequences, for a step of several requests: one sequence of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distir_relax.ir import Module, inline
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.lowering.ranked.merge_equal import MergeEqual

SIZES = ("last", "new", "past")
"""The sizes of a request: tokens with an output, new ones, and those before."""


@dataclass(frozen=True, slots=True)
class OneSequence:
    """Pass: ranked or distributed stage, in and out. All sizes but those of positions (`SIZES`) become 1."""

    takes: ClassVar[tuple[str, ...]] = ("distributed", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Return the program for a batch of one; functions are inlined, and equal ops merged."""
        others = module_symbols(module).keys() - set(SIZES)
        return MergeEqual().run(specialize(inline(module), dict.fromkeys(others, 1)))
