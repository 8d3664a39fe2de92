"""Attention whose keys are split: each device attends to its own, and the parts are joined.

The result of a part is that of attention to its keys alone, and the logarithm of its normalizer, the sum of the
exponentials of its scores. The share of a part in the whole is that of its normalizer. Devices exchange these, a number
for each row and head; the result times its share is then one term of a sum (Dao et al., FlashAttention, 2022; Liu et
al., Ring Attention, 2023).
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Expansion

KEPT = ("scale", "causal", "masked", "boolean", "bounded", "density")
"""The attributes of attention that its gradient and its parts have, too."""


def split_keys(x: Expansion) -> tuple[Value, ...]:
    """Replace attention: each device gives its part of the result."""
    q, k, v, *masks = x.operands
    y, normalizer = x.emit("attention_part", q, k, v, *_local_masks(x, masks), **_kept(x))
    share, *_ = _joined(x, normalizer)
    return (x.emit("multiply", y, _cast(x, share)),)


def split_keys_of_gradient(x: Expansion) -> tuple[Value, ...]:
    """Replace the gradient of attention: each device gives those of its keys and values, and its part of the queries'.

    Normalizers are computed again, as scores are.
    """
    q, k, v, grad, *masks = x.operands
    masks = _local_masks(x, masks)
    y, normalizer = x.emit("attention_part", q, k, v, *masks, **_kept(x))
    share, largest, total = _joined(x, normalizer)
    normalizers = x.emit("add", largest, x.emit("log", total))
    wide = normalizer.placed.dtype
    product = x.emit("multiply", _cast(x, y, wide), _cast(x, grad, wide))
    means = x.emit("multiply", x.emit("sum", product, axis=(3,), keepdims=True), share)
    results: tuple[Value, ...] = x.emit(
        "attention_part_grad", q, k, v, grad, normalizers, x.reduced(means, "sum"), *masks, **_kept(x)
    )
    return results


def _kept(x: Expansion) -> dict[str, Any]:
    return {name: x.attrs[name] for name in KEPT if name in x.attrs}


def _local_masks(x: Expansion, masks: list[Value]) -> list[Value]:
    """Return the mask of a device's keys: bounds count from the first of these."""
    return [x.emit("subtract", masks[0], x.start("int64"))] if x.attrs.get("bounded") else masks


def _joined(x: Expansion, normalizer: Value) -> tuple[Value, Value, Value]:
    """Return the share of a device's part, the largest of the normalizers' logarithms, and their sum relative to it."""
    largest = x.reduced(normalizer, "max")
    part = x.emit("exp", x.emit("subtract", normalizer, largest))
    total = x.reduced(part, "sum")
    return x.emit("divide", part, total), largest, total


def _cast(x: Expansion, value: Value, dtype: str = "") -> Any:
    dtype = dtype or x.types[0].dtype
    return value if value.placed.dtype == dtype else x.emit("astype", value, dtype=dtype)
