"""Scaled dot-product attention, kept whole: it splits by batch and by heads, and by rows of the query."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.pointwise import promote
from distir_relax.ops.registry import Attrs, Cost, Types, aten, define, operands, relax_spelling
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.shape import reshape_to


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    q, k, v = types[:3]
    if len(q.shape) != 4 or q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError("expected query (b, h, s, d), key (b, h, t, d) and value (b, h, t, e)")
    return (TensorType((*q.shape[:3], v.shape[3]), q.dtype),)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    # A causal mask counts rows from the first, so the rows of a causal query stay together.
    row = "[s]" if attrs["causal"] else "s"
    text = f"b h {row} [d], b h [t] [d], b h [t] e"
    if len(types) == 4:
        text += ", " + " ".join(["b", "h", row, "[t]"][4 - len(types[3].shape) :])
    return parse_rule(f"{text} -> b h {row} e", [t.shape for t in types], [results[0].shape])


def _torch(attrs: Attrs) -> str:
    mask = "attn_mask={3}, " if attrs["masked"] else ""
    causal = "is_causal=True, " if attrs["causal"] else ""
    return f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}, {mask}{causal}scale={{scale}})"


def _relax(attrs: Attrs) -> str:
    scores = "R.multiply(R.matmul({0}, R.permute_dims({1}, (0, 1, 3, 2))), R.const({scale}, {dtype}))"
    if attrs["causal"]:
        scores = f"R.where(causal_mask({{0}}, {{1}}), {scores}, R.const(-1e30, {{dtype}}))"
    if attrs["masked"]:
        scores = (
            f"R.where({{3}}, {scores}, R.const(-1e30, {{dtype}}))" if attrs["boolean"] else f"R.add({scores}, {{3}})"
        )
    return f"R.matmul(R.nn.softmax({scores}, 3), {{2}})"


def _products(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    """Scores, and values weighted by them: as one product over the widths of both."""
    (b, h, s, d), (_, _, t, e) = types[0].shape, types[2].shape
    return b * h, s, t, d + e


define(
    "nn.scaled_dot_product_attention",
    infer=_infer,
    rule=_rule,
    torch=_torch,
    relax=_relax,
    linear=(operands(2),),
    flops=lambda types, attrs, results: 4.0 * results[0].elements * types[1].shape[2],
    cost=Cost(product=_products),
)


@aten("scaled_dot_product_attention.default")
def _attention(
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout:
        raise NotImplementedError("attention dropout: put the model in eval mode")
    if enable_gqa and k.type.shape[1] != q.type.shape[1]:
        k, v = (_repeat_heads(g, x, q.type.shape[1] // k.type.shape[1]) for x in (k, v))
    boolean = mask is not None and mask.type.dtype == "bool"
    if mask is not None and not boolean:
        mask = promote(g, mask, q)[0]
    attrs = {
        "scale": 1.0 / math.sqrt(q.type.shape[-1]) if scale is None else float(scale),
        "causal": causal,
        "masked": mask is not None,
        "boolean": boolean,
        "dtype": q.type.dtype,
    }
    return g.emit("nn.scaled_dot_product_attention", *[x for x in (q, k, v, mask) if x is not None], **attrs)


def _repeat_heads(g: Any, x: Any, times: int) -> Any:
    b, h, s, d = x.type.shape
    wide = g.emit("broadcast_to", reshape_to(g, x, (b, h, 1, s, d)), shape=(b, h, times, s, d))
    return reshape_to(g, wide, (b, h * times, s, d))


@relax_spelling("relax.nn.attention", "relax.nn.attention_bias")
def _relax_attention(g: Any, args: Any, attrs: Any) -> Any:
    """Relax has (batch, row, head, dim), and may start the causal mask at the bottom right."""
    q, k, v = (g.emit("permute_dims", x, axes=(0, 2, 1, 3)) for x in args[:3])
    if attrs["window_size"] is not None:
        raise NotImplementedError("attention with a window")
    causal = attrs["causal_mask"]
    if causal == "BottomRight" and q.type.shape[2] != k.type.shape[2]:
        raise NotImplementedError("a causal mask aligned at the bottom right of scores that are not square")
    y = _attention(g, q, k, v, *args[3:], causal=causal is not None, scale=attrs["scale"])
    return g.emit("permute_dims", y, axes=(0, 2, 1, 3))
