"""Weights that a GGUF file has in groups of 32, as they are: its types Q4_0, Q4_1 and Q8_0.

A row of a weight is blocks, each of the numbers of a group after its scale, and with Q4_1 its minimum, in float16. The
numbers of 4 bits lie in a byte as `distir_relax.kernels.quantized` has them. The formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (``block_q4_0`` and others).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distir_relax.kernels.quantized import GROUP

if TYPE_CHECKING:
    import torch

GROUP_BITS: Mapping[str, int] = MappingProxyType({"Q4_0": 4, "Q4_1": 4, "Q8_0": 8})
"""The bits of a number, by the names of the types."""
_FLOATS = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}
"""Numbers of float16 at the beginning of a block."""
_MIDDLE = 8
"""Of Q4_0, the number that stands for zero."""


def read_groups(kind: str, data: Any) -> list[torch.Tensor]:
    """Return the values, scales, and with 4 bits minimums, of a weight (n, k) of the type `kind`: see `GROUP_BITS`.

    `data` are its bytes, uint8 of shape (n, bytes of a row). None of its numbers is rounded. Raises `ValueError` for
    scales of Q4_0 that are so large that float16 has no minimum for them.
    """
    import numpy as np
    import torch

    floats = 2 * _FLOATS[kind]
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, floats + GROUP * GROUP_BITS[kind] // 8)
    numbers = np.ascontiguousarray(blocks[..., :floats]).view(np.float16)
    values = torch.from_numpy(np.ascontiguousarray(blocks[..., floats:]))
    scales = torch.from_numpy(np.ascontiguousarray(numbers[..., :1]))
    if GROUP_BITS[kind] == 8:
        return [values.view(torch.int8), scales]
    minimums = torch.from_numpy(np.ascontiguousarray(numbers[..., 1:])) if floats > 2 else -_MIDDLE * scales
    if not minimums.isfinite().all():
        raise ValueError("expected scales that float16 has eight times, found larger ones")
    return [values, scales, minimums]
