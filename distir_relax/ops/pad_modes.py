"""Padding with what a tensor itself holds: its edge, its reflection, or its other end. A look-up by known positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# From positions outside a dim of n elements to those inside that are taken instead.
_INSIDE: dict[str, Callable[[int, int], int]] = {
    "edge": lambda at, n: min(max(at, 0), n - 1),
    "reflect": lambda at, n: n - 1 - abs(at % (2 * n - 2) - (n - 1)) if n > 1 else 0,
    "wrap": lambda at, n: at % n,
}
_TORCH = {"replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def pad_by(g: Any, x: Any, low: Sequence[int], high: Sequence[int], mode: str) -> Any:
    """`x` with `low` and `high` elements more (fewer, when negative) at the ends of each dim.

    `mode` is ONNX's or torch's name. Raises NotImplementedError for another.
    """
    import torch

    inside = _INSIDE.get(_TORCH.get(mode, mode))
    if inside is None:
        raise NotImplementedError(f"padding of mode {mode!r}")
    for axis, (first, last) in enumerate(zip(low, high, strict=True)):
        size = x.type.shape[axis]
        if first or last:
            places = torch.tensor([inside(at, size) for at in range(-first, size + last)])
            x = g.emit("take", x, g.array(places, "positions"), axis=axis)
    return x
