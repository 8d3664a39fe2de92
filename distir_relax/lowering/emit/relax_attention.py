"""Gradients of attention, and attention to a part of the keys, composed of Relax ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_MASKED_SCORE = -1e30
_LEAST_TOTAL = 1e-30


def attention_gradients(
    ops: Mapping[str, Callable[..., Any]],
    softmax: Callable[..., Any],
    causal_mask: Callable[..., Any],
    within_bounds: Callable[..., Any],
) -> Callable[..., Any]:
    """Return `distir_relax.kernels.attention_gradients.attention_grads` over Relax's `ops` by name."""

    def grads(q: Any, k: Any, v: Any, grad: Any, mask: Any, scale: float, causal: bool) -> Any:
        number, swapped = _numbers(ops, str(q.ty.dtype)), _swapping(ops)
        scores, allowed = _scores(ops, within_bounds, q, k, mask, scale)
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


def attention_parts(
    ops: Mapping[str, Callable[..., Any]], within_bounds: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Return the functions of `distir_relax.kernels.attention_parts` over Relax's `ops` by name."""

    def attend_part(q: Any, k: Any, v: Any, mask: Any, scale: float, repeats: tuple[int, ...] = ()) -> Any:
        assert not repeats
        wide, number = _wide(q), _numbers(ops, _wide(q))
        scores, allowed = _scores(ops, within_bounds, q, k, mask, scale)
        scores = _of_dtype(ops, scores, wide)
        if allowed is not None:
            scores = ops["where"](allowed, scores, number(_MASKED_SCORE))
        largest = ops["max"](scores, [3], True)
        powers = ops["exp"](ops["subtract"](scores, largest))
        if allowed is not None:
            powers = ops["where"](allowed, powers, number(0.0))
        total = ops["sum"](powers, [3], True)
        # A row without keys has a total of 0.
        least = ops["maximum"](total, number(_LEAST_TOTAL))
        normalizers = ops["add"](
            largest, ops["log"](ops["where"](ops["equal"](total, number(0.0)), number(1.0), least))
        )
        weights = _of_dtype(ops, ops["divide"](powers, least), str(q.ty.dtype))
        return ops["matmul"](weights, v), normalizers

    def attention_part_grads(
        q: Any, k: Any, v: Any, grad: Any, normalizers: Any, means: Any, mask: Any, scale: float
    ) -> Any:
        wide, dtype, swapped = _wide(q), str(q.ty.dtype), _swapping(ops)
        number = _numbers(ops, wide)
        scores, allowed = _scores(ops, within_bounds, q, k, mask, scale)
        weights = ops["exp"](ops["subtract"](_of_dtype(ops, scores, wide), normalizers))
        if allowed is not None:
            weights = ops["where"](allowed, weights, number(0.0))
        of_weights = _of_dtype(ops, ops["matmul"](grad, swapped(v)), wide)
        slopes = ops["multiply"](ops["multiply"](ops["subtract"](of_weights, means), weights), number(scale))
        slopes, weights = (_of_dtype(ops, x, dtype) for x in (slopes, weights))
        return ops["matmul"](slopes, k), ops["matmul"](swapped(slopes), q), ops["matmul"](swapped(weights), grad)

    return {"attend_part": attend_part, "attention_part_grads": attention_part_grads}


def _scores(
    ops: Mapping[str, Callable[..., Any]], within_bounds: Callable[..., Any], q: Any, k: Any, mask: Any, scale: float
) -> tuple[Any, Any]:
    """Return the scores, and the boolean mask of those that count; None without one."""
    scores = ops["multiply"](ops["matmul"](q, _swapping(ops)(k)), _numbers(ops, str(q.ty.dtype))(scale))
    if mask is None:
        return scores, None
    if str(mask.ty.dtype) == "int64":
        mask = within_bounds(mask, k)
    return (scores, mask) if str(mask.ty.dtype) == "bool" else (ops["add"](scores, mask), None)


def _wide(x: Any) -> str:
    return "float64" if str(x.ty.dtype) == "float64" else "float32"


def _of_dtype(ops: Mapping[str, Callable[..., Any]], x: Any, dtype: str) -> Any:
    return ops["astype"](x, dtype)


def _numbers(ops: Mapping[str, Callable[..., Any]], dtype: str) -> Callable[[float], Any]:
    return lambda value: ops["const"](value, dtype)


def _swapping(ops: Mapping[str, Callable[..., Any]]) -> Callable[[Any], Any]:
    return lambda x: ops["permute_dims"](x, (0, 1, 3, 2))
