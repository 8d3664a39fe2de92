"""Gradients scaled down together: `torch.nn.utils.clip_grad_norm_`.

Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, 2012.
"""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.ir import Value
from distir_relax.ops import Builder, cast

# As torch has it: no gradients at all are not divided by zero.
_LEAST = 1e-6


def clipped(g: Builder, gradients: Mapping[str, Value], norm: float) -> dict[str, Value]:
    """Write with `g` the gradients times ``min(1, norm / (theirs + 1e-6))``, `theirs` being that of all together.

    It is one number of the program, whatever rank holds what of a gradient.
    """
    wide = "float64" if any(v.tensor.dtype == "float64" for v in gradients.values()) else "float32"
    total: Value | None = None
    for gradient in gradients.values():
        square = g.emit("square", cast(g, gradient, wide))
        part = g.aten("sum.default", square)
        total = part if total is None else g.emit("add", total, part)
    assert total is not None, "there are gradients"
    length = g.emit("add", g.emit("sqrt", total), g.constant(_LEAST, wide))
    scale = g.emit("minimum", g.emit("divide", g.constant(norm, wide), length), g.constant(1.0, wide))
    scales = {dtype: cast(g, scale, dtype) for dtype in {v.tensor.dtype for v in gradients.values()}}
    return {name: g.emit("multiply", v, scales[v.tensor.dtype]) for name, v in gradients.items()}
