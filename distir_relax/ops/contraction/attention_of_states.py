"""Attention to growing states with their new elements, which it returns, too: `AttendStates` puts it into programs.

``nn.attention_of_states(q, k, v, past_k, past_v[, mask])`` appends `k` and `v` to the states, and attends to views of
the results. Attribute ``views`` has for keys and for values the dim that grows, the shape (-1 along the tokens) and the
order of dims of the view; both are empty for those of the state. The others are those of
``nn.scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.contraction.attention import attention_products, infer_attention, load_kernel, relax_attention
from distir_relax.ops.table import Attrs, Code, Cost, ForRequests, Rule, Semantics, Split, Types, define, parse_rule

_STATES = (3, 4)
"""The operands that are states."""


def _all_and_viewed(types: Types, attrs: Attrs) -> tuple[list[TensorType], list[TensorType]]:
    """Return the types of the states with their new elements, and of keys and values."""
    wholes, viewed = [], []
    for new, state, (axis, shape, axes) in zip(types[1:3], types[3:5], attrs["views"], strict=True):
        grown = list(state.shape)
        grown[axis] += new.shape[axis]
        same = list(new.shape)
        same[axis] = state.shape[axis]
        if tuple(same) != state.shape or new.dtype != state.dtype:
            raise ValueError(f"{new} has other dims than the state {state}, to which it is appended")
        wholes.append(TensorType(tuple(grown), state.dtype))
        view: Sequence[Any] = [grown[axis] if size == -1 else size for size in shape] or grown
        viewed.append(TensorType(tuple(view[dim] for dim in axes) if axes else tuple(view), state.dtype))
    return wholes, viewed


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if len(types) != 5 + attrs["masked"]:
        raise ValueError("expected a query, new keys and values, their states, and a mask if it is masked")
    wholes, viewed = _all_and_viewed(types, attrs)
    return (*infer_attention([types[0], *viewed, *types[5:]], attrs), *wholes)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """Nothing is split: ranks' programs have the op, whose shapes are those of shards."""

    def whole(letter: str, kinds: Types) -> str:
        return ", ".join(" ".join(f"[{letter}{n}_{dim}]" for dim in range(len(t.shape))) for n, t in enumerate(kinds))

    text = f"{whole('x', types)} -> {whole('y', results)}"
    return parse_rule(text, [t.shape for t in types], [t.shape for t in results])


def _torch(attrs: Attrs) -> str:
    mask = "{5}" if attrs["masked"] else "None"
    repeats = f", repeats={attrs['repeats']}" if attrs.get("repeats") else ""
    return f"attention.attend_states({{0}}, {{1}}, {{2}}, {{3}}, {{4}}, {mask}, {{scale}}, {{views}}{repeats})"


def _relax(attrs: Attrs) -> str:
    """Return the code of attention to the views of the states with their new elements."""
    attention = relax_attention({**attrs, "causal": False})
    for operand, name in (("{1}", "k"), ("{2}", "v"), ("{3}", "{5}")):
        attention = attention.replace(operand, name)
    return f"attention_of_states(lambda k, v: {attention}, ({{1}}, {{2}}), ({{3}}, {{4}}), {{views}})"


def _for_requests(attrs: Attrs) -> str:
    masks = "{5}" if attrs["masked"] else "None"
    repeats = f", {attrs['repeats']}" if attrs.get("repeats") else ""
    return f"attending.attend({{0}}, {{1}}, {{2}}, {masks}, {{scale}}, {{caches}}{repeats})"


def _load(types: Types, attrs: Attrs) -> str:
    _, viewed = _all_and_viewed(types, attrs)
    return load_kernel([types[0], *viewed], attrs)


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return 4.0 * results[0].elements * _all_and_viewed(types, attrs)[1][0].shape[2]


def _moved(types: Types, attrs: Attrs, results: Types) -> float:
    """States are read where they are, and new elements written there."""
    return float(sum(t.bytes for t in types) + results[0].bytes + sum(t.bytes for t in types[1:3]))


def _product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    return attention_products([types[0], *_all_and_viewed(types, attrs)[1]], attrs, results)


define(
    "nn.attention_of_states",
    Semantics(infer=_infer, torch=_torch),
    Split(_rule),
    cost=Cost(flops=_flops, moved=_moved, product=_product),
    code=Code(relax=_relax, mask=5),
    kernels=[ForRequests(_for_requests, _STATES, _load)],
)
