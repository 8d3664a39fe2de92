"""Attention to a part of the keys, which `distir_relax.ops.contraction.attention_split` joins, and its gradients."""

from __future__ import annotations

from collections.abc import Callable

from distir_relax.ir import TensorType
from distir_relax.kernels.native import STORED
from distir_relax.ops.contraction.attention import attention_products, infer_attention
from distir_relax.ops.contraction.attention_gradient import (
    attended_keys,
    gradient_cpu_workspace,
    gradient_products,
    infer_attention_gradient,
    is_added,
    mask_factors,
)
from distir_relax.ops.table import Attrs, Code, Cost, Rule, Semantics, Split, Types, define, parse_rule

Products = Callable[[Types, Attrs, Types], tuple[int, int, int, int]]
Work = Callable[[Types, Attrs, Types], float]

_MOST_SCORES = 1 << 22
"""Scores that are computed at a time, as in `distir_relax.kernels.attention`."""


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (y,) = infer_attention(types, attrs)
    return y, TensorType((*y.shape[:3], 1), _wide(y.dtype))


def _wide(dtype: str) -> str:
    """Return the dtype of normalizers."""
    return dtype if dtype == "float64" else "float32"


def _infer_gradient(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    results = infer_attention_gradient(types[:4], attrs)
    rows = TensorType((*types[0].shape[:3], 1), _wide(types[0].dtype))
    if any(t != rows for t in types[4:6]):
        raise ValueError(f"expected normalizers and means {rows}, found {types[4]} and {types[5]}")
    return results


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    head, key_head = ("[h]", "[k]") if attrs.get("grouped") else ("h", "h")
    operands = f"b {head} s [d], b {key_head} [t] [d], b {key_head} [t] e{mask_factors(types, 3, 's', '[t]')}"
    shapes = [t.shape for t in types], [t.shape for t in results]
    return parse_rule(f"{operands} -> b {head} s e, b {head} s [one]", *shapes)


def _gradient_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    # Gradients of keys and values are sums over rows.
    keys, rows = "b h [t] [d], b h [t] [e]", "b h s [e], b h s [one], b h s [one]"
    text = f"b h s [d], {keys}, {rows}{mask_factors(types, 6, 's', '[t]')} -> b h s [d], {keys}"
    return parse_rule(text, [t.shape for t in types], [t.shape for t in results], summed=("s",))


def _code(attrs: Attrs) -> str:
    repeats = f", {attrs['repeats']}" if attrs.get("repeats") else ""
    return (
        f"attention_parts.attend_part({{0}}, {{1}}, {{2}}, {'{3}' if attrs['masked'] else 'None'}, {{scale}}{repeats})"
    )


def _gradient_code(attrs: Attrs) -> str:
    operands = ", ".join(f"{{{n}}}" for n in range(6))
    return f"attention_parts.attention_part_grads({operands}, {'{6}' if attrs['masked'] else 'None'}, {{scale}})"


def _cpu(product: Products) -> Products:
    """Return the part of a product that CPUs compute: blocks of rows leave out keys that bounds exclude."""

    def part(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
        batch, rows, columns, inner = product(types, attrs, results)
        return batch, rows, attended_keys(rows, columns, attrs), inner

    return part


def _flops(product: Products) -> Callable[[Types, Attrs, Types], float]:
    def flops(types: Types, attrs: Attrs, results: Types) -> float:
        batch, rows, columns, inner = product(types, attrs, results)
        return 2.0 * batch * rows * columns * inner

    return flops


def _workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes of the scores and the weights of the rows that are computed at a time."""
    (b, h, s, _), t = types[0].shape, types[1].shape[2]
    return 8.0 * min(b * h * s * t, max(b * h * t, _MOST_SCORES))


def _cpu_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes beside the native kernel, which takes blocks of rows: none but for a mask that is added."""
    return _workspace(types, attrs, results) if is_added(attrs) or types[0].dtype not in STORED else 0.0


def _define(
    name: str, semantics: Semantics, split: Split, product: Products, code: Code, whole: str, cpu_workspace: Work
) -> None:
    """Define an op whose kernels are those of `whole`."""
    define(
        name,
        semantics,
        split,
        cost=Cost(
            flops=_flops(product),
            product=product,
            cpu_product=_cpu(product),
            kernels_of=whole,
            workspace=_workspace,
            cpu_workspace=cpu_workspace,
        ),
        code=code,
    )


_define(
    "attention_part",
    Semantics(infer=_infer, torch=_code),
    Split(_rule),
    attention_products,
    Code(relax=_code, unrepeated=(1, 2), mask=3),
    "nn.scaled_dot_product_attention",
    _cpu_workspace,
)
_define(
    "attention_part_grad",
    Semantics(infer=_infer_gradient, torch=_gradient_code),
    Split(_gradient_rule),
    gradient_products,
    Code(relax=_gradient_code, mask=6),
    "attention_grad",
    gradient_cpu_workspace,
)
