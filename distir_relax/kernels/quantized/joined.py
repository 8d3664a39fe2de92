"""Products of one input with several quantized weights, computed as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels.quantized.linear import pack_quantized
from distir_relax.kernels.quantized.reference import parts

if TYPE_CHECKING:
    import torch


def pack_joined_quantized(
    weights: Sequence[torch.Tensor], *, dtype: torch.dtype, rows: int
) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the maps of one input by several weights of one format: their results are views of one tensor.

    `weights` has the tensors of each weight, one weight after the other; see `pack_quantized` for the rest.
    """
    import torch

    step = parts(weights[0])
    packed = pack_quantized(*(torch.cat(list(weights[i::step])) for i in range(step)), dtype=dtype, rows=rows)
    sizes = [len(values) for values in weights[::step]]

    def apply(x: torch.Tensor) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = torch.split_with_sizes(packed(x), sizes, -1)
        return found

    return apply
