"""Gradient of attention as one op, which computes the weights again.

It splits by batch, heads, rows, keys and the width of values. If one of the last three is split, gradients that lack
the dim are partial sums.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.kernels.native import LEAST_SCORES, STORED, gradient_scratch
from distir_relax.ops.contraction.attention_split import (
    ALGORITHMS,
    KEPT,
    attention_gradient_in_turns,
    split_keys_of_gradient,
)
from distir_relax.ops.contraction.matmul import transpose
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Gradient,
    Ring,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    operands,
    parse_rule,
    reshape_to,
)

# Score of masked keys; finite, so that a fully masked row is not NaN.
MASKED_SCORE = -1e30
_MOST_SCORES = 1 << 22
"""Scores that are computed at a time, as in `distir_relax.kernels.attention`."""


def attention_gradient(b: Backward) -> tuple[Value | None, ...]:
    """Dao et al., FlashAttention, 2022.

    The gradient of a mask is that of the scores, which the op does not give: then the gradients are ops of the table.
    """
    q, k, v, *masks = b.op.operands
    if 3 in b.wrt:
        return _by_ops(b)
    attrs = {name: b.attrs[name] for name in KEPT if name in b.attrs}
    grads: tuple[Value, ...] = b.emit("attention_grad", q, k, v, b.grad, *masks, **attrs)
    return (*grads, None)[: len(b.op.operands)]


def _by_ops(b: Backward) -> tuple[Value | None, ...]:
    (q, k, v, mask), g = b.op.operands, b.g
    weights = attention_weights(g, q, k, mask, b.attrs["causal"], b.attrs["scale"])
    of_scores = _of_softmax(b, weights, b.emit("matmul", b.grad, transpose(g, v)))
    scaled = b.emit("multiply", of_scores, b.number(b.attrs["scale"]))
    return (
        b.emit("matmul", scaled, k), b.emit("matmul", transpose(g, scaled), q),
        b.emit("matmul", transpose(g, weights), b.grad), of_scores,
    )  # fmt: skip


def attention_weights(g: Builder, q: Value, k: Value, mask: Value | None, causal: bool, scale: float) -> Any:
    """Emit the attention weights, (b, h, s, t)."""
    dtype = q.tensor.dtype
    scores = g.emit("multiply", g.emit("matmul", q, transpose(g, k)), g.constant(scale, dtype))
    if mask is not None and mask.tensor.dtype == "int64":
        mask = _within_bounds(g, mask, k.tensor.shape[2])
    boolean = mask is not None and mask.tensor.dtype == "bool"
    if mask is not None and not boolean:
        scores = g.emit("add", scores, mask)
    allowed = _attention_mask(g, q, k, mask if boolean else None, causal)
    if allowed is None:
        return g.emit("nn.softmax", scores, axis=3)
    weights = g.emit("nn.softmax", g.emit("where", allowed, scores, g.constant(MASKED_SCORE, dtype)), axis=3)
    # A fully masked row has weights of zero.
    return g.emit("where", allowed, weights, g.constant(0.0, dtype))


def _within_bounds(g: Builder, bounds: Value, keys: Any) -> Any:
    """Return the mask (s, t), or (b, 1, s, t), of bounds of each row (`lowering.BoundAttention`)."""
    column = g.emit("arange", start=0, end=keys, stride=1, dtype="int64")
    if len(bounds.tensor.shape) == 3:
        bounds = reshape_to(g, bounds, (bounds.tensor.shape[0], 1, *bounds.tensor.shape[1:]))
    axes = (len(bounds.tensor.shape) - 1,)
    first, end = (g.emit("strided_slice", bounds, axes=axes, begin=(n,), end=(n + 1,), strides=(1,)) for n in (0, 1))
    return g.emit("logical_and", g.emit("greater_equal", column, first), g.emit("less", column, end))


def _attention_mask(g: Builder, q: Value, k: Value, mask: Value | None, causal: bool) -> Value | None:
    """Return a mask of the keys that each query row attends to; None if all."""
    if not causal:
        return mask
    rows, columns = q.tensor.shape[2], k.tensor.shape[2]
    row = g.emit("reshape", g.emit("arange", start=0, end=rows, stride=1, dtype="int64"), shape=(rows, 1))
    column = g.emit("arange", start=0, end=columns, stride=1, dtype="int64")
    before: Value = g.emit("greater_equal", row, column)
    return before if mask is None else g.emit("logical_and", before, mask)


def _of_softmax(b: Backward, weights: Value, of_weights: Value) -> Any:
    """Emit the gradient of scores from that of their softmax."""
    return b.emit("multiply", weights, b.emit("subtract", of_weights, _mean(b, weights, of_weights)))


def _mean(b: Backward, weights: Value, values: Value) -> Any:
    return b.emit("sum", b.emit("multiply", weights, values), axis=(3,), keepdims=True)


def infer_attention_gradient(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Return the types of the gradients. Raises ValueError for operands of other shapes."""
    q, k, v, grad = types[:4]
    if len(q.shape) != 4 or q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError("expected query (b, h, s, d), key (b, h, t, d) and value (b, h, t, e)")
    if grad.shape != (*q.shape[:3], v.shape[3]) or not q.dtype == k.dtype == v.dtype == grad.dtype:
        raise ValueError("expected a gradient (b, h, s, e), and all of one dtype")
    return q, k, v


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    row, key = rows_and_keys(attrs)
    text = f"b h {row} [d], b h {key} [d], b h {key} e, b h {row} e" + mask_factors(types, 4, row, key)
    shapes = [t.shape for t in types], [t.shape for t in results]
    return parse_rule(f"{text} -> b h {row} [d], b h {key} [d], b h {key} e", *shapes, summed=("s", "t", "e"))


