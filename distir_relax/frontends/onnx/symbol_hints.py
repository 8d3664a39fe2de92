"""Hints for nodes that cannot be converted for every value of the symbols in their operands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.layout import Symbol, symbols_within
from distir_relax.ops import SizeArray

_MINIMUM = re.compile(r"min\((\d+), (\w+)\)")


def blamed_symbols(reason: str, operands: Sequence[Any]) -> list[str]:
    """Return the names of the symbols in the shapes and elements of operands that may have caused an error.

    They occur in its reason; an empty reason is one of Python's, which has types of sizes, not their texts.
    """
    symbols: set[Symbol] = set()
    for x in operands:
        if isinstance(x, Value):
            symbols |= symbols_within(x.tensor.shape)
        elif isinstance(x, SizeArray):
            symbols |= symbols_within(tuple(x.entries.flat))
    names = sorted(map(str, symbols))
    return [name for name in names if not reason or re.search(rf"\b{name}\b", reason)]


def symbol_hint(reason: str, names: Sequence[str]) -> str:
    """Return what to do about an error that depends on the symbols of these names."""
    for number, name in _MINIMUM.findall(reason):
        if name in names:
            return f"limit {name}: --dim {name}=1:{number}, or dims={{{name!r}: (1, {number})}}"
    name, other = names[0], names[1] if len(names) > 1 else "OTHER"
    return (
        f"bound, fix or relate such dims by dims= or --dim: {name}=1:64, {name}=48, {name}={other} for one size, or "
        f"{name}=32*n and n=1:9 for a multiple"
    )
