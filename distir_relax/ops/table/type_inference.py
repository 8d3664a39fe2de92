"""Result type inference, checks and dtype limits shared by several families of ops."""

from __future__ import annotations

import math

from distir_relax.ir import TensorType
from distir_relax.layout import DTYPES
from distir_relax.ops.table.kernel import Attrs, Types


def broadcast_shape(types: Types) -> tuple[int, ...]:
    """Return the shape that all operands broadcast to; raise ValueError if there is none."""
    rank = max(len(t.shape) for t in types)
    shape = []
    for i in range(rank):
        sizes = {t.shape[i - rank + len(t.shape)] for t in types if i - rank + len(t.shape) >= 0} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {[t.shape for t in types]} do not broadcast")
        shape.append(sizes.pop() if sizes else 1)
    return tuple(shape)


def same_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Infer the type of the first operand."""
    return (types[0],)


def same_types(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Infer the common type of all operands; raise ValueError if they differ."""
    if any(t != types[0] for t in types):
        raise ValueError("expected operands of one type")
    return (types[0],)


def resized(kind: TensorType, dim: int, size: int) -> TensorType:
    """Return the type with another size of one dim."""
    return TensorType((*kind.shape[:dim], size, *kind.shape[dim + 1 :]), kind.dtype)


def checked_axis(types: Types, attrs: Attrs) -> int:
    """Return attribute `axis`; raise ValueError unless it is a dim of the first operand."""
    axis = int(attrs["axis"])
    if not 0 <= axis < len(types[0].shape):
        raise ValueError(f"axis {axis} of a tensor of {len(types[0].shape)} dims")
    return axis


def number_range(dtype: str) -> tuple[float, float]:
    """Return the smallest and largest padding value of a dtype: infinities for floats.

    torch passes the padding value as a float64, which cannot represent every large int64: the largest is 2**63 - 1024.
    """
    if "float" in dtype:
        return -math.inf, math.inf
    if dtype == "bool":
        return 0, 1
    bits = 8 * DTYPES[dtype][1]
    least, most = (0, 2**bits - 1) if dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return least, most if bits < 64 else 2**63 - 1024
