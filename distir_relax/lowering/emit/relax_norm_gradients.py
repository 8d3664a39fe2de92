"""Gradients of layer norm and RMS norm, composed of Relax ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any


def norm_gradients(ops: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the functions of `distir_relax.kernels.norms` that compute gradients, over Relax's `ops` by name."""
    found: dict[str, Callable[..., Any]] = {}
    for name, is_centred in (("layer_norm", True), ("rms_norm", False)):
        found[f"{name}_grad"] = partial(_grad, ops, is_centred)
        found[f"{name}_weight_grad"] = partial(_weight_grad, ops, is_centred)
    return found


def _grad(
    ops: Mapping[str, Any], is_centred: bool, x: Any, weight: Any, grad: Any, axes: Sequence[int], epsilon: float
) -> Any:
    """Return the gradient of `x`: what varies with its mean and its deviation is subtracted."""
    dtype, wide = str(x.ty.dtype), _wide(x)
    x, weight, grad = (ops["astype"](value, wide) for value in (x, weight, grad))
    normal, scale = _normal(ops, is_centred, x, axes, epsilon, wide)
    weighted = ops["multiply"](grad, weight)
    along = ops["mean"](ops["multiply"](weighted, normal), axes, True)
    result = ops["subtract"](weighted, ops["multiply"](normal, along))
    if is_centred:
        result = ops["subtract"](result, ops["mean"](weighted, axes, True))
    return ops["astype"](ops["multiply"](result, scale), dtype)


def _weight_grad(
    ops: Mapping[str, Any], is_centred: bool, x: Any, grad: Any, axes: Sequence[int], epsilon: float, dtype: str
) -> Any:
    """Return the gradient of the weight and, of a layer norm, of the bias: sums over the dims before `axes`."""
    rows, wide = list(range(axes[0])), _wide(x)
    x, grad = (ops["astype"](value, wide) for value in (x, grad))
    terms = [ops["multiply"](grad, _normal(ops, is_centred, x, axes, epsilon, wide)[0]), grad]
    sums = [ops["astype"](ops["sum"](term, rows) if rows else term, dtype) for term in terms]
    return tuple(sums) if is_centred else sums[0]


def _normal(
    ops: Mapping[str, Any], is_centred: bool, x: Any, axes: Sequence[int], epsilon: float, dtype: str
) -> tuple[Any, Any]:
    """Return the normalized `x`, and its factor."""
    centred = ops["subtract"](x, ops["mean"](x, axes, True)) if is_centred else x
    square = ops["mean"](ops["multiply"](centred, centred), axes, True)
    scale = ops["rsqrt"](ops["add"](square, ops["const"](epsilon, dtype)))
    return ops["multiply"](centred, scale), scale


def _wide(x: Any) -> str:
    return "float64" if str(x.ty.dtype) == "float64" else "float32"
