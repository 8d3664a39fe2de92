"""Products with weights of 8 or 4 bits, and rows of tables of such numbers (`distir_relax.kernels.quantized`).

A weight is several operands: values and scales, and with 4 bits minimums. Its inner dim is cut between groups. The
product is that with the dequantized weight; a rank whose weights are constant rounds inputs to 8 bits as well.
"""

from __future__ import annotations

import math

from distir_relax.ir import TensorType
from distir_relax.kernels.quantized.weights import GROUP, parts_of
from distir_relax.ops.table import (
    Attrs,
    Code,
    Cost,
    Packed,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    operands,
    parse_rule,
)

_SIZES = {"i": GROUP, "j": GROUP // 2}


def _inner(values: TensorType) -> int:
    """Return the inner size of a weight."""
    return values.shape[1] if len(values.shape) == 2 else values.shape[1] * GROUP


def _are_numbers(types: Types, shape: tuple[int, ...]) -> bool:
    """Return whether scales, and perhaps minimums, have a shape."""
    return all(t.shape == shape and "float" in t.dtype for t in types)


def _check_weight(weight: Types) -> None:
    values, *numbers = weight
    shape: tuple[int, ...] = (values.shape[0], 1)
    is_valid = values.dtype == "int8"
    if len(values.shape) != 2:
        shape = (*values.shape[:2], 1)
        sizes = {"int8": GROUP, "uint8": GROUP // 2}
        is_valid = len(values.shape) == 3 and values.shape[2] == sizes.get(values.dtype)
    if not is_valid or len(weight) != parts_of(values.dtype) or not _are_numbers(numbers, shape):
        raise ValueError("expected a weight of values and scales, or with 4 bits of values, scales and minimums")


def infer_product(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Return the result type of a product; raises `ValueError` for operands that do not fit."""
    x, *weight = types
    _check_weight(weight)
    if x.shape[-1:] != (_inner(weight[0]),) or "float" not in x.dtype:
        raise ValueError("expected the last dim of the input to equal that of the weight")
    return (TensorType((*x.shape[:-1], weight[0].shape[0]), x.dtype),)


def weight_text(weight: Types, columns: str, stack: str = "") -> str:
    """Return the text of a weight in a rule, after a `stack` of them if that is not empty."""
    leading = f"{stack} {columns}"
    if len(weight[0].shape) == 2:
        return f"{leading} (g [i]), {leading} 1"
    return _groups_text(weight, leading)


def _groups_text(weight: Types, leading: str) -> str:
    """Return the text of a weight in groups, after its `leading` dims."""
    packed = "[i]" if weight[0].dtype == "int8" else "[j]"
    return ", ".join([f"{leading} g {packed}", *[f"{leading} g 1"] * (len(weight) - 1)])


def _product_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    text = f"... (g [i]), {weight_text(types[1:], 'n')} -> ... n"
    return parse_product(text, types, results)


def parse_product(text: str, types: Types, results: Types) -> Rule:
    """Return the rule `text` of a product whose first operand has the inner dim last, as ``(g [i])``."""
    groups = types[0].shape[-1] // GROUP
    return parse_rule(text, [t.shape for t in types], [t.shape for t in results], {**_SIZES, "g": groups})


def _product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    columns = sum(t.shape[-1] for t in results)
    return 1, math.prod(types[0].shape[:-1]), columns, types[0].shape[-1]


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return 2.0 * math.prod(_product(types, attrs, results))


define(
    "quantized_linear",
    Semantics(infer=infer_product, torch="quantized.product({*})", linear=(operands(0),)),
    Split(_product_rule),
    cost=Cost(flops=_flops, product=_product),
    code=Code(joined="joined_quantized_linear", relax="quantized.product({*})"),
    kernels=[Packed("pack_quantized({weights}, dtype=torch.{dtype}, rows={rows})")],
    traits={Trait.ZERO_IF_EMPTY},
)


# Products of one input with several weights, created by local fusion.


def _weights(types: Types) -> list[Types]:
    """Return the operand types of each weight."""
    step = parts_of(types[1].dtype) if len(types) > 1 else 0
    if not step or (len(types) - 1) % step:
        raise ValueError("expected an input, and values and scales of each weight, or minimums as well")
    return [types[i : i + step] for i in range(1, len(types), step)]


def _infer_joined(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return tuple(infer_product((types[0], *weight), attrs)[0] for weight in _weights(types))


def _joined_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    weights = ", ".join(weight_text(weight, f"n{i}") for i, weight in enumerate(_weights(types)))
    outputs = ", ".join(f"... n{i}" for i in range(len(results)))
    return parse_product(f"... (g [i]), {weights} -> {outputs}", types, results)


define(
    "joined_quantized_linear",
    Semantics(infer=_infer_joined, torch="quantized.products({*})"),
    Split(_joined_rule),
    cost=Cost(flops=_flops, product=_product),
    code=Code(relax="quantized.products({*})"),
    kernels=[Packed("pack_joined_quantized([{weights}], dtype=torch.{dtype}, rows={rows})")],
)


# The rows of a table of embeddings


def _infer_dequantized(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    values, *numbers = types
    shape = (*values.shape[:-1], 1)
    if len(types) != parts_of(values.dtype) or not _are_numbers(numbers, shape):
        raise ValueError("expected values and scales, or with 4 bits values, scales and minimums")
    if not attrs["grouped"]:
        return (TensorType(values.shape, attrs["dtype"]),)
    return (TensorType((*values.shape[:-2], values.shape[-2] * GROUP), attrs["dtype"]),)


def _dequantized_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    text, sizes = "... k, ... 1 -> ... k", {}
    if attrs["grouped"]:
        text, sizes = f"{_groups_text(types, '...')} -> ... (g [i])", {**_SIZES, "g": types[0].shape[-2]}
    return parse_rule(text, [t.shape for t in types], [t.shape for t in results], sizes)


def _dequantize(attrs: Attrs) -> str:
    return f"quantized.rows({{*}}, grouped={bool(attrs['grouped'])}, dtype=torch.{{dtype!s}})"


define(
    "dequantize",
    Semantics(infer=_infer_dequantized, torch=_dequantize),
    Split(_dequantized_rule),
    code=Code(relax="quantized.rows({*}, grouped={grouped}, dtype={dtype})"),
)
