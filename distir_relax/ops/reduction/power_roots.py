"""Roots of sums of powers, with torch's subgradient at zero."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, like


def root(g: Builder, x: Value, order: float = 2) -> Any:
    """Return the root of nonnegative numbers; where `x` is 0 the gradient is 0 instead of the infinite slope."""
    if order == 2:
        return g.emit("safe_sqrt", x)
    # `where` multiplies the slope of the branch that is not selected by 0, so both must stay finite.
    zero, none = like(g, x, 0), g.emit("equal", x, like(g, x, 0))
    power = g.emit("power", g.emit("where", none, like(g, x, 1), x), like(g, x, 1 / order))
    return g.emit("where", none, zero, power)
