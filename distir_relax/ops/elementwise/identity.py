"""Ops that leave values as they are: copies, views of the same shape, dropout out of training."""

from __future__ import annotations

from typing import Any

import numpy as np

from distir_relax.ir import Value
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, onnx

# ATen spellings


@aten(
    "alias.default",
    "clone.default",
    "contiguous.default",
    "detach.default",
    "detach_.default",
    "lift_fresh_copy.default",
    "positive.default",
    "resolve_conj.default",
    "resolve_neg.default",
)
def _identity(g: Builder, x: Value, *options: Any, **more: Any) -> Any:
    return x


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
