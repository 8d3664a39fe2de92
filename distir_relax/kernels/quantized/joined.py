"""Products of one input with several quantized weights, computed as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels.packing import JoinedLinear
from distir_relax.kernels.quantized.linear import pack_quantized
from distir_relax.kernels.quantized.reference import parts

if TYPE_CHECKING:
    import torch


def pack_joined_quantized(weights: Sequence[torch.Tensor], *, dtype: torch.dtype, rows: int) -> JoinedLinear:
    """Return the maps of one input by several weights of one format: their results are views of one tensor.

    `weights` has the tensors of each weight, one weight after the other; see `pack_quantized` for the rest.
    """
    import torch

    step = parts(weights[0])
    packed = pack_quantized(*(torch.cat(list(weights[i::step])) for i in range(step)), dtype=dtype, rows=rows)
    return JoinedLinear(packed, [len(values) for values in weights[::step]])
