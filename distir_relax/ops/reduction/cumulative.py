"""Cumulative maxima and minima, and cumulative log-sum-exp."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.reduction.reduction_axes import axes_of, infer_along_axis
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    define,
    gradient_of,
    parse_rule,
    promote,
)


def _infer_extremes(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (kind,) = infer_along_axis(types, attrs)
    return kind, TensorType(kind.shape, "int64")


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    dims = " ".join(f"[d{i}]" if i == attrs["axis"] else f"d{i}" for i in range(len(types[0].shape)))
    return parse_rule(f"{dims} -> {', '.join([dims] * len(results))}", [types[0].shape], [r.shape for r in results])


def _to_places(b: Backward) -> Value:
    """Add the gradient of each extreme to its element."""
    zeros, axis = b.zeros(b.x()), b.attrs["axis"]
    return b.emit("scatter_elements", zeros, b.y(1), b.grad, axis=axis, reduction="add")  # type: ignore[no-any-return]


for _name in ("cummax", "cummin"):
    define(
        _name,
        Semantics(infer=_infer_extremes, torch=f"torch.{_name}({{0}}, {{axis}})"),
        Split(_rule),
        code=Code(relax=f"scans.{_name}({{0}}, {{axis}})"),
        gradient=gradient_of(_to_places),
    )


def _log_sums_back(b: Backward) -> Value:
    """Emit ``sum(g[i] exp(x[j] - y[i]) for i >= j)`` by logarithms, separately for positive and negative gradients."""
    import torch

    axis, dtype = b.attrs["axis"], b.grad.tensor.dtype
    lowest = b.number(torch.finfo(getattr(torch, dtype)).min)

    def part(name: str) -> Value:
        mine = b.emit(name, b.grad, b.number(0.0))
        size = b.emit("where", mine, b.emit("abs", b.grad), b.number(1.0))
        terms = b.emit("subtract", b.emit("where", mine, b.emit("log", size), lowest), b.y())
        sums = b.emit("logcumsumexp", b.emit("flip", terms, axis=axis), axis=axis)
        return b.emit("exp", b.emit("add", b.emit("flip", sums, axis=axis), b.x()))  # type: ignore[no-any-return]

    return b.emit("subtract", part("greater"), part("less"))  # type: ignore[no-any-return]


define(
    "logcumsumexp",
    Semantics(infer=infer_along_axis, torch="torch.logcumsumexp({0}, {axis})"),
    Split(_rule),
    cost=Cost(flops=lambda types, attrs, results: 16.0 * types[0].elements),
    code=Code(relax="scans.logcumsumexp({0}, {axis})"),
    gradient=gradient_of(_log_sums_back),
)


# ATen spellings


def _extremes(name: str) -> Any:
    def convert(g: Builder, x: Value, dim: int) -> Any:
        if not x.tensor.shape:
            return x, g.constant(0, "int64")
        return g.emit(name, x, axis=axes_of(x, dim)[0])

    return convert


aten("cummax.default")(_extremes("cummax"))
aten("cummin.default")(_extremes("cummin"))


@aten("logcumsumexp.default")
def _logcumsumexp(g: Builder, x: Value, dim: int) -> Any:
    (x,) = promote(g, x, floating=True)
    return g.emit("logcumsumexp", x, axis=axes_of(x, dim)[0]) if x.tensor.shape else x
