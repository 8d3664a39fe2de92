"""Steps of optimizers in place, block by block: what a pass leaves in the cache, the next one finds there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 16
"""Elements of a block: of three tensors in float32, and what is computed of them, a megabyte."""


def moving_square(square: torch.Tensor, value: torch.Tensor, decay: float) -> torch.Tensor:
    """``square decay + value value (1 - decay)``, written where `square` is."""
    for v, g in _blocks(square, value):
        v.mul_(decay).addcmul_(g, g, value=1 - decay)
    return square


def adam_step(
    weight: torch.Tensor, average: torch.Tensor, square: torch.Tensor, rate: torch.Tensor, size: torch.Tensor,
    floor: torch.Tensor, decay: float,
) -> torch.Tensor:  # fmt: skip
    """``weight (1 - rate decay) - size average / (sqrt(square) + floor)``, written where `weight` is.

    `rate`, `size` and `floor` are numbers.
    """
    import torch

    kept = 1 - rate * decay
    for w, m, v in _blocks(weight, average, square):
        if decay:
            w.mul_(kept)
        way = v.sqrt().add_(floor)
        w.addcmul_(torch.div(m, way, out=way), size, value=-1)
    return weight


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same elements of each tensor, some at a time; all at once of tensors that lie otherwise, or on no CPU."""
    import torch

    first = tensors[0]
    if first.numel() <= BLOCK or first.device.type != "cpu" or not all(t.is_contiguous() for t in tensors):
        yield tensors
        return
    yield from zip(*(torch.split(t.view(-1), BLOCK) for t in tensors), strict=True)
