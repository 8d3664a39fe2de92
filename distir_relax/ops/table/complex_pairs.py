"""Complex tensors, for which there is no dtype: in a conversion they are pairs of real ones."""

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
    """Declare how ATen ops are written that take a complex tensor: as `aten`, some arguments being `Complex`.

    The conversion gives a `Complex` or a value: ``@complex_aten("mul.Tensor")``.
    """
    return TABLE.aten(*(PREFIX + spelling for spelling in spellings))


def aten_of(spelling: str, takes_complex: bool) -> Callable[..., Any] | None:
    """The conversion of an ATen op, of real or of complex tensors; None where there is none."""
    return TABLE.lookup_aten(PREFIX + spelling if takes_complex else spelling)