def rows_and_keys(attrs: Attrs) -> tuple[str, str]:
    """Return the factors of rows and keys: those that a causal mask counts from the first must be whole."""
    return ("[s]", "[t]") if attrs["causal"] else ("s", "t")


def mask_factors(types: Types, number: int, row: str, key: str) -> str:
    """Return the text of a mask in a rule, after a comma, if there is an operand with this number."""
    if len(types) <= number:
        return ""
    shape = types[number].shape
    if types[number].dtype == "int64":
        of_sample = "b " if len(shape) == 3 else ""
        return f", {of_sample}{row if shape[-2] == types[0].shape[2] else '[one]'} [two]"
    return ", " + " ".join(["b", "h", row, key][4 - len(shape) :])


def attended_keys(rows: int, keys: int, attrs: Attrs) -> int:
    """Return the mean number of keys for which a CPU's kernels compute a row's scores: with a causal mask, those up to
    the row's own, and with bounds, the part of the keys that the attribute `density` has. A boolean mask of a sequence
    to itself counts as causal, as that of language models is."""
    density: float | None = attrs.get("density")
    if density is not None:
        return max(1, round(keys * density))
    is_causal = attrs["causal"] or (attrs["masked"] and not is_added(attrs) and rows == keys)
    return (keys + 1) // 2 if is_causal else keys


def is_added(attrs: Attrs) -> bool:
    """Return whether the mask is added to the scores."""
    return attrs["masked"] and not attrs["boolean"] and not attrs.get("bounded")


