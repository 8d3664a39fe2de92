"""Bilinear forms of two vectors."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, aten, reshape_to

# ATen spellings


@aten("bilinear.default")
def _bilinear(g: Builder, a: Value, b: Value, weight: Value, bias: Value | None = None) -> Any:
    """Emit ``y[k] = a W[k] b`` as a linear layer on the products of all pairs of elements."""
    *lead, n = a.tensor.shape
    out, _, m = weight.tensor.shape
    a, b = reshape_to(g, a, (*lead, n, 1)), reshape_to(g, b, (*lead, 1, m))
    pairs = reshape_to(g, g.emit("multiply", a, b), (*lead, n * m))
    return g.aten("linear.default", pairs, reshape_to(g, weight, (out, n * m)), bias)
