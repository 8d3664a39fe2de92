"""ATen ops that leave values as they are: copies, views of the same shape, casts, dropout out of training."""

from __future__ import annotations

from typing import Any

import numpy as np

from distir_relax.ops.pointwise import cast
from distir_relax.ops.registry import aten, onnx_spelling


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
def _same(g: Any, x: Any, *options: Any, **more: Any) -> Any:
    return x


@aten("to.device")
def _to_device(g: Any, x: Any, device: Any, dtype: Any, *options: Any, **more: Any) -> Any:
    return _to(g, x, dtype)


@aten("to.dtype", "to.dtype_layout", "_to_copy.default", "type_as.default", "to.other")
def _to(g: Any, x: Any, dtype: Any = None, *options: Any, **more: Any) -> Any:
    if hasattr(dtype, "type"):
        return cast(g, x, dtype.type.dtype)
    return x if dtype is None else cast(g, x, str(dtype).removeprefix("torch."))


@aten("dropout.default", "dropout_.default", "feature_dropout.default")
def _dropout(g: Any, x: Any, p: float, train: bool) -> Any:
    if train and p > 0:
        raise NotImplementedError("dropout is active: call model.eval() before compiling")
    return x


@onnx_spelling("Identity")
def _onnx_same(g: Any, x: Any, attrs: Any) -> Any:
    return x[0]


@onnx_spelling("Dropout")
def _onnx_dropout(g: Any, x: Any, attrs: Any) -> Any:
    ratio = x.number(1, attrs.get("ratio", 0.5))
    if x.number(2, False) and ratio > 0:
        raise NotImplementedError("dropout is active: export the model in eval mode")
    return x[0], np.ones(x[0].type.shape, dtype=bool)
