"""In-place optimizer steps, in blocks that stay in the cache from one operation to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 16
"""Elements of a block: three float32 tensors and their temporaries take a megabyte."""


def moving_square(square: torch.Tensor, value: torch.Tensor, decay: float) -> torch.Tensor:
    """``square decay + value value (1 - decay)``, in place of `square`."""
    for v, g in _blocks(square, value):
        v.mul_(decay).addcmul_(g, g, value=1 - decay)
    return square


def adam_step(
    weight: torch.Tensor, average: torch.Tensor, square: torch.Tensor, rate: torch.Tensor, size: torch.Tensor,
    floor: torch.Tensor, decay: float,
) -> torch.Tensor:  # fmt: skip
    """``weight (1 - rate decay) - size average / (sqrt(square) + floor)``, in place of `weight`.

    `rate`, `size` and `floor` are scalars.
    """
    import torch

    decay_factor = 1 - rate * decay
    for w, m, v in _blocks(weight, average, square):
        if decay:
            w.mul_(decay_factor)
        denominator = v.sqrt().add_(floor)
        w.addcmul_(torch.div(m, denominator, out=denominator), size, value=-1)
    return weight


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield corresponding blocks of all tensors; whole tensors if small, not contiguous, or not on the CPU."""
    import torch

    first = tensors[0]
    if first.numel() <= BLOCK or first.device.type != "cpu" or not all(t.is_contiguous() for t in tensors):
        yield tensors
        return
    yield from zip(*(torch.split(t.view(-1), BLOCK) for t in tensors), strict=True)
