"""Products of rows with the quantized weights of their groups (experts), each packed as that of a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels import routing
from distir_relax.kernels.quantized.linear import pack_quantized

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.packing import Packed


def pack_quantized_experts(*weight: torch.Tensor, dtype: torch.dtype, is_sorted: bool) -> QuantizedExperts:
    """Return the products with weights (n, k), one for each group, for inputs of `dtype`.

    The tensors of `weight` have a format of `quantized.weights`, stacked along a leading dim. The products take rows,
    and if these are sorted by group the bounds of the groups (`routing.multiply_sorted`), else ids of rows and of
    groups (`routing.multiply`). Raises `ValueError` as `pack_quantized` does.
    """
    packed = [pack_quantized(*parts, dtype=dtype, rows=1) for parts in zip(*weight, strict=True)]
    return QuantizedExperts(packed, weight[0].shape[1], is_sorted)


class QuantizedExperts:
    """See `pack_quantized_experts`; each group has a map of rows to so many `columns`."""

    def __init__(self, packed: Sequence[Packed], columns: int, is_sorted: bool) -> None:
        self.packed, self.columns = packed, columns
        self._multiply = routing.multiply_sorted if is_sorted else routing.multiply

    def __call__(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, first, second, self.columns, lambda group, rows: self.packed[group](rows))
