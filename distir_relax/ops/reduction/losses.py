"""Losses that are means of simple differences."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, aten, promote

_REDUCTIONS = {0: "", 1: "mean.default", 2: "sum.default"}


def _reduced(g: Builder, x: Value, reduction: int) -> Any:
    name = _REDUCTIONS[reduction]
    return g.aten(name, x) if name else x


# ATen spellings


@aten("mse_loss.default")
def _mse_loss(g: Builder, x: Value, target: Value, reduction: int = 1) -> Any:
    return _reduced(g, g.emit("square", g.emit("subtract", *promote(g, x, target))), reduction)


@aten("l1_loss.default")
def _l1_loss(g: Builder, x: Value, target: Value, reduction: int = 1) -> Any:
    return _reduced(g, g.emit("abs", g.emit("subtract", *promote(g, x, target))), reduction)


@aten("binary_cross_entropy_with_logits.default")
def _binary_cross_entropy(
    g: Builder, x: Value, target: Value, weight: Value | None = None, positive: Value | None = None, reduction: int = 1
) -> Any:
    """``-(y log s(x) + (1 - y) log(1 - s(x)))``, in which no logarithm is of zero."""
    after = g.aten("log_sigmoid.default", x)
    before = g.emit("subtract", after, x)
    if positive is not None:
        after = g.emit("multiply", after, positive)
    other = g.aten("rsub.Scalar", target, 1)
    sides = [g.emit("multiply", target, after), g.emit("multiply", other, before)]
    loss = g.emit("negative", g.emit("add", *sides))
    return _reduced(g, loss if weight is None else g.emit("multiply", loss, weight), reduction)