def gradient_products(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    """Return the combined product of scores, and of the gradients of weights, queries, keys and values."""
    (b, h, s, d), (_, _, t, e) = types[0].shape, types[2].shape
    return b * h, s, t, 3 * d + 2 * e


def _cpu_product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    batch, rows, columns, inner = gradient_products(types, attrs, results)
    return batch, rows, attended_keys(rows, columns, attrs), inner


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    batch, rows, columns, inner = gradient_products(types, attrs, results)
    return 2.0 * batch * rows * columns * inner


def _workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes of weights, their gradients, and those of scores, of the rows that are computed at a time.

    In blocks of a head's rows, the gradients of keys and values are added in float32 as well.
    """
    (b, h, s, _), t = types[0].shape, types[1].shape[2]
    added = 4.0 * t * (types[1].shape[3] + types[2].shape[3]) if s * t > _MOST_SCORES else 0.0
    each = types[0].bytes / max(types[0].elements, 1)
    return 3.0 * min(b * h * s * t, max(t, _MOST_SCORES)) * each + added


def _second_gradient(b: Backward) -> tuple[Value | None, ...]:
    """With weights `p`, of gradient `a`, the gradient of the scores is ``e = p (a - sum(p a))``.

    The op's results are ``c e k``, ``c e' q`` and ``p' g``, whose gradients are `u`, `w` and `z`.
    """
    q, k, v, grad, *masks = b.op.operands
    of_q, of_k, of_v = (b.zeros(x) if one is None else one for one, x in zip(b.grads, (q, k, v), strict=True))
    p = attention_weights(b.g, q, k, masks[0] if masks else None, b.attrs["causal"], b.attrs["scale"])
    a = b.emit("matmul", grad, transpose(b.g, v))
    e = _of_softmax(b, p, a)
    scale = b.g.constant(b.attrs["scale"], q.tensor.dtype)

    def scaled(x: Value, y: Value) -> Any:
        return b.emit("multiply", b.emit("matmul", x, y), scale)

    of_e = b.emit("add", scaled(of_q, transpose(b.g, k)), scaled(q, transpose(b.g, of_k)))
    of_a = _of_softmax(b, p, of_e)
    # Both factors of `e` depend on `p`.
    centred = b.emit("subtract", a, _mean(b, p, a))
    of_p = b.emit("subtract", b.emit("multiply", of_e, centred), b.emit("multiply", a, _mean(b, p, of_e)))
    of_p = b.emit("add", of_p, b.emit("matmul", grad, transpose(b.g, of_v)))
    of_scores = _of_softmax(b, p, of_p)
    return (
        b.emit("add", scaled(of_scores, k), scaled(e, of_k)),
        b.emit("add", scaled(transpose(b.g, of_scores), q), scaled(transpose(b.g, e), of_q)),
        b.emit("matmul", transpose(b.g, of_a), grad),
        b.emit("add", b.emit("matmul", of_a, v), b.emit("matmul", p, of_v)),
        of_scores,
    )[: len(b.op.operands)]


def _code(attrs: Attrs) -> str:
    mask = "{4}" if attrs["masked"] else "None"
    return f"attention_gradients.attention_grads({{0}}, {{1}}, {{2}}, {{3}}, {mask}, {{scale}}, {{causal}})"


def gradient_cpu_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes of the native kernel, which computes a head at a time, if there are enough scores for it."""
    (b, h, s, d), (_, _, t, e) = types[0].shape, types[2].shape
    if (
        b * h * s * t < LEAST_SCORES
        or types[0].dtype not in STORED
        or (attrs["masked"] and not (attrs["boolean"] or attrs.get("bounded")))
    ):
        return _workspace(types, attrs, results)
    return 4.0 * gradient_scratch(s, t, d, e)


define(
    "attention_grad",
    Semantics(infer=infer_attention_gradient, torch=_code, linear=(operands(3),)),
    Split(
        _rule,
        expand={"t": split_keys_of_gradient},
        ring={"s": Ring("t", attention_gradient_in_turns, work=1.1)},
        positional=frozenset({"t"}),
        exact=frozenset({"t"}),
        algorithms=ALGORITHMS,
    ),
    cost=Cost(
        flops=_flops,
        product=gradient_products,
        cpu_product=_cpu_product,
        workspace=_workspace,
        cpu_workspace=gradient_cpu_workspace,
    ),
    code=Code(relax=_code, mask=4),
    gradient=Gradient(all=_second_gradient),
    traits={Trait.KEEPS_ORDER},
)
