"""Ops that leave values as they are: copies, views of the same shape, what gradients stop at."""

from __future__ import annotations

from typing import Any

import numpy as np

from distir_relax.ir import Value
from distir_relax.ops.table import (
    FREE,
    NO_GRADIENT,
    Attrs,
    Builder,
    Code,
    OnnxOperands,
    Semantics,
    Split,
    Trait,
    aten,
    define,
    onnx,
    operands,
    same_type,
)

define(
    "stop_gradient",
    Semantics(infer=same_type, torch="{0}", linear=(operands(0),)),
    Split("... -> ..."),
    cost=FREE,
    code=Code(relax="{0}"),
    gradient=NO_GRADIENT,
    traits={Trait.POINTWISE, Trait.TRIVIAL, Trait.VIEW},
)


# ATen spellings


@aten(
    "alias.default",
    "clone.default",
    "contiguous.default",
    "lift_fresh_copy.default",
    "positive.default",
    "resolve_conj.default",
    "resolve_neg.default",
)
def _identity(g: Builder, x: Value, *options: Any, **more: Any) -> Any:
    return x


@aten("detach.default", "detach_.default")
def _detach(g: Builder, x: Value) -> Any:
    return g.emit("stop_gradient", x) if "float" in x.tensor.dtype else x


@aten("dropout.default", "dropout_.default", "feature_dropout.default")
def _dropout(g: Builder, x: Value, p: float, train: bool) -> Any:
    if train and p > 0:
        raise NotImplementedError("dropout is active: call model.eval() before compiling")
    return x


# ONNX spellings


@onnx("Identity")
def _onnx_identity(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return x[0]


@onnx("Dropout")
def _onnx_dropout(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    ratio = x.number(1, attrs.get("ratio", 0.5))
    if x.number(2, False) and ratio > 0:
        raise NotImplementedError("dropout is active: export the model in eval mode")
    return x[0], np.ones(x[0].tensor.shape, dtype=bool)
