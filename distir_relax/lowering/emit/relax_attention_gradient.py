"""Gradients of attention, composed of Relax ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_MASKED_SCORE = -1e30


def attention_gradients(
    ops: Mapping[str, Callable[..., Any]],
    softmax: Callable[..., Any],
    causal_mask: Callable[..., Any],
    within_bounds: Callable[..., Any],
) -> Callable[..., Any]:
    """Return `distir_relax.kernels.attention_gradients.attention_grads` over Relax's `ops` by name."""

    def grads(q: Any, k: Any, v: Any, grad: Any, mask: Any, scale: float, causal: bool) -> Any:
        mask = within_bounds(mask, k) if mask is not None and str(mask.ty.dtype) == "int64" else mask
        number, swapped = _numbers(ops, str(q.ty.dtype)), _swapping(ops)
        scores = ops["multiply"](ops["matmul"](q, swapped(k)), number(scale))
        allowed = mask if mask is not None and str(mask.ty.dtype) == "bool" else None
        if mask is not None and allowed is None:
            scores = ops["add"](scores, mask)
        if causal:
            before = causal_mask(q, k)
            allowed = before if allowed is None else ops["logical_and"](before, allowed)
        if allowed is None:
            weights = softmax(scores, 3)
        else:
            weights = softmax(ops["where"](allowed, scores, number(_MASKED_SCORE)), 3)
            weights = ops["where"](allowed, weights, number(0.0))
        of_weights = ops["matmul"](grad, swapped(v))
        mean = ops["sum"](ops["multiply"](of_weights, weights), [3], True)
        slopes = ops["multiply"](ops["multiply"](ops["subtract"](of_weights, mean), weights), number(scale))
        return ops["matmul"](slopes, k), ops["matmul"](swapped(slopes), q), ops["matmul"](swapped(weights), grad)

    return grads


def _numbers(ops: Mapping[str, Callable[..., Any]], dtype: str) -> Callable[[float], Any]:
    return lambda value: ops["const"](value, dtype)


def _swapping(ops: Mapping[str, Callable[..., Any]]) -> Callable[[Any], Any]:
    return lambda x: ops["permute_dims"](x, (0, 1, 3, 2))
