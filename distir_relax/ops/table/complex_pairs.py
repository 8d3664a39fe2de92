"""Complex tensors in conversions, represented as pairs of real values. There is no complex dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table.table import TABLE

PREFIX = "complex."


@dataclass(frozen=True, slots=True)
class Complex:
    """A complex tensor as two real values of one type."""

    real: Value
    imaginary: Value


def complex_aten(*spellings: str) -> Callable[[Any], Any]:
    """Register a conversion of ATen ops on complex tensors, as `aten` does; some arguments are `Complex`.

    The conversion returns a `Complex` or a value: ``@complex_aten("mul.Tensor")``.
    """
    return TABLE.aten(*(PREFIX + spelling for spelling in spellings))


def aten_of(spelling: str, takes_complex: bool) -> Callable[..., Any] | None:
    """Return the conversion of an ATen op on real or complex tensors, or None."""
    return TABLE.lookup_aten(PREFIX + spelling if takes_complex else spelling)
