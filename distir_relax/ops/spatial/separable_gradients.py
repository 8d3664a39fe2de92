"""Gradients of separable linear ops, one matrix per dim: resizing, and adaptive average pooling.

The op itself computes the matrix from unit vectors. The gradient is a product with its transpose, dim by dim.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Backward, Gradient, cast, gradient_of, reshape_to


def separable_gradient(key: str) -> Gradient:
    """Return the gradient facet of an op on ``N C spatial`` data; attribute `key` has the result's spatial sizes."""

    def back(b: Backward) -> Value:
        sizes, sizes_out, grad = b.x().tensor.shape[2:], b.attrs[key], b.grad
        ones = (1,) * len(sizes)
        for i, (have, want) in enumerate(zip(sizes, sizes_out, strict=True)):
            if have != want:
                along = {**b.attrs, key: (*ones[:i], want, *ones[i + 1 :])}
                grad = apply_transpose(b, grad, i + 2, have, along, (have, 1, *ones[:i], have, *ones[i + 1 :]))
        return grad

    return gradient_of(back)


def apply_transpose(b: Backward, grad: Value, axis: int, have: int, attrs: Any, shape: tuple[int, ...]) -> Value:
    """Map dim `axis` of `grad` back to `have` elements, by the transpose of the op's matrix.

    The op with `attrs`, applied to the `have` unit vectors arranged as `shape`, gives the matrix.
    """
    rank, want = len(grad.tensor.shape), grad.tensor.shape[axis]
    at = b.emit("arange", start=0, end=have, stride=1, dtype="int64")
    units = cast(b.g, b.emit("equal", reshape_to(b.g, at, (have, 1)), at), grad.tensor.dtype)
    matrix = reshape_to(b.g, b.emit(b.op.name, reshape_to(b.g, units, shape), **attrs), (have, want))
    last = (*(d for d in range(rank) if d != axis), axis)
    back = tuple(map(last.index, range(rank)))
    permuted = axis != rank - 1
    grad = b.emit("permute_dims", grad, axes=last) if permuted else grad
    grad = b.emit("linear", grad, matrix)
    return b.emit("permute_dims", grad, axes=back) if permuted else grad
