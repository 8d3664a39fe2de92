"""Differences between tensors, and the difference that rounding explains.

The error of an element is relative to the tensor's scale: ``|found - expected| / (|expected| + rms(expected))``. The
error of a tensor is its largest one. Two evaluations of a program differ by more where it amplifies rounding, so the
bound of a value is a multiple of the error of the reference itself, measured against one in float64, and at least of
``eps * sqrt(n)``, for the `n` operations that each element takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distir_relax.ir import Op, TensorType
from distir_relax.ops import lookup

if TYPE_CHECKING:
    import torch

DEFAULT_TOLERANCE = 16.0
"""Multiple of the rounding error of the reference that a right value may have."""


@dataclass(frozen=True)
class Difference:
    """The error of a tensor, and its largest difference: where, and both elements there.

    Without elements, and for equal tensors, the error is 0 and the position empty. Unequal integers, and a NaN or
    infinity in one tensor only, have an infinite error.
    """

    error: float = 0.0
    index: tuple[int, ...] = ()
    found: float = 0.0
    expected: float = 0.0


def difference(found: torch.Tensor, expected: torch.Tensor, scale: float | None = None) -> Difference:
    """Return the largest difference of two tensors of one shape; `scale` is by default the rms of `expected`."""
    import torch

    is_exact = not (expected.is_floating_point() or expected.is_complex())
    if not expected.numel() or torch.equal(found, expected):
        return Difference()
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    a, b = found.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if is_exact:
        errors = torch.where(same, 0.0, math.inf)
    else:
        scale = rms(b) if scale is None else scale
        errors = torch.where(same, 0.0, (a - b).abs() / (b.abs() + scale).clamp(min=1e-300))
        # An infinity less an infinity is no number.
        errors = torch.where(same | (a.isfinite() & b.isfinite()), errors, math.inf)
    position = int(errors.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), errors.shape))
    return Difference(float(errors[index]), index, float(a[index]), float(b[index]))


def rms(tensor: torch.Tensor) -> float:
    """Return the root mean square of a tensor's finite elements; 0 without any."""
    import torch

    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    if math.isfinite(norm):
        return norm / math.sqrt(max(1, tensor.numel()))
    finite = tensor[tensor.isfinite()]
    return rms(finite) if finite.numel() < tensor.numel() else math.inf


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference relative to that of `expected`; infinite relative to zero."""
    a, b = found.double(), expected.double()
    wrong, whole = (a - b).norm().item(), b.norm().item()
    return wrong / whole if whole else math.inf if wrong else 0.0


def least_bound(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType]) -> float:
    """Return the error of an op's results by the rounding of one operation: ``eps * sqrt(n)``, 0 of integers."""
    import torch

    floats = [t for t in (*operands, *results) if "float" in t.dtype]
    if not floats:
        return 0.0
    count = lookup(op.name, op.location).cost.flops
    flops = count(tuple(operands), op.attrs, tuple(results)) if count is not None else 0.0
    elements = max(1, sum(t.elements for t in results))
    eps = max(torch.finfo(getattr(torch, t.dtype)).eps for t in floats)
    return eps * math.sqrt(max(1.0, float(flops) / elements))
