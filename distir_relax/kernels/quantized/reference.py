"""The meaning of quantized weights: products with the dequantized weight, and rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels import routing
from distir_relax.kernels.quantized.weights import GROUP, dequantize, parts_of

if TYPE_CHECKING:
    import torch


def product(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
    """Return the product of `x` (..., k) with a weight (n, k), its values, scales and minimums: (..., n)."""
    import torch

    values, scales, *minimums = weight
    whole = dequantize(values, scales, minimums[0] if minimums else None, x.dtype)
    return torch.nn.functional.linear(x, whole)


def products(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the products of `x` with several weights of one format, whose tensors follow each other."""
    step = parts(weights[0])
    return tuple(product(x, *weights[i : i + step]) for i in range(0, len(weights), step))


def grouped_product(x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Return the products of rows (rows, k) sorted by group with the weights of their groups, stacked (groups, n, k).

    `operands` are the tensors of the weights, and the bounds of the groups: see `routing.multiply_sorted`.
    """
    *weight, starts, ends = operands
    return routing.multiply_sorted(x, starts, ends, weight[0].shape[1], _product_of_group(weight))


def routed_product(x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Return the same of rows in any order: `operands` end with ids and groups, as in `routing.multiply`."""
    *weight, ids, groups = operands
    return routing.multiply(x, ids, groups, weight[0].shape[1], _product_of_group(weight))


def _product_of_group(weight: Sequence[torch.Tensor]) -> routing.Product:
    return lambda group, x: product(x, *(part[group] for part in weight))


def rows(
    values: torch.Tensor, scales: torch.Tensor, *minimums: torch.Tensor, grouped: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows of a weight, with any leading dims: (..., k), if `grouped` from values (..., k / 32, 32 or 16)."""
    leading = values.shape[: -2 if grouped else -1]
    width = values.shape[-2] * GROUP if grouped else values.shape[-1]
    flat_values, flat_scales, *flat_minimums = (
        x.reshape(leading.numel(), *x.shape[len(leading) :]) for x in (values, scales, *minimums)
    )
    found = dequantize(flat_values, flat_scales, flat_minimums[0] if minimums else None, dtype)
    return found.reshape(*leading, width)


def parts(values: torch.Tensor) -> int:
    """Return the number of tensors of a weight, by its values."""
    return parts_of(str(values.dtype).removeprefix("torch."))
