"""How an op takes a quantized weight in place of a matrix: the facet `QuantizedForm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.ir import Op, Value


@dataclass(frozen=True)
class QuantizedForm:
    """An operand that may be a weight of 8 or 4 bits (`distir_relax.kernels.quantized`)."""

    operand: int
    """The index of the operand."""
    emit: Callable[[Any, Op, Sequence[Value]], Value] | None
    """From a builder, the op, and the values, scales and perhaps minimums of the weight (n, k), or of a stack of such
    weights: emits the result.

    None if the result is the transposed weight, and so a quantized weight as well."""
    is_transposed: bool = False
    """Whether the operand is the transposed weight, (k, n), or a stack of these."""
    is_product: bool = True
    """Whether it is multiplied; products are what weights are quantized for."""
    applies: Callable[[Op], bool] = lambda op: True
    """Whether an instance of the op has this form."""
