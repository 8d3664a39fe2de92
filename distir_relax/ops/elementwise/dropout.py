"""Dropout in training.

The mask depends on a seed and on the positions of elements in the whole tensor: a device that holds a shard takes the
positions of its shard, one vector per dim, split as the dim is. The backward step regenerates the mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distir_relax.ir import TensorType, Value
from distir_relax.ops.elementwise.seed import check_positions, element_positions, next_seed
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    define,
    dim_names,
    filled,
    flops_per_result,
    gradient_of,
    onnx,
    operands,
    parse_rule,
)

_LIMIT = -1.7580993408473766
"""The smallest result of SELU."""


def dropout(g: Builder, x: Value, rate: float) -> Any:
    """Return `x` after dropout with `rate`, using the next seed.

    Raises NotImplementedError unless the program is for training (`Builder.training`).
    """
    if not rate or not x.tensor.elements:
        return x
    if not g.training:
        raise NotImplementedError("dropout is active: call model.eval() before compiling")
    return g.emit("nn.dropout", x, next_seed(g), *element_positions(g, x.tensor.shape), rate=float(rate))


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, seed, *places = types
    if "float" not in x.dtype:
        raise ValueError("expected a tensor of floats")
    check_positions(seed, places, x.shape)
    if not 0 <= attrs["rate"] <= 1:
        raise ValueError("expected a rate from 0 to 1")
    return (x,)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = dim_names(len(types[0].shape))
    dims = " ".join(names)
    return parse_rule(f"{', '.join([dims, '', *names])} -> {dims}", [t.shape for t in types], [types[0].shape])


define(
    "nn.dropout",
    Semantics(
        infer=_infer,
        torch="random.dropout({*}, rate={rate})",
        linear=(operands(0),),
        attributes={"rate": "the fraction of elements set to zero"},
    ),
    Split(_rule),
    cost=Cost(flops=flops_per_result(12.0)),
    code=Code(relax="random.dropout({*}, rate={rate})"),
    gradient=gradient_of(
        lambda b: b.emit("nn.dropout", b.grad, *b.op.operands[1:], rate=b.attrs["rate"]),
    ),
)


# ATen spellings


@aten("dropout.default", "dropout_.default")
def _dropout(g: Builder, x: Value, p: float, train: bool) -> Any:
    return dropout(g, x, p) if train and p else x


@aten("feature_dropout.default", "feature_dropout_.default")
def _feature_dropout(g: Builder, x: Value, p: float, train: bool) -> Any:
    """Drop whole channels."""
    if not train or not p:
        return x
    return g.emit("multiply", x, dropout(g, filled(g, _channels(x), 1.0, x.tensor.dtype), p))


@aten("alpha_dropout.default", "alpha_dropout_.default")
def _alpha_dropout(g: Builder, x: Value, p: float, train: bool) -> Any:
    """Keep the mean and the variance of SELU's results (Klambauer et al., Self-Normalizing Neural Networks, 2017)."""
    return _self_normalizing(g, x, x.tensor.shape, p) if train and p else x


@aten("feature_alpha_dropout.default", "feature_alpha_dropout_.default")
def _feature_alpha_dropout(g: Builder, x: Value, p: float, train: bool) -> Any:
    """Drop whole channels, as alpha dropout does."""
    return _self_normalizing(g, x, _channels(x), p) if train and p else x


def _channels(x: Value) -> tuple[int, ...]:
    """Return the shape of a mask of whole channels."""
    return (*x.tensor.shape[:2], *(1 for _ in x.tensor.shape[2:]))


def _self_normalizing(g: Builder, x: Value, shape: Sequence[int], p: float) -> Any:
    """Return ``a x + b`` where a mask of a shape keeps elements, else ``a l + b`` for SELU's limit `l`."""
    if p == 1.0:
        return g.emit("multiply", x, g.constant(0.0, x.tensor.dtype))
    a = 1.0 / math.sqrt((_LIMIT**2 * p + 1.0) * (1.0 - p))
    rate, scale, limit = (g.constant(value, x.tensor.dtype) for value in (1.0 - p, a, -_LIMIT * a))
    kept = g.emit("multiply", dropout(g, filled(g, shape, 1.0, x.tensor.dtype), p), rate)
    shift = g.emit("multiply", g.emit("subtract", kept, rate), limit)
    return g.emit("add", g.emit("multiply", x, g.emit("multiply", kept, scale)), shift)


@aten("native_dropout.default")
def _native_dropout(g: Builder, x: Value, p: float, train: bool | None) -> Any:
    """Return the result and the mask of retained elements."""
    if train is False or not p:
        return x, filled(g, x.tensor.shape, True, "bool")
    factors = dropout(g, filled(g, x.tensor.shape, 1.0, x.tensor.dtype), p)
    return g.emit("multiply", x, factors), g.emit("not_equal", factors, g.constant(0, x.tensor.dtype))


# ONNX spellings


@onnx("Dropout")
def _onnx_dropout(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    ratio = x.number(1, attrs.get("ratio", 0.5))
    if x.number(2, False) and ratio > 0:
        raise NotImplementedError("dropout is active: export the model in eval mode")
    return x[0], np.ones(x[0].tensor.shape, dtype=bool)
