"""Fused scaled dot-product attention; it splits by batch, heads, query rows, and keys.

With the attribute ``grouped``, which `SkipRepeats` sets in ranks' programs, each head of keys and values serves several
in a row of the queries: equally many, or as many as ``repeats`` has for each.
"""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.layout import is_symbolic
from distir_relax.ops.contraction.attention_gradient import (
    MASKED_SCORE,
    attended_keys,
    attention_gradient,
    attention_weights,
    mask_factors,
    rows_and_keys,
)
from distir_relax.ops.contraction.attention_split import ALGORITHMS, attend_in_turns, split_keys
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    Gradient,
    IncrementalForm,
    IncrementalStep,
    OnnxOperands,
    Ring,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    broadcast_shape,
    broadcast_to,
    define,
    onnx,
    operands,
    parse_rule,
    promote,
    relax,
    reshape_to,
)


def infer_attention(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Return the type of the result. Raises ValueError for operands of other shapes."""
    q, k, v = types[:3]
    if len(q.shape) != 4 or len(k.shape) != 4 or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError("expected query (b, h, s, d), key (b, h, t, d) and value (b, h, t, e)")
    heads = sum(_repeats(types, attrs)) if attrs.get("grouped") else k.shape[1]
    if (k.shape[0], heads) != q.shape[:2]:
        raise ValueError("expected query (b, h, s, d), key (b, h, t, d) and value (b, h, t, e)")
    return (TensorType((*q.shape[:3], v.shape[3]), q.dtype),)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    row, key = rows_and_keys(attrs)
    head, key_head = ("[h]", "[k]") if attrs.get("grouped") else ("h", "h")
    text = f"b {head} {row} [d], b {key_head} {key} [d], b {key_head} {key} e" + mask_factors(types, 3, row, key)
    return parse_rule(f"{text} -> b {head} {row} e", [t.shape for t in types], [results[0].shape])


def _repeats(types: Types, attrs: Attrs) -> tuple[int, ...]:
    """Return how many heads of the queries each head of the keys serves."""
    heads, key_heads = types[0].shape[1], types[1].shape[1]
    repeats: tuple[int, ...] = attrs.get("repeats") or (heads // max(key_heads, 1),) * key_heads
    return repeats if len(repeats) == key_heads else ()


def _torch(attrs: Attrs) -> str:
    repeats = f", repeats={attrs['repeats']}" if attrs.get("repeats") else ""
    causal = ", causal=True" if attrs["causal"] else ""
    return f"attention.attend({{0}}, {{1}}, {{2}}, {'{3}' if attrs['masked'] else 'None'}, {{scale}}{repeats}{causal})"


def load_kernel(types: Types, attrs: Attrs) -> str:
    """Return the code that loads the kernel of a step of several requests."""
    q, k, v = types[:3]
    return f'attention.load_kernel({_repeats(types, attrs)}, {k.shape[3]}, {v.shape[3]}, "{q.dtype}")'


def relax_attention(attrs: Attrs) -> str:
    """Return the Relax code, of operands ``{0}`` to ``{3}``."""
    scores = "R.multiply(R.matmul({0}, R.permute_dims({1}, (0, 1, 3, 2))), R.const({scale}, {dtype}))"
    if attrs["causal"]:
        scores = f"R.where(causal_mask({{0}}, {{1}}), {scores}, R.const(-1e30, {{dtype}}))"
    if attrs["masked"]:
        allowed = "within_bounds({3}, {1})" if attrs.get("bounded") else "{3}" if attrs["boolean"] else ""
        scores = f"R.where({allowed}, {scores}, R.const(-1e30, {{dtype}}))" if allowed else f"R.add({scores}, {{3}})"
    return f"R.matmul(R.nn.softmax({scores}, 3), {{2}})"


def attention_products(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    """Return the combined matrix product of scores and of weighted values, with the widths of both."""
    (b, h, s, d), (_, _, t, e) = types[0].shape, types[2].shape
    return b * h, s, t, d + e


def _cpu_products(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    batch, rows, columns, inner = attention_products(types, attrs, results)
    return batch, rows, attended_keys(rows, columns, attrs), inner


def _workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace: a boolean mask is converted to an additive one."""
    mask = types[3] if len(types) > 3 else None
    return mask.elements * (types[0].bytes / max(types[0].elements, 1)) if mask and mask.dtype == "bool" else 0.0


def _continue_causal(step: IncrementalStep) -> Value:
    """Mask by the positions of the new rows: those of a causal query count from the first."""
    q, k, v, *masks = step.operands
    first = step.emit("arange", start=step.past, end=step.past + step.new, stride=1, dtype="int64")
    row = reshape_to(step.g, first, (step.new, 1))
    column = step.emit("arange", start=0, end=k.tensor.shape[2], stride=1, dtype="int64")
    allowed = step.emit("greater_equal", row, column)
    if masks and step.attrs["boolean"]:
        allowed = step.emit("logical_and", allowed, masks[0])
    elif masks:
        none = step.g.constant(MASKED_SCORE, q.tensor.dtype)
        allowed = step.emit("where", allowed, masks[0], none)
    attrs = {**step.attrs, "causal": False, "masked": True, "boolean": allowed.tensor.dtype == "bool"}
    y: Value = step.emit("nn.scaled_dot_product_attention", q, k, v, allowed, **attrs)
    return y


define(
    "nn.scaled_dot_product_attention",
    Semantics(infer=infer_attention, torch=_torch, linear=(operands(2),)),
    Split(
        _rule,
        expand={"t": split_keys},
        # Joining parts costs a tenth more.
        work={"t": 1.1},
        ring={"s": Ring("t", attend_in_turns, work=1.1)},
        positional=frozenset({"t"}),
        exact=frozenset({"t"}),
        algorithms=ALGORITHMS,
    ),
    cost=Cost(
        flops=lambda types, attrs, results: 4.0 * results[0].elements * types[1].shape[2],
        product=attention_products,
        cpu_product=_cpu_products,
        workspace=_workspace,
    ),
    code=Code(
        relax=relax_attention,
        unrepeated=(1, 2),
        mask=3,
    ),
    gradient=Gradient(all=attention_gradient),
    incremental=IncrementalForm(dims=lambda op: (2,), compute=_continue_causal, of_states="nn.attention_of_states"),
    traits={Trait.NATIVE},
)


# ATen spellings


@aten("scaled_dot_product_attention.default")
def _attention(
    g: Builder,
    q: Any,
    k: Value,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if "float" not in q.tensor.dtype or not all(x.tensor.elements for x in (q, k, v)):
        raise NotImplementedError(f"attention of {q.tensor}, {k.tensor}, {v.tensor}")
    if enable_gqa and k.tensor.shape[-3] != q.tensor.shape[-3]:
        k, v = (_repeat_heads(g, x, q.tensor.shape[-3] // k.tensor.shape[-3]) for x in (k, v))
    mask = None if mask is None or _allows_all(g, mask) else _before_broadcast(g, mask)
    leading = broadcast_shape([TensorType(x.tensor.shape[:-2], q.tensor.dtype) for x in (q, k, v)])
    wide = (math.prod(leading[:-1]), leading[-1]) if leading else (1, 1)
    q, k, v = (_to_four_dims(g, x, leading, wide) for x in (q, k, v))
    if mask is not None and (len(leading) != 2 or len(mask.tensor.shape) > 4):
        one_for_all = all(n == 1 for n in mask.tensor.shape[:-2])
        mask = _to_four_dims(g, mask, *(((1,) * len(leading), (1, 1)) if one_for_all else (leading, wide)))
    if mask is not None and mask.tensor.dtype != "bool":
        mask = promote(g, mask, q)[0]
    scale = _default_scale(q.tensor.shape[-1]) if scale is None else float(scale)
    if dropout:
        # Dropout applies to the probabilities, so attention is decomposed.
        weights = attention_weights(g, q, k, mask, causal, scale)
        y = g.emit("matmul", g.aten("dropout.default", weights, dropout, True), v)
    else:
        y = _emit_attention(g, q, k, v, mask, causal, scale)
    return reshape_to(g, y, (*leading, *y.tensor.shape[2:]))


def _allows_all(g: Builder, mask: Value) -> bool:
    """Return whether a mask is a constant that is true everywhere, as models have for images."""
    data = g.constants.get(mask.name)
    return data is not None and mask.tensor.dtype == "bool" and bool(data.all())


def _before_broadcast(g: Builder, mask: Value) -> Value:
    """Return a mask before its samples and heads were broadcast, as attention takes it, too: it may have bounds."""
    made = next((op for op in reversed(g.ops) if op.results[0] == mask), None)
    if made is None or made.name != "broadcast_to":
        return mask
    before, shape = made.operands[0], mask.tensor.shape
    return before if len(before.tensor.shape) == len(shape) and before.tensor.shape[-2:] == shape[-2:] else mask


def _to_four_dims(g: Builder, x: Value, leading: tuple[int, ...], wide: tuple[int, int]) -> Any:
    """Broadcast the leading dims of `x` to `leading`, and collapse them into the two of `wide`."""
    return reshape_to(g, broadcast_to(g, x, (*leading, *x.tensor.shape[-2:])), (*wide, *x.tensor.shape[-2:]))


def _default_scale(width: int) -> float:
    if is_symbolic(width):
        raise NotImplementedError(f"attention over vectors of a symbolic size, {width}")
    return 1.0 / math.sqrt(width) if width else math.inf


def _emit_attention(g: Builder, q: Any, k: Value, v: Any, mask: Any, causal: bool, scale: float) -> Any:
    attrs = {
        "scale": scale,
        "causal": causal,
        "masked": mask is not None,
        "boolean": mask is not None and mask.tensor.dtype == "bool",
        "dtype": q.tensor.dtype,
    }
    return g.emit("nn.scaled_dot_product_attention", *[x for x in (q, k, v, mask) if x is not None], **attrs)


def _repeat_heads(g: Builder, x: Value, times: int) -> Any:
    *b, h, s, d = x.tensor.shape
    wide = g.emit("broadcast_to", reshape_to(g, x, (*b, h, 1, s, d)), shape=(*b, h, times, s, d))
    return reshape_to(g, wide, (*b, h * times, s, d))


# Relax spellings


@relax("relax.nn.attention", "relax.nn.attention_bias")
def _relax_attention(g: Builder, args: Any, attrs: Attrs) -> Any:
    """Relax has (batch, row, head, dim), and may align the causal mask at the bottom right."""
    q, k, v = (g.emit("permute_dims", x, axes=(0, 2, 1, 3)) for x in args[:3])
    if attrs["window_size"] is not None:
        raise NotImplementedError("attention with a window")
    causal = attrs["causal_mask"]
    if causal == "BottomRight" and q.tensor.shape[2] != k.tensor.shape[2]:
        raise NotImplementedError("a causal mask aligned at the bottom right of scores that are not square")
    mask = args[3] if len(args) > 3 else None
    y = _attention(g, q, k, v, mask, causal=causal is not None, scale=attrs["scale"])
    return g.emit("permute_dims", y, axes=(0, 2, 1, 3))


# ONNX spellings


@onnx("Attention")
def _onnx_attention(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    """The 4-D form, (batch, head, row, dim), and the 3-D form with heads and dims combined."""
    plain = {"q_num_heads", "kv_num_heads", "is_causal", "scale", "opset", "outputs"}
    if any(x.has(i) for i in range(4, len(x))) or set(attrs) - plain or attrs["outputs"] > 1:
        raise NotImplementedError("attention with a cache, or other than a softmax of the scores")
    rows = x[0].tensor.shape[1]
    flat = len(x[0].tensor.shape) == 3
    parts = [x[i] for i in range(3)]
    if flat:
        heads = (attrs["q_num_heads"], attrs["kv_num_heads"], attrs["kv_num_heads"])
        parts = [_heads(g, part, count) for part, count in zip(parts, heads, strict=True)]
    if attrs.get("is_causal", 0) and (x.has(3) or parts[0].tensor.shape[2] != parts[1].tensor.shape[2]):
        raise NotImplementedError("causal attention with a mask of its own, or of scores that are not square")
    mask = x[3] if x.has(3) else None
    scale = attrs.get("scale", _default_scale(parts[0].tensor.shape[-1]))
    arguments = (*parts, mask, 0.0, bool(attrs.get("is_causal", 0)), scale, True)
    y = g.aten("scaled_dot_product_attention.default", *arguments)
    if not flat:
        return y
    y = g.emit("permute_dims", y, axes=(0, 2, 1, 3))
    return reshape_to(g, y, (y.tensor.shape[0], rows, y.tensor.shape[2] * y.tensor.shape[3]))


def _heads(g: Builder, x: Value, count: int) -> Any:
    b, s, width = x.tensor.shape
    return g.emit("permute_dims", reshape_to(g, x, (b, s, count, width // count)), axes=(0, 2, 1, 3))
