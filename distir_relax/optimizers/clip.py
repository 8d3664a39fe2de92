"""Norm of all gradients of a program, and clipping by it: `torch.nn.utils.clip_grad_norm_`.

Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, 2012.
"""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.ir import Value
from distir_relax.ops import Builder, cast

# As in torch: avoids a division by zero.
_EPS = 1e-6


def norm_of_gradients(g: Builder, gradients: Mapping[str, Value]) -> Value:
    """Emit the norm of all gradients together: a scalar of float32, or float64 if a gradient is.

    It is one scalar of the program, independent of how gradients are sharded.
    """
    acc = "float64" if any(v.tensor.dtype == "float64" for v in gradients.values()) else "float32"
    total: Value | None = None
    # Large gradients are sharded if any are: then one partial sum of all of those is reduced.
    for gradient in sorted(gradients.values(), key=lambda v: -v.tensor.typical.elements):
        square = g.emit("square", cast(g, gradient, acc))
        term = g.aten("sum.default", square)
        total = term if total is None else g.emit("add", total, term)
    assert total is not None, "there are gradients"
    norm: Value = g.emit("sqrt", total)
    return norm


def clip_gradients(g: Builder, gradients: Mapping[str, Value], norm: float, total: Value) -> dict[str, Value]:
    """Emit the gradients times ``min(1, norm / (total + 1e-6))``, where `total` is their norm."""
    acc = total.tensor.dtype
    length = g.emit("add", total, g.constant(_EPS, acc))
    scale = g.emit("minimum", g.emit("divide", g.constant(norm, acc), length), g.constant(1.0, acc))
    scales = {dtype: cast(g, scale, dtype) for dtype in {v.tensor.dtype for v in gradients.values()}}
    return {name: g.emit("multiply", v, scales[v.tensor.dtype]) for name, v in gradients.items()}
